"""The native half of gids. Bound in native/bind; every call releases the GIL while it works."""

import numpy as np
import numpy.typing as npt

class Engine:
    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def bounce_bytes(self) -> int: ...
    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        errors: npt.NDArray[np.int32],
    ) -> None: ...
    def stats(self) -> dict[str, int | float]: ...
    def inject_faults(self, faults: list[tuple[int, int, int, int]]) -> None: ...
    def close(self) -> None: ...

def open_engine(
    kind: str,
    paths: list[str],
    *,
    depth: int,
    threads: int,
    direct: bool,
    max_read_bytes: int,
    max_merge_bytes: int,
) -> Engine: ...
def probe_file(path: str, *, direct: bool) -> tuple[str, int]: ...
def why_no_uring() -> str: ...
from numpy.typing import NDArray

# native/bind/store.cpp
def crc32c(pages: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC32C of each page. pages: uint8[n, page_bytes], C order. Returns uint32[n]."""

def crc32c_extend(crc: int, data: NDArray[np.uint8]) -> int:
    """CRC32C of the bytes that led to crc (0: none) followed by data, uint8[n]."""

def crc32c_portable(crc: int, data: NDArray[np.uint8]) -> int:
    """crc32c_extend without the processor's instruction, for comparison."""

def crc32c_kind() -> str:
    """'sse4.2' or 'portable': what crc32c runs here."""

def count_sources(
    indices: NDArray[np.int32] | NDArray[np.int64], limit: int, first: int, counts: NDArray[np.uint32]
) -> int | None:
    """Add to counts (saturating) how often each of first, first + 1, ... occurs in indices.

    Returns None, or the position of the first index outside [0, limit)."""

def sort_edges(
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    ids: NDArray[np.int64],
    first: int,
    offsets: NDArray[np.int64],
    sorted_sources: NDArray[np.int64],
    sorted_ids: NDArray[np.int64],
) -> int | None:
    """Stable sort of edges by destination, all in [first, first + len(offsets) - 1).

    Fills offsets and the sorted arrays. Returns None, or the position of the first
    destination out of range."""
