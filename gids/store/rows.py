"""Rows: an array that can be read one range at a time. The input of writers.

Made by the converters; writers read ranges from several threads at once. Knows no datasets.

PageReader reads the pages of a table from the first to the last, without the memory map and the page cache.
Called by Table.scan, `verify` and `gids partition`.

Checks of whole arrays: ids, indptr, row orders, checksums. Called by `verify` and by the writers.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch

from gids import _core
from gids.closing import Closing
from gids.errors import FormatError, StorageError
from gids.store.dtypes import UINT64, byte_view, is_whole, make_bools_proper, torch_dtype_of
from gids.store.geometry import Geometry, div_ceil
from gids.stored_file import AnyFile, file_status, open_descriptor, opened


class Rows(Protocol):
    """shape[0] rows of shape[1:] elements of dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read_into(self, start: int, out: torch.Tensor) -> None:
        """Copy rows start … start + len(out) to out (contiguous, of this dtype). Any thread may call."""
        ...


class TensorRows:
    """Rows of a CPU tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.detach()
        self.shape = tuple(values.shape)
        self.dtype: torch.dtype = values.dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        make_bools_proper(out.copy_(self.values[start : start + len(out)]))


class ArrayRows:
    """Rows of a NumPy array of either byte order."""

    def __init__(self, values: np.ndarray) -> None:
        dtype = torch_dtype_of(values.dtype)
        if dtype is None:
            raise FormatError(
                f"cannot store elements of type {values.dtype}: cast them to a number type first"
            )
        self._values = values
        self.shape = values.shape
        self.dtype: torch.dtype = dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        np.copyto(out.numpy(), self._values[start : start + len(out)])
        make_bools_proper(out)


class SliceRows:
    """Rows of what has a shape and slices, such as an array of h5py, zarr or safetensors.

    shape: default: values.shape. at: the positions in the dimensions before the rows.
    """

    def __init__(self, values: Any, shape: Sequence[int] | None = None, at: tuple[int, ...] = ()) -> None:
        self._values, self._at = values, at
        self.shape = tuple(values.shape if shape is None else shape)
        self.dtype: torch.dtype = self._slice(0, 0).dtype

    def _slice(self, start: int, stop: int) -> Rows:
        part = slice(start, stop)
        piece = self._values[(*self._at, part) if self._at else part]
        rows = as_rows(piece if isinstance(piece, torch.Tensor) else np.asarray(piece))
        if rows.shape != (stop - start, *self.shape[1:]):
            raise FormatError(f"rows {start} to {stop} have shape {rows.shape}, in an array of {self.shape}")
        return rows

    def read_into(self, start: int, out: torch.Tensor) -> None:
        self._slice(start, start + len(out)).read_into(0, out)

    def row(self, index: int) -> SliceRows:
        """The elements of one row, as rows."""
        return SliceRows(self._values, self.shape[1:], (*self._at, index))


class GeneratedRows:
    """Rows from a function: fill(start, out) writes rows start … start + len(out) to out."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[int, torch.Tensor], None]
    ) -> None:
        self.shape = tuple(shape)
        self.dtype: torch.dtype = dtype
        self.read_into = fill


class FileRows:
    """Rows of a C-order array in a file, from byte `offset` on.

    The file is open only while it is read. Data that was read is dropped from the page cache, so that a
    conversion does not evict the data of other programs.
    """

    def __init__(self, path: AnyFile, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> None:
        self.file = path
        self.shape = shape
        self.dtype: torch.dtype = dtype
        self._offset = offset
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        needed = offset + math.prod(shape) * dtype.itemsize
        size_bytes = file_status(path).st_size
        if size_bytes < needed:
            raise FormatError(f"{path} is truncated: {size_bytes} bytes, but {shape} {dtype} needs {needed}")

    def read_into(self, start: int, out: torch.Tensor) -> None:
        data = byte_view(out)
        offset = self._offset + start * self._row_bytes
        with opened(self.file) as fd:
            read_exactly(fd, data, offset, self.file)
            os.posix_fadvise(fd, offset, data.size, os.POSIX_FADV_DONTNEED)
        make_bools_proper(out)

    def row(self, index: int) -> FileRows:
        """The elements of one row, as rows."""
        offset = self._offset + index * self._row_bytes
        return FileRows(self.file, self.shape[1:], self.dtype, offset=offset)

    def reshaped(self, shape: tuple[int, ...]) -> FileRows:
        """The same elements, in rows of another shape."""
        return FileRows(self.file, shape, self.dtype, offset=self._offset)


class ColumnRows:
    """Rows of a Fortran-order array in a file, gathered from its contiguous columns."""

    def __init__(self, elements: FileRows, shape: tuple[int, ...]) -> None:
        self.elements = elements  # all of them, in the order of the file
        self.shape = shape
        self.dtype: torch.dtype = elements.dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        column = torch.empty(len(out), dtype=self.dtype)
        for index in range(math.prod(self.shape[1:])):
            self.elements.read_into(index * self.shape[0] + start, column)
            position = np.ravel_multi_index(
                np.unravel_index(index, self.shape[1:], order="F"), self.shape[1:]
            )
            out.view(len(out), -1)[:, int(position)] = column


class Sliceable(Protocol):
    """An array that is read by slices, such as a dataset of h5py or zarr, from several threads."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, rows: Any, /) -> Any: ...


Values = Rows | torch.Tensor | np.ndarray | Sliceable


def as_rows(values: Values) -> Rows:
    """Rows of a tensor, or of anything with a shape, a dtype and slices. Rows are returned unchanged. Raises
    TypeError for anything else."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("values are masked: give values.filled(NUMBER)")
    if isinstance(values, np.ndarray):
        return ArrayRows(values)
    if isinstance(values, torch.Tensor):
        if values.layout == torch.strided:
            return TensorRows(values)
    elif hasattr(values, "read_into"):
        return cast(Rows, values)
    elif all(hasattr(values, name) for name in ("shape", "dtype", "__getitem__")):
        with contextlib.suppress(
            FormatError, TypeError, LookupError, ValueError, AttributeError
        ):  # a matrix of SciPy
            return SliceRows(values)
    what = "a sparse tensor" if isinstance(values, torch.Tensor) else type(values).__name__
    raise TypeError(
        f"values must be an array of NumPy, a dense tensor of torch, or have arrays as slices (got {what})"
    )


def read_range(rows: Rows, start: int, stop: int) -> torch.Tensor:
    """Read rows start … stop into new memory."""
    out = torch.empty((stop - start, *rows.shape[1:]), dtype=rows.dtype)
    if stop > start:
        rows.read_into(start, out)
    return out


def blocks(rows: Rows, block_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows) of pieces of at most block_bytes, or one row if a row is longer."""
    step = max(1, block_bytes // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))
    for start in range(0, rows.shape[0], step):
        yield start, read_range(rows, start, min(start + step, rows.shape[0]))


def read_exactly(fd: int, out: np.ndarray, offset: int, path: str | os.PathLike[str]) -> None:
    """Fill out (uint8[bytes]) from a file. Raises StorageError on an error or at the end of the file."""
    view = memoryview(out.data)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise StorageError(error.errno or 0, "cannot read", path, offset + done) from error
        if count == 0:
            raise StorageError(errno.ENODATA, "the file ended early", path, offset + done)
        done += count


Item = TypeVar("Item")
Result = TypeVar("Result")


class PageReader(Closing):
    """The open shards of a table. Use as a context manager, which closes them. Any thread may read.

    sums: the checksums of all pages, uint32[page_count]; None: they are not compared. name: of the table, for
    errors.
    """

    def __init__(
        self, layout: Geometry, shards: Sequence[AnyFile], sums: np.ndarray | None = None, name: str = ""
    ) -> None:
        self.layout, self._shards, self._sums, self._name = layout, shards, sums, name
        self._fds: list[int] = []
        self._open = ExitStack()
        with ExitStack() as on_error:
            on_error.callback(self._open.close)
            for shard in shards:
                self._fds.append(open_descriptor(shard))
                self._open.callback(os.close, self._fds[-1])
            on_error.pop_all()

    def close(self) -> None:
        self._open.close()

    def rows(self, start: int, count: int) -> np.ndarray:
        """Rows start … start + count, or to the end, as they are stored: uint8[n, row_bytes]. See pages."""
        layout = self.layout
        count = min(count, layout.row_count - start)
        first, last = start // layout.rows_per_page, div_ceil(start + count, layout.rows_per_page)
        pages = self.pages(first, last - first)
        rows = pages[:, : layout.rows_per_page * layout.row_bytes].reshape(-1, layout.row_bytes)
        skipped = start - first * layout.rows_per_page
        return rows[skipped : skipped + count]

    def pages(self, first: int, count: int) -> np.ndarray:
        """Pages first … first + count, or to the end: uint8[n, page_bytes], with one read per shard.

        Raises StorageError for a page that cannot be read or has another checksum.
        """
        count = min(count, self.layout.page_count - first)
        pages = np.empty((count, self.layout.page_bytes), np.uint8)
        for shard, fd in enumerate(self._fds):
            skipped = (shard - first) % len(self._fds)
            mine = pages[skipped :: len(self._fds)]
            if not len(mine):
                continue
            _, offset = self.layout.page_location(first + skipped)
            # The pages of one of several shards are read together, then copied to their positions.
            extent = mine if len(self._fds) == 1 else np.empty(mine.shape, np.uint8)
            read_exactly(fd, extent.reshape(-1), offset, self._shards[shard])
            os.posix_fadvise(fd, offset, extent.size, os.POSIX_FADV_DONTNEED)
            if extent is not mine:
                mine[:] = extent
        if self._sums is not None:
            wrong = np.flatnonzero(_core.crc32c(pages) != self._sums[first : first + count])
            if len(wrong):
                shard, offset = self.layout.page_location(first + int(wrong[0]))
                what = f"page {first + wrong[0]} of {self._name!r} fails its CRC32C: see `gids verify`"
                raise StorageError(errno.EBADMSG, what, self._shards[shard], int(offset))
        return pages


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> Iterator[Result]:
    """Yield work(item) of each item, in order. At most at_once items are in the pool, or done and not taken.

    An error of an item is raised in its turn, and ends the others that have not begun.
    """
    running: deque[Future[Result]] = deque()
    try:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) >= at_once:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def read_ahead(read: Callable[[int], Result], starts: Sequence[int]) -> Iterator[tuple[int, Result]]:
    """Yield (start, read(start)) of all starts, in order. The next block is read while one is used."""
    with ThreadPoolExecutor(1, "gids-scan") as pool:
        yield from zip(starts, in_order(pool, read, starts, 2), strict=True)


_NO_COUNTS = np.empty(0, np.uint32)


def check_ids(values: np.ndarray, limit: int, what: str, start: int) -> np.ndarray:
    """Return values (int64[n], from position start of `what`); FormatError unless all are in [0, limit)."""
    bad = _core.count_sources(values, limit, 0, _NO_COUNTS)
    if bad is not None:
        must = f"it must be from 0 to {limit - 1}" if limit else "there are no nodes"
        raise FormatError(f"{what}[{start + bad}] is {values[bad]}; {must}")
    return values


def as_int64(values: torch.Tensor, what: str, start: int) -> torch.Tensor:
    """Integers (from position start of `what`) as int64. Raises FormatError for 2^63 or more."""
    whole = values.to(torch.int64)
    if values.dtype == UINT64 and bool((whole < 0).any()):
        row = int(torch.nonzero((whole < 0).reshape(-1))[0])
        value = int(values.reshape(-1)[row].item())
        raise FormatError(f"{what} is {value} near position {start + row}; it must be less than 2^63")
    return whole


def check_whole(rows: Rows, what: str) -> None:
    if not is_whole(rows.dtype):
        name = str(rows.dtype).removeprefix("torch.")
        raise FormatError(f"{what} is {name}; it must be whole numbers, int32 or int64")
    if len(rows.shape) != 1:
        raise FormatError(f"{what} has shape {rows.shape}; it must have one dimension")


def checked_ids(rows: Rows, limit: int, what: str, block_bytes: int) -> Iterator[np.ndarray]:
    """Yield an array of ids in [0, limit) in pieces, int64. Raises FormatError."""
    check_whole(rows, what)
    for start, block in blocks(rows, block_bytes):
        yield check_ids(as_int64(block, what, start).numpy(), limit, what, start)


def checked_indptr(rows: Rows, edge_count: int, block_bytes: int) -> Iterator[np.ndarray]:
    """Yield an indptr in pieces, int64. Raises FormatError unless it rises from 0 to edge_count."""
    check_whole(rows, "indptr")
    last = 0
    for start, block in blocks(rows, block_bytes):
        values = as_int64(block, "indptr", start).numpy()
        if start == 0 and values[0] != 0:
            raise FormatError(f"indptr[0] is {values[0]}; it must be 0")
        falls = np.flatnonzero(np.diff(values, prepend=last) < 0)
        if len(falls):
            raise FormatError(
                f"indptr[{start + falls[0]}] is {values[falls[0]]}, less than the entry before it"
            )
        last = int(values[-1])
        yield values
    if last != edge_count:
        raise FormatError(f"indptr ends at {last}, but there are {edge_count} indices")


MARK_ROWS = 64 << 20


def checked_order(order: Rows, block_bytes: int) -> Iterator[np.ndarray]:
    """Yield an order of rows in pieces. Raises FormatError, at the end at the latest, unless it has each
    position once. Memory: 64 MB and a block; more than 64 M rows are read several times."""
    count = order.shape[0]
    for first in range(0, max(1, count), MARK_ROWS):
        marks = np.zeros(min(MARK_ROWS, count - first), np.uint8)
        for start, block in blocks(order, block_bytes):
            values = block.numpy()
            bad = _core.mark_positions(values, count, first, marks)
            if bad is not None:
                raise FormatError(
                    f"order[{start + bad}] is {values[bad]}; each of 0 to {count - 1} must occur once"
                )
            if first == 0:
                yield values


def file_crc32c(path: AnyFile, *, crc: int = 0) -> int:
    """CRC32C of a whole file, which is then dropped from the page cache. crc: of the bytes before it."""
    buffer = np.empty(8 << 20, np.uint8)
    with open(open_descriptor(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer.data):
            crc = _core.crc32c_extend(crc, buffer[:count])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc
