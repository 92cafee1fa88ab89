"""The dataset of gpu_array.py: rows that are a formula of the node's id, and a graph with hot nodes.

A float32 value is a multiple of 2^-16 below 1, so the CPU and a GPU compute the same bits.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from gpu_harness import TABLE

from gids.store import FeatureStore
from gids.store.names import NODE, RELATION
from gids.write import DatasetWriter

CLASSES = 16
THREADS = 16
_OF_ROW, _OF_COLUMN = 0x9E3779B1, 0x85EBCA77  # odd
_SKEW = 3  # an edge comes from rank floor(n * u**3): a fifth of the edges from 1 % of the nodes
_EDGE_PARTS = 64
_PIECE_BYTES = 4 << 20
_READ_BYTES = 64 << 20


class FormulaData:
    """A dataset below a folder, whose files are in the page cache, and the same rows in memory.

    Attributes: path; table; nodes; rows: float32[nodes, row_bytes / 4], on the host.
    """

    def __init__(
        self, folder: Path, row_bytes: int, sizes: SimpleNamespace, threads: ThreadPoolExecutor
    ) -> None:
        self.nodes = sizes.nodes[row_bytes]  # a power of two
        self.rows = _rows(self.nodes, row_bytes // 4, threads)
        self.path = folder / f"formula-{row_bytes}.gids"
        indptr = np.arange(self.nodes + 1, dtype=np.int64) * sizes.degree
        labels = np.arange(self.nodes, dtype=np.int64) % CLASSES
        options = {"page_bytes": min(4096, row_bytes), "workers": THREADS, "memory_bytes": 1 << 30}
        with DatasetWriter(self.path, **options) as writer:
            writer.write_table("node", NODE, "feat", self.rows)
            writer.write_graph(
                RELATION, indptr, _sources(self.nodes, sizes.degree, threads), index_dtype="int32"
            )
            writer.write_labels(NODE, labels)
        _read_files(self.path, threads)
        self.table = FeatureStore(self.path).table(TABLE)


def wrong_values(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The number of values that differ from the formula, as an int64 scalar on the device. Does not block.

    ids: int64[n]. rows: float32[n, dim], on the same device.
    """
    of_row, of_column = (m - (1 << 32) for m in (_OF_ROW, _OF_COLUMN))
    columns = torch.arange(rows.shape[1], dtype=torch.int32, device=ids.device) * of_column
    bits = ids.to(torch.int32)[:, None] * of_row + columns  # modulo 2^32
    expected = ((bits >> 16) & 0xFFFF).to(torch.float32) * 2**-16 - 0.5
    return (rows.view(torch.int32) != expected.view(torch.int32)).sum()


def _rows(nodes: int, dim: int, threads: ThreadPoolExecutor) -> torch.Tensor:
    rows = np.empty((nodes, dim), np.float32)
    columns = np.arange(dim, dtype=np.uint32) * np.uint32(_OF_COLUMN)
    step = max(1, _PIECE_BYTES // (4 * dim))

    def fill(first: int) -> None:
        part = rows[first : first + step]
        ids = np.arange(first, first + len(part), dtype=np.uint32) * np.uint32(_OF_ROW)
        bits = (ids[:, None] + columns) >> np.uint32(16)
        np.multiply(bits, np.float32(2**-16), out=part, dtype=np.float32, casting="unsafe")
        part -= np.float32(0.5)

    list(threads.map(fill, range(0, nodes, step)))
    return torch.from_numpy(rows)


def _sources(nodes: int, degree: int, threads: ThreadPoolExecutor) -> np.ndarray:
    """int32[nodes * degree]: of each edge the source. Hot nodes are spread over the ids."""
    sources = np.empty(nodes * degree, np.int32)
    ends = [len(sources) * part // _EDGE_PARTS for part in range(_EDGE_PARTS + 1)]

    def draw(part: int) -> None:
        begin, end = ends[part], ends[part + 1]
        drawn = np.random.Generator(np.random.SFC64([7, part])).random(end - begin)
        ranks = (nodes * drawn**_SKEW).astype(np.uint64)
        sources[begin:end] = (ranks * _OF_ROW & np.uint64(nodes - 1)).astype(np.int32)  # a permutation

    list(threads.map(draw, range(_EDGE_PARTS)))
    return sources


def _read_files(folder: Path, threads: ThreadPoolExecutor) -> None:
    """Read all files below a folder, so that they are in the page cache."""

    def read(piece: tuple[Path, int]) -> None:
        path, offset = piece
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            left = _READ_BYTES
            while left > 0 and (got := len(file.read(min(left, _PIECE_BYTES)))):
                left -= got

    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    list(threads.map(read, [(p, at) for p in files for at in range(0, os.stat(p).st_size, _READ_BYTES)]))
