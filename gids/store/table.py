"""Table: the rows of one (type, key), as pages in shards. Made by FeatureStore; read by loaders.

Immutable and picklable. `read_rows` is for convenience and reads memory maps; loaders read pages with
`gids.io`.
"""

from __future__ import annotations

import copy
import errno
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.errors import StorageError
from gids.store.dtypes import TABLE_DTYPES, byte_view, make_bools_proper, unpack_rows
from gids.store.files import Locator, load_array, load_scales, shard_files
from gids.store.geometry import div_ceil
from gids.store.manifest import TableEntry
from gids.store.names import Relation
from gids.store.numbering import NodeMap, Numbering
from gids.store.part import Held
from gids.store.rows import PageReader, read_ahead
from gids.stored_file import StoredFile, opened


def positions_of(ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The positions of rows: int64[n]. ids: int64[n]; ids out of range are unchanged. order: Table.order."""
    out = np.empty(len(ids), np.int64)
    _core.to_positions(order, np.ascontiguousarray(ids), out)
    return out


class Table:
    """One table of a dataset. All methods but page_location take row ids.

    In a part of a dataset (`gids partition`), read_rows takes ids of the whole dataset. All else, such as
    scan and page_location, is about the rows of this part, 0 … row_count - 1: held translates ids to them.

    Attributes: name (`paper.feat`), dataset (name of the store), kind ("node" or "edge"), type (node type, or
    (src, rel, dst)), key, row_count, id_count (ids that read_rows takes: row_count, except in a part, where
    it is the number of nodes or edges of the whole dataset), shape (of one row), columns (the names of the
    values of a row, or None), dtype (of rows in memory),
    stored_dtype (on disk: int8 if scale is not None, else dtype), scale (None, "row" or "column"), row_bytes
    (on disk), page_bytes, rows_per_page, page_count, shards (files), shard_paths, pages_crc (of the checksums
    of all pages), content_crc (the same, with those of order and scales), numbering (what its ids are; None:
    positions of rows, of no dataset's nodes or edges).
    """

    def __init__(
        self,
        entry: TableEntry,
        locate: Locator,
        store_name: str,
        *,
        numbering: Numbering | None = None,
        id_count: int | None = None,
        find_held: Callable[[], Held] | None = None,
    ) -> None:
        """id_count, find_held: of a table in a part."""
        self.name: str = entry.name
        self.dataset = store_name
        self.kind: str = entry.kind
        self.type: str | Relation = entry.type
        self.key: str = entry.key
        self.columns: tuple[str, ...] | None = entry.columns
        self.shape: tuple[int, ...] = entry.shape
        self.stored_dtype: torch.dtype = TABLE_DTYPES[entry.dtype]
        self.scale: str | None = None if entry.scale is None else entry.scale.per
        self.dtype: torch.dtype = self.stored_dtype if self.scale is None else torch.float32
        self._layout = entry.geometry
        self.row_count: int = entry.row_count
        self.id_count: int = entry.row_count if id_count is None else id_count
        self.row_bytes: int = self._layout.row_bytes
        self.page_bytes: int = entry.page_bytes
        self.rows_per_page: int = self._layout.rows_per_page
        self.page_count: int = self._layout.page_count
        self.shards: list[StoredFile] = shard_files(entry, locate)
        self.pages_crc: int = entry.checksums.crc32c
        columns = None if entry.scale is None else entry.scale.columns
        arrays = (entry.checksums, entry.order, columns)
        self.content_crc = zlib.crc32(str([a and a.crc32c for a in arrays]).encode())
        self._locate, self._checksums, self._columns, self._order = (
            locate,
            entry.checksums,
            columns,
            entry.order,
        )
        self._where = f"'{self.name}' in {store_name}"
        self.numbering = numbering
        self._renumbered: tuple[NodeMap, Table] | None = None
        self._check_crc = False
        self._arrays: dict[str, np.ndarray] = {}  # that were opened, shared by copies of this table
        self._maps: list[tuple[int | None, np.ndarray]] | None = None
        self._find_held = find_held
        self._held: Held | None = None

    def __repr__(self) -> str:
        dtype = str(self.stored_dtype).removeprefix("torch.")
        if self.scale is not None:
            dtype += f" with a scale per {self.scale}, "
        pages = f"{self.page_count} pages of {self.page_bytes} B"
        return f"Table({self.name!r}, {dtype}{[self.row_count, *self.shape]}, {pages})"

    @property
    def shard_paths(self) -> list[Path]:
        return [shard.path for shard in self.shards]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for the same rows in the same files."""
        return (*self.shard_paths, self.content_crc)

    def opened(self, *, check_crc: bool) -> Table:
        """The same table, whose order, scales and checksums are open.

        check_crc: the order is in memory, and compared with its checksum in the manifest. (Scales always
        are.) Raises StorageError.
        """
        other = copy.copy(self)
        other._check_crc = check_crc
        other.column_scales()
        if check_crc:
            other.checksums()
        _ = other.order
        return other

    def named(self, name: str) -> Table:
        """The same table with another name, to distinguish it from a table of another dataset."""
        other = copy.copy(self)
        other.name = name
        return other

    def by_row(self) -> Table:
        """The same rows, whose ids are their positions in this part, or in this table."""
        other = copy.copy(self)
        other._find_held = other._held = other.numbering = None
        return other

    def renumbered(self, node_map: NodeMap) -> Table:
        """The same rows, by the numbers that their nodes have in another dataset."""
        other = copy.copy(self)
        other.numbering, other._renumbered, other._arrays = node_map.ours, (node_map, self), {}
        numbers = self.content_crc, node_map.theirs.contents, node_map.ours.contents
        other.content_crc = zlib.crc32(str(numbers).encode())
        return other

    def stored(self) -> Table:
        """The same rows as they are on disk: a table of uint8[row_bytes]."""
        other = copy.copy(self)
        other.shape, other.dtype, other.stored_dtype = (self.row_bytes,), torch.uint8, torch.uint8
        other.scale = other._columns = None
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": None, "_arrays": {}, "_held": None}  # each process maps the files

    def _array(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        if name not in self._arrays:
            self._arrays[name] = read()
        return self._arrays[name]

    def checksums(self) -> np.ndarray:
        """CRC32C of each page with its padding: uint32[page_count], a read-only memory map."""
        return self._array("checksums", lambda: self._locate.map(self._checksums))

    @property
    def order(self) -> np.ndarray | None:
        """The position of each row: int32 or int64[row_count], a read-only memory map; None: its id.

        Row r is in page order[r] // rows_per_page. Datasets converted with `--order` have it, and tables that
        are matched by ids. It is in memory if checksums are compared: a page of a map may be read from the
        disk again after it was compared.
        """
        if self._renumbered is not None:
            node_map, table = self._renumbered
            key = "checked rows by ids" if self._check_crc else "rows by ids"
            return self._array(key, lambda: node_map.order(table.opened(check_crc=self._check_crc).order))
        if self._order is None:
            return None
        entry = self._order
        if self._check_crc:
            return self._array("checked order", lambda: load_array(self._locate.array(entry), entry))
        return self._array("order", lambda: self._locate.map(entry))

    @property
    def held(self) -> Held | None:
        """In a part of a dataset, the ids whose rows this table has; else None.

        The first call reads the owners of all nodes, or the ids of the edges that this part holds.
        """
        if self._held is None and self._find_held is not None:
            self._held = self._find_held()
        return self._held

    @property
    def in_part(self) -> Mapping[str, int] | None:
        """In a part of a dataset, the checksums of this part; else None."""
        return None if self._find_held is None else self._locate.contents

    def column_scales(self) -> np.ndarray | None:
        """The scales of the columns, float32[values of a row], or None if the table has none.

        Raises FormatError if a scale is negative or not finite.
        """
        if self._columns is None:
            return None
        entry = self._columns
        return self._array("scales", lambda: load_scales(self._locate.array(entry), entry).reshape(-1))

    def rows_of_pages(self, pages: np.ndarray) -> np.ndarray:
        """The value of each row's page: bool[row_count]. pages: bool[page_count]."""
        by_position = pages.repeat(self.rows_per_page)[: self.row_count]
        return by_position if self.order is None else by_position[self.order]

    def page_location(self, pages: Any) -> tuple[Any, Any]:
        """(shard, byte offset in it) of pages: an int, or an array or tensor of ints."""
        return self._layout.page_location(pages)

    def shard_page_count(self, shard: int) -> int:
        """The number of pages in one shard."""
        return self._layout.shard_page_count(shard)

    def read_rows(self, ids: torch.Tensor | np.ndarray | Sequence[int]) -> torch.Tensor:
        """Read rows through memory maps into a new tensor.

        ids: int64[n] on the CPU, may repeat. Returns dtype[n, *shape]. Blocks. Raises IndexError if an id is
        out of range or in another part of the dataset, TypeError for ids of another type, StorageError if a
        shard was truncated.
        """
        rows = self._checked(ids)
        if not len(rows):
            return torch.empty((0, *self.shape), dtype=self.dtype)
        if self.scale is not None:
            return self.decode(self.read_stored(rows))
        out = torch.empty((len(rows), *self.shape), dtype=self.dtype)
        self._gather(rows, byte_view(out))
        return make_bools_proper(out)

    def read_stored(self, rows: np.ndarray) -> np.ndarray:
        """Rows of this table, int64[n], as they are on disk: uint8[n, row_bytes]. They are in range."""
        out = np.empty((len(rows), self.row_bytes), np.uint8)
        self._gather(rows, out.reshape(-1))
        return out

    def _gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy one or more rows, as they are on disk, to uint8[bytes]."""
        order = self.order
        positions = rows if order is None else positions_of(rows, order)
        pages, slots = np.divmod(positions, self.rows_per_page)
        shards, offsets = self.page_location(pages)
        in_shard = offsets // self.page_bytes
        target = out.view(f"V{self.row_bytes}")
        with _core.MapGuard():
            for shard, view in enumerate(self._mapped()):
                if len(self.shards) == 1:
                    target[:] = view[in_shard, slots]
                else:
                    mine = np.flatnonzero(shards == shard)
                    target[mine] = view[in_shard[mine], slots[mine]]

    def scan(
        self, rows_per_block: int, *, order: Sequence[int] | None = None, stored: bool = False
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all rows in blocks: (first row, dtype[n, *shape]); n is rows_per_block, less at the end.

        order: numbers of the blocks to read (default: 0, 1, 2, … to the end). stored: yield the bytes on
        disk, uint8[n, row_bytes]. Each block is new memory. The next block is read while one is used, in four
        blocks of memory; nothing stays in the page cache. A table with reordered rows is gathered through
        memory maps instead. Raises ValueError, IndexError for a block number out of range, and StorageError
        when a block cannot be read.
        """
        if rows_per_block < 1:
            raise ValueError(f"rows_per_block is {rows_per_block}; it must be at least 1")
        count = div_ceil(self.row_count, rows_per_block)
        starts: Sequence[int] = range(0, self.row_count, rows_per_block)
        if order is not None:
            if wrong := [n for n in order if not 0 <= n < count]:
                raise IndexError(f"block {wrong[0]} is out of range for {self._where} ({count} blocks)")
            starts = [n * rows_per_block for n in order]
        decode = (lambda data: torch.from_numpy(data.copy())) if stored else self.decode
        return self._scanned(starts, rows_per_block, decode)

    def open_pages(self, *, check_crc: bool) -> PageReader:
        """The pages, read without the memory map. check_crc: compare each with its checksum. Close it."""
        return PageReader(self._layout, self.shards, self.checksums() if check_crc else None, self.name)

    def decode(self, data: np.ndarray) -> torch.Tensor:
        """Decode rows from their bytes on disk, uint8[n, row_bytes], to a new dtype[n, *shape]."""
        if self.scale is not None:
            return unpack_rows(data, self.shape, self.scale, self.column_scales())
        out = torch.empty((len(data), *self.shape), dtype=self.dtype)
        byte_view(out).reshape(data.shape)[:] = data
        return make_bools_proper(out)

    def _scanned(
        self, starts: Sequence[int], rows_per_block: int, decode: Callable[[np.ndarray], torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        if self.order is not None:
            for start in starts:
                rows = np.arange(start, min(start + rows_per_block, self.row_count))
                yield start, decode(self.read_stored(rows))
            return
        with self.open_pages(check_crc=False) as reader:
            yield from read_ahead(lambda start: decode(reader.rows(start, rows_per_block)), starts)

    def _checked(self, ids: torch.Tensor | np.ndarray | Sequence[int]) -> np.ndarray:
        if isinstance(ids, torch.Tensor):
            if ids.device.type != "cpu":
                raise TypeError(
                    f"ids are on {ids.device}; read_rows of {self._where} takes CPU ids: use ids.cpu()"
                )
            rows = ids.numpy()
        else:
            rows = np.asarray(ids, dtype=np.int64) if len(ids) == 0 else np.asarray(ids)
        if rows.dtype != np.int64 or rows.ndim != 1:
            raise TypeError(
                f"ids are {rows.dtype}{list(rows.shape)}; read_rows of {self._where} takes int64[n]"
            )
        wrong = np.flatnonzero((rows < 0) | (rows >= self.id_count))
        if len(wrong):
            raise IndexError(f"row {rows[wrong[0]]} is out of range for {self._where} ({self.id_count} rows)")
        held = self.held
        return rows if held is None else held.rows_of(rows)

    def _mapped(self) -> list[np.ndarray]:
        if self._maps is None:
            self._maps = [self._map(shard, file) for shard, file in enumerate(self.shards)]
        # Checked each time: access beyond the end of a mapped file kills the process.
        for shard, (descriptor, _) in enumerate(self._maps):
            if descriptor is not None and os.fstat(descriptor).st_size < self._layout.shard_bytes(shard):
                what = "shard was truncated after the dataset was opened"
                raise StorageError(errno.ENODATA, what, self.shards[shard])
        return [view for _, view in self._maps]

    def _map(self, shard: int, file: StoredFile) -> tuple[int | None, np.ndarray]:
        shape = (self._layout.shard_page_count(shard), self.rows_per_page)
        if not shape[0]:
            return None, np.empty(shape, f"V{self.row_bytes}")
        with opened(file) as fd:
            mapped, descriptor = _core.map_file(fd, self._layout.shard_bytes(shard), os.fspath(file))
        strides = (self.page_bytes, self.row_bytes)
        return descriptor, np.ndarray(shape, f"V{self.row_bytes}", mapped, strides=strides)
