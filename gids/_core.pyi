"""The native half of gids. Bound in native/bind; every call releases the GIL while it works."""

import numpy as np
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

def sort_neighbors(offsets: NDArray[np.int64], sources: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
    """Sort the edges of each destination by source, stably and in place.

    Destination v has those from offsets[v] to offsets[v + 1]. ValueError when offsets are none."""

def carry_to_sources(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32] | NDArray[np.int64],
    shares: NDArray[np.float64],
    visits: NDArray[np.float64],
) -> int | None:
    """Add shares[v] to visits[s] for each in-edge of destination v from source s.

    Destination v has the edges indptr[v] to indptr[v + 1] of indices. Returns None, or the position
    of the first source that visits has no place for. ValueError for a bad indptr."""

# native/bind/io.cpp
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
        files: NDArray[np.uint32],
        offsets: NDArray[np.int64],
        out: NDArray[np.uint8],
        errors: NDArray[np.int32],
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

# native/bind/cache.cpp
USE_BITS: int
"""Minibatches that may be live (in the window or planned) at once."""
LINE_METADATA_BYTES: int
MAX_LINES: int

class Workers:
    def __init__(self, threads: int) -> None: ...

class BufferPool:
    @staticmethod
    def create(keep_bytes: int) -> BufferPool: ...
    def take(self, bytes: int) -> NDArray[np.uint8]:
        """uint8[bytes]; goes back to the pool when the last view of it is gone."""
    @property
    def taken_bytes(self) -> int: ...
    @property
    def idle_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...

class Planner:
    """Which pages are in the cache: metadata only. Steps enter, are planned and retire in order."""

    def __init__(
        self,
        pages: int,
        lines: int,
        policy: str = "lookahead",
        seed: int = 0,
        heat: NDArray[np.uint8] | None = None,
    ) -> None: ...
    def enter(self, step: int, pages: NDArray[np.int64]) -> int:
        """Mark a minibatch's pages, int64[n]. Returns how many are unique. IndexError: nothing is marked."""
    def plan(self, step: int) -> tuple[int, int, int]:
        """(hits, loads, bypasses) in pages; loads are complete at once."""
    def retire(self, step: int) -> None: ...
    def words(self) -> NDArray[np.uint64]: ...
    def audit(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

class PageCache:
    """One table's cache in host memory; gids.cache.FeatureCache is its user."""

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        *,
        row_count: int,
        row_bytes: int,
        page_bytes: int,
        rows_per_page: int,
        shard_count: int,
        first_file: int,
        lines: int,
        policy: str,
        seed: int = 0,
        heat: NDArray[np.uint8] | None = None,
        checksums: NDArray[np.uint32] | None = None,
    ) -> None: ...
    def check(self, ids: NDArray[np.int64]) -> None: ...
    def enter(self, step: int, ids: NDArray[np.int64]) -> int: ...
    def plan(self, step: int, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None: ...
    def gather(self, step: int) -> list[tuple[int, int, int]]:
        """Wait and copy. Returns (file, offset, errno) of each page that could not be read."""
    def retire(self, step: int) -> None: ...
    def cancel(self) -> int: ...
    def read_through(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> list[tuple[int, int, int]]: ...
    def audit(self) -> None: ...
    def words(self) -> NDArray[np.uint64]: ...
    def stats(self) -> dict[str, int | float]: ...
