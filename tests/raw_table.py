"""A table of raw pages, without a dataset around it: what the cache needs and no more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass
class RawTable:
    """Rows written page by page over shards, as a dataset's table is."""

    name: str
    rows: torch.Tensor  # the source, [n, dim]; with a scale, what is to be read
    page_bytes: int
    rows_per_page: int
    shard_paths: list[Path]
    type: str = "_N"
    scale: str | None = None
    scales: np.ndarray | None = None  # of the columns
    stored_row_bytes: int | None = None
    order: np.ndarray | None = None

    @property
    def row_count(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def row_bytes(self) -> int:
        return self.stored_row_bytes or self.rows[0].numel() * self.rows.element_size()

    @property
    def page_count(self) -> int:
        return -(-self.row_count // self.rows_per_page)

    def column_scales(self) -> np.ndarray | None:
        return self.scales

    def shard_of(self, page: int) -> tuple[Path, int]:
        shards = len(self.shard_paths)
        return self.shard_paths[page % shards], page // shards * self.page_bytes

    def faults(self, page: int, errno: int) -> list[tuple[int, int, int, int]]:
        """For inject_faults: no row of the page can be read, alone or with the others."""
        path, offset = self.shard_of(page)
        file = self.shard_paths.index(path)
        return [(file, offset + at, errno, 1 << 30) for at in range(0, self.page_bytes, self.row_bytes)]


def write_raw_table(
    directory: Path, rows: torch.Tensor, *, page_bytes: int = 4096, shards: int = 1, name: str = "_N.feat"
) -> RawTable:
    """Write rows [n, ...] of any dtype; a row longer than a page makes one long page."""
    flat = rows.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy()
    paths, page_bytes, per_page = _write_pages(directory, flat, page_bytes, shards, name)
    return RawTable(name, rows, page_bytes, per_page, paths)


def write_scaled_table(
    directory: Path,
    steps: np.ndarray,
    scale: str,
    *,
    page_bytes: int = 4096,
    shards: int = 1,
    name: str = "_N.feat",
    seed: int = 0,
) -> RawTable:
    """Write int8[n, dim] with a random scale per "row" or "column"; rows are the products, by NumPy."""
    n, dim = steps.shape
    rng = np.random.default_rng(seed)
    scales = (10.0 ** rng.uniform(-6, 2, n if scale == "row" else dim)).astype(np.float32)
    flat = steps.view(np.uint8)
    if scale == "row":
        zeros = np.zeros((n, -dim % 4), np.uint8)
        flat = np.concatenate([flat, zeros, scales.view(np.uint8).reshape(n, 4)], axis=1)
    paths, page_bytes, per_page = _write_pages(directory, flat, page_bytes, shards, name)
    rows = torch.from_numpy(steps.astype(np.float32) * (scales[:, None] if scale == "row" else scales))
    columns = scales if scale == "column" else None
    return RawTable(
        name, rows, page_bytes, per_page, paths, scale=scale, scales=columns, stored_row_bytes=flat.shape[1]
    )


def _write_pages(
    directory: Path, flat: np.ndarray, page_bytes: int, shards: int, name: str
) -> tuple[list[Path], int, int]:
    """(shards, bytes of a page, rows of a page)."""
    row_bytes = flat.shape[1]
    if row_bytes > page_bytes:
        page_bytes = -(-row_bytes // 512) * 512
    per_page = page_bytes // row_bytes
    page_count = -(-len(flat) // per_page)
    pages = np.zeros((page_count, page_bytes), np.uint8)
    for page in range(page_count):
        part = flat[page * per_page : (page + 1) * per_page].reshape(-1)
        pages[page, : len(part)] = part
    paths = []
    for shard in range(shards):
        path = directory / f"{name}.shard-{shard:02}.bin"
        path.write_bytes(pages[shard::shards].tobytes())
        paths.append(path)
    return paths, page_bytes, per_page
