"""The owner of every node: a random part, a range of ids, or as files say. Called by partition().

Every function yields the owners of one node type in pieces, in the order of ids.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from gids.errors import FormatError
from gids.store.ids import mixed
from gids.store.manifest import Manifest, owner_dtype

METHODS = ("hash", "range")
FROM_FILES = "owners"
"""The method of a part whose owners were read from files."""
_BLOCK = 1 << 20


def range_owners(count: int, parts: int) -> Iterator[np.ndarray]:
    """Contiguous ranges of ids, of equal size up to one row."""
    dtype = owner_dtype(parts)
    bounds = np.array([count * part // parts for part in range(1, parts + 1)], np.int64)
    for start in range(0, count, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, count), dtype=np.int64)
        yield np.searchsorted(bounds, ids, side="right").astype(dtype)


def hash_owners(ntype: str, count: int, parts: int, seed: int) -> Iterator[np.ndarray]:
    """A random part for each node, a function of (seed, type, id) alone."""
    dtype = owner_dtype(parts)
    key = mixed(np.array([seed], np.uint64)) ^ np.uint64(zlib.crc32(ntype.encode()))
    key = mixed(key)
    for start in range(0, count, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
        values = mixed(mixed(ids) ^ key) >> np.uint64(32)
        yield ((values * np.uint64(parts)) >> np.uint64(32)).astype(dtype)


class OwnerFiles:
    """.npy files with the part of each node, one per node type. The result of any partitioner.

    files: by node type; "": of the only type.
    Raises FormatError unless there is a file for each type, of one whole number per node.
    """

    def __init__(self, files: Mapping[str, str | os.PathLike[str]], manifest: Manifest) -> None:
        counts = {nodes.type: nodes.count for nodes in manifest.nodes}
        only = next(iter(counts)) if len(counts) == 1 else ""
        by_type = {name or only: Path(file) for name, file in files.items()}
        if wrong := sorted(counts.keys() ^ by_type.keys()):
            raise FormatError(
                f"give one file of owners per node type ({', '.join(counts)}), as --owners TYPE=FILE.npy: "
                f"{wrong[0]!r} {'has none' if wrong[0] in counts else 'is no node type'}"
            )
        self._owners = {ntype: self._opened(by_type[ntype], count) for ntype, count in counts.items()}
        self._files = by_type

    @staticmethod
    def _opened(file: Path, count: int) -> np.ndarray:
        try:
            owners: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise FormatError(f"{file} is not a .npy file of numbers: {error}") from None
        if not isinstance(owners, np.ndarray) or owners.shape != (count,) or owners.dtype.kind not in "iu":
            kind = f"{owners.dtype}{list(owners.shape)}" if isinstance(owners, np.ndarray) else "a .npz file"
            raise FormatError(f"{file} is {kind}; owners must be {count} whole numbers, one per node")
        return owners

    def owners(self, ntype: str, parts: int) -> Iterator[np.ndarray]:
        """Raises FormatError for an owner that is no part."""
        owners = self._owners[ntype]
        for start in range(0, len(owners), _BLOCK):
            block = np.array(owners[start : start + _BLOCK])
            wrong = np.flatnonzero((block < 0) | (block >= parts))
            if len(wrong):
                raise FormatError(
                    f"{self._files[ntype]}: the owner of node {start + wrong[0]} is {block[wrong[0]]}; it "
                    f"must be a part, 0 to {parts - 1}"
                )
            yield block.astype(owner_dtype(parts))
