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
    rows: torch.Tensor  # the source, [n, dim]
    page_bytes: int
    rows_per_page: int
    shard_paths: list[Path]
    type: str = "_N"
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
        return self.rows[0].numel() * self.rows.element_size()

    @property
    def page_count(self) -> int:
        return -(-self.row_count // self.rows_per_page)

    def shard_of(self, page: int) -> tuple[Path, int]:
        shards = len(self.shard_paths)
        return self.shard_paths[page % shards], page // shards * self.page_bytes


def write_raw_table(
    directory: Path, rows: torch.Tensor, *, page_bytes: int = 4096, shards: int = 1, name: str = "_N.feat"
) -> RawTable:
    """Write rows [n, ...] of any dtype; a row longer than a page makes one long page."""
    flat = rows.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy()
    row_bytes = flat.shape[1]
    if row_bytes > page_bytes:
        page_bytes = -(-row_bytes // 512) * 512
    per_page = page_bytes // row_bytes
    page_count = -(-len(rows) // per_page)
    pages = np.zeros((page_count, page_bytes), np.uint8)
    for page in range(page_count):
        part = flat[page * per_page : (page + 1) * per_page].reshape(-1)
        pages[page, : len(part)] = part
    paths = []
    for shard in range(shards):
        path = directory / f"{name}.shard-{shard:02}.bin"
        path.write_bytes(pages[shard::shards].tobytes())
        paths.append(path)
    return RawTable(name, rows, page_bytes, per_page, paths)
