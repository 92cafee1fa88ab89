"""The layout of a table: rows in pages, pages in shards. Pure arithmetic; knows no files.

A page has whole rows only, from its start; the rest is zero. Page p is in shard p % S, at byte
(p // S) * page_bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gids.errors import FormatError

DEFAULT_PAGE_BYTES = 4096
SECTOR_BYTES = 512  # the smallest alignment of direct I/O
SHORT_ROW_BYTES = 2048  # rows up to this length get pages by best_page_bytes
MAX_PAGE_BYTES = 64 << 20
MAX_SHARDS = 256
MAX_ROWS = 1 << 48


def div_ceil(a: int, b: int) -> int:
    return -(-a // b)


def align_up(a: int, b: int) -> int:
    return div_ceil(a, b) * b


def table_page_bytes(row_bytes: int, page_bytes: int) -> int:
    """The page size of a table: page_bytes, or, if a row is longer, one long page per row.

    Raises FormatError when page_bytes is not a multiple of 512, or either is zero or above 64 MiB.
    """
    if page_bytes <= 0 or page_bytes % SECTOR_BYTES or page_bytes > MAX_PAGE_BYTES:
        raise FormatError(
            f"page_bytes is {page_bytes}; it must be a multiple of 512, at most {MAX_PAGE_BYTES}"
        )
    if not 0 < row_bytes <= MAX_PAGE_BYTES:
        raise FormatError(f"rows have {row_bytes} bytes; a row must have 1 to {MAX_PAGE_BYTES} bytes")
    if row_bytes <= page_bytes:
        return page_bytes
    return align_up(row_bytes, 4096 if page_bytes % 4096 == 0 else SECTOR_BYTES)


def best_page_bytes(row_bytes: int, *, alignment: int) -> int:
    """The page size with the fewest reads through a cache, for rows that are read at random.

    alignment: of direct I/O, in bytes. A disk reads 512 B and 4096 B equally often per second, so fewer pages
    to read is all that counts. Replayed epochs (docs/performance.md#cache) read as many pages as
    sqrt(page_bytes / rows_per_page) * rows_per_page ** (1/8), relative to each other: the first factor is the
    memory that a row takes, the second the unwanted rows beside it. Rows of more than 2048 B get
    DEFAULT_PAGE_BYTES, for which table_page_bytes makes long pages.
    """
    step = max(SECTOR_BYTES, alignment)
    sizes = [size for size in range(step, DEFAULT_PAGE_BYTES + 1, step) if size >= row_bytes]
    if not 0 < row_bytes <= SHORT_ROW_BYTES or not sizes:
        return DEFAULT_PAGE_BYTES
    # The eighth power of the formula, which is a ratio of whole numbers.
    return min(sizes, key=lambda size: Fraction(size**4, (size // row_bytes) ** 3))


@dataclass(frozen=True)
class Geometry:
    """The layout of one table. All sizes in bytes; row_bytes <= page_bytes."""

    row_count: int
    row_bytes: int
    page_bytes: int
    shard_count: int

    @property
    def rows_per_page(self) -> int:
        return self.page_bytes // self.row_bytes

    @property
    def page_count(self) -> int:
        return div_ceil(self.row_count, self.rows_per_page)

    def shard_page_count(self, shard: int) -> int:
        """The number of pages in one shard."""
        return max(0, div_ceil(self.page_count - shard, self.shard_count))

    def shard_bytes(self, shard: int) -> int:
        return self.shard_page_count(shard) * self.page_bytes

    def page_location(self, pages: Any) -> tuple[Any, Any]:
        """(shard, byte offset in it) of pages: an int, or an array or tensor of ints."""
        return pages % self.shard_count, pages // self.shard_count * self.page_bytes
