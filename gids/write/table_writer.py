"""TableWriter: adds a table to an existing dataset, block by block. A reader sees all of it or none.

Made by create_table. Takes rows in any order and from several threads, and publishes the table by replacing
the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import operator
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.dtypes import byte_view, make_bools_proper
from gids.store.feature_store import FeatureStore
from gids.store.files import Locator, read_manifest
from gids.store.geometry import DEFAULT_PAGE_BYTES
from gids.store.manifest import Manifest, TableEntry, table_entry
from gids.store.names import Relation, check_name, describe_type, shard_paths, table_name, table_path
from gids.store.part import refuse_part
from gids.store.rows import as_rows, read_range
from gids.store.table import Table
from gids.write.files import check_space, is_open_at, sync_directory
from gids.write.narrow import cast_exactly, refuse_overflow
from gids.write.page_sink import PageSink, table_files
from gids.write.publish import changing, replace_manifest, unchanged_on_error

_SYNC_BYTES = 256 << 20
_TABLES = "tables"
_OURS = re.compile(r"[\w-]+\.(bin|npy)")


def create_table(
    store: FeatureStore | str | os.PathLike[str],
    name: str,
    rows: int,
    dim: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    type_: str | Relation | None = None,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    replace: bool = False,
) -> TableWriter:
    """Make a writer that adds a table to the dataset, block by block, and publishes it in one step.

    name: TYPE.KEY, or KEY if there is one node type. rows: number of nodes or edges of the type. dim: length
    or shape of a row. type_: node type or relation; then name is the key alone. page_bytes: as in
    DatasetWriter. replace: replace an existing table of this name. Shards are in the same directories as the
    first table's.

        with create_table(store, "paper.embedding", 1000, 64) as writer:
            for start, block in blocks:
                writer.write(start, block)
        store = store.reopen()  # the dataset with the table

    Loaders take the new table only if tables= names it, unless it replaces one that they take. Stores that
    are open do not see the new table. If a table is replaced, loaders that have the old one open
    can still read it; others cannot.

    Raises MissingError for an unknown type, FileExistsError for an existing name, ValueError and FormatError
    for other arguments, StorageError if the disk has too little space. Then nothing is written.
    """
    store = store if isinstance(store, FeatureStore) else FeatureStore(store)
    refuse_part(store, "create_table", "add the table to the whole dataset, then partition it")
    type_, key = (type_, name) if type_ is not None else store.parse_table_name(name)
    count = store.num_nodes(type_) if isinstance(type_, str) else store.num_edges(type_)
    if rows != count:
        raise ValueError(
            f"rows={rows}, but {store.name} has {count} of {describe_type(type_)}: give rows={count}"
        )
    shape = (count, dim) if isinstance(dim, int) else (count, *dim)
    return TableWriter(store, type_, key, shape, dtype, page_bytes=page_bytes, replace=replace)


def temporary_table(
    store: FeatureStore, type_: str | Relation, rows: int, dim: int | Sequence[int], dtype: torch.dtype
) -> TableWriter:
    """Make a writer of a temporary table, with any number of rows, that is never added to the dataset.

    Its files are beside the dataset's tables. `finish` returns the table, `discard` removes it. The
    files of a killed process are removed when the next table is created. Raises as `create_table`.
    """
    shape = (rows, dim) if isinstance(dim, int) else (rows, *dim)
    return TableWriter(store, type_, "temporary", shape, dtype, temporary=True)


class TableWriter:
    """A table that is being added to a dataset.

    A context manager that publishes the table; after an exception, or if it is temporary, it removes the
    files. `write` takes blocks of rows in any order, each row once; several threads may call it at once.
    Memory: a few MiB per thread, and one page per incomplete page. Blocks that begin at multiples of
    `rows_per_page` leave no incomplete pages.

    If the process is killed before `publish` is done, the dataset is unchanged; the files are removed when
    the next table is created. Attributes: name, row_count, shape, dtype, rows_per_page.
    """

    def __init__(
        self,
        store: FeatureStore,
        type_: str | Relation,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        page_bytes: int = DEFAULT_PAGE_BYTES,
        replace: bool = False,
        temporary: bool = False,
    ) -> None:
        check_name(key, "the table's key")
        self.name = table_name(type_, key)
        self.replace, self.temporary = replace or temporary, temporary
        self._store = store
        self.row_count, *row = shape
        self.shape, self.dtype = tuple(row), dtype
        self._state = "open"
        self._table: Table | None = None
        self._resources = contextlib.ExitStack()
        try:
            with changing(store.path, f"creating table {self.name!r}") as manifest:
                store.locate.check_unchanged()
                if not self.replace and self.name in (t.name for t in manifest.tables):
                    raise FileExistsError(
                        f"{store.name} already has a table {self.name!r}: give another name, or replace=True"
                    )
                self._folder = TableFolder(store.path, manifest, store.locate, table_path(type_, key))
                self._resources.callback(self._folder.close)
                replaced = store.tables.get(self.name)
                self.entry = table_entry(
                    "node" if isinstance(type_, str) else "edge",
                    type_,
                    key,
                    shape,
                    dtype,
                    page_bytes=page_bytes,
                    shards=self._folder.shards,
                    checksums=self._folder.checksums,
                    extra=replaced is None or replaced.extra,
                )
                self.rows_per_page = self.entry.geometry.rows_per_page
                files = table_files(store.path, self.entry)
                check_space((path.parent.parent, size_bytes) for path, size_bytes in files.items())
                # Not direct, because blocks may be small.
                sink = PageSink(store.path, self.entry, direct=False, sync_bytes=_SYNC_BYTES)
                self._sink = self._resources.enter_context(sink)
        except BaseException:
            self._resources.close()
            raise
        self._finalizer = weakref.finalize(self, self._resources.close)  # if it is never discarded

    def write(self, start: int, rows: torch.Tensor | np.ndarray) -> None:
        """Write rows start, start + 1, … of the table.

        rows: number[n, *shape] on any device; cast to the table's dtype. Rounding to a shorter floating type
        is allowed; NaN and infinities are kept. Blocks.

        Raises ValueError for rows of another shape, out of range or written before; FormatError for a value
        that does not fit the table's dtype; StorageError if the disk is full or fails. Then the table can
        only be discarded.
        """
        start = operator.index(start)
        if isinstance(rows, np.ndarray) and not _is_plain(rows):
            rows = read_range(as_rows(rows), 0, len(rows) if rows.ndim else 0)
        block = torch.as_tensor(rows).detach().cpu()
        stop = start + len(block) if block.dim() else start
        if not block.dim() or tuple(block.shape[1:]) != self.shape:
            expected = ", ".join(["n", *map(str, self.shape)])
            raise ValueError(f"rows are {list(block.shape)}; a block of {self.name!r} is [{expected}]")
        if start < 0 or stop > self.row_count:
            raise ValueError(
                f"rows {start} to {stop - 1} are out of range for {self.name!r} ({self.row_count} rows)"
            )
        values = block.contiguous()
        if values.dtype != self.dtype:
            values = torch.empty(block.shape, dtype=self.dtype)
            cast_exactly(block, values)
            refuse_overflow(block, values, start)
        elif values.dtype == torch.bool:
            values = make_bools_proper(values.clone())
        if self._state != "open":
            raise ValueError(f"{self.name!r} is {self._state}: no more rows can be written")
        data = byte_view(values).reshape(stop - start, self._sink.layout.row_bytes)
        try:
            with self._explaining("writing"):
                self._sink.write(start, data)
        except ValueError:  # rows that were written before: nothing has changed
            raise
        except BaseException:
            self._state = "broken by an error"
            raise

    def finish(self) -> Table:
        """Sync the files and return the table, which can be read. No store has it before `publish`.

        Blocks. Idempotent. Raises ValueError if rows are missing or a write is running, StorageError.
        """
        if self._table is not None:
            return self._table
        if self._state != "open":
            raise ValueError(f"{self.name!r} is {self._state}")
        if self._sink.is_writing:
            raise ValueError(f"another thread is still writing {self.name!r}: wait for it")
        if (gap := self._sink.first_gap()) is not None:
            raise ValueError(
                f"rows {gap[0]} to {gap[1]} of {self.name!r} were never written: write all "
                f"{self.row_count} rows"
            )
        self._state = "finished"
        self._check_folder()
        with self._explaining("syncing"):
            self.entry = self.entry.with_crc(self._sink.finish())
            for directory in self._folder.directories:
                sync_directory(directory)
                sync_directory(directory.parent)
        self._table = Table(self.entry, self._store.locate, self._store.name)
        return self._table

    def publish(self) -> FeatureStore:
        """Call `finish`, add the table to the dataset, and return the dataset, opened again.

        Raises as `finish`; FileExistsError if the dataset has a table of this name by now, FormatError if the
        dataset was replaced, StorageError. The dataset is unchanged then.
        """
        return publish_tables([self])

    def discard(self) -> None:
        """Remove the files, unless the table is published. Idempotent."""
        if self._state != "published":
            self._state = "discarded"
        self._finalizer()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and not self.temporary and self._state not in ("published", "discarded"):
                self.publish()
        finally:
            self.discard()

    def _check_folder(self) -> None:
        """Raise FormatError unless the written files are still in the dataset."""
        fds, paths = (self._folder.fd, *self._sink.fds), (self._folder.directories[-1], *self._sink.shards)
        if not all(map(is_open_at, fds, paths)):
            raise FormatError(
                f"{self._store.path} was replaced or restriped while {self.name!r} was written: "
                "create the table again"
            )

    def _explaining(self, what: str) -> contextlib.AbstractContextManager[None]:
        return unchanged_on_error(self._store.path, f"{what} table {self.name!r}")


def publish_tables(writers: Sequence[TableWriter]) -> FeatureStore:
    """Publish tables of one dataset together: a reader sees all of them or none. See TableWriter.publish."""
    store = writers[0]._store
    for writer in writers:
        if writer.temporary:
            raise ValueError(f"{writer.name!r} is temporary and cannot be published")
        if writer._state in ("published", "discarded"):
            raise ValueError(f"{writer.name!r} is {writer._state} already: create the table again")
        writer.finish()
    with changing(store.path, f"publishing table {writers[0].name!r}") as manifest:
        tables = {table.name: table for table in manifest.tables}
        replaced = [tables[w.name] for w in writers if w.name in tables]
        for writer in writers:
            writer._check_folder()
            if writer.name in tables and not writer.replace:
                raise FileExistsError(
                    f"{store.name} has a table {writer.name!r} by now; the new table is discarded"
                )
            tables[writer.name] = writer.entry
        manifest = dataclasses.replace(manifest, tables=tuple(tables.values()))
        replace_manifest(store.path, manifest)
        for old in replaced:
            remove_replaced(old, store.locate, manifest)
    for writer in writers:
        writer._state = "published"
        writer.discard()
    return store.reopen()


def _is_plain(rows: np.ndarray) -> bool:
    """Whether torch takes the array as it is."""
    return rows.flags.writeable and rows.dtype.isnative and all(stride >= 0 for stride in rows.strides)


class TableFolder:
    """A new folder for the files of a table, locked until close(). The caller is in changing().

    It has a unique name, `tables/TABLE.XXXXXXXX` (and one with this name in every stripe directory), which no
    manifest names until it is published. A folder without a lock that no manifest names was left by a killed
    writer.

    stem: the beginning of its name. Shards are as many as in the first table of the dataset, and in the same
    directories. Removes the folders of killed writers. Raises FormatError for a directory that is
    not allowed, OSError.

    Attributes: name; fd; shards, checksums (paths as in a manifest); directories (of all files).
    """

    def __init__(self, root: Path, manifest: Manifest, locate: Locator, stem: str) -> None:
        like = manifest.tables[0].shards if manifest.tables else ()
        for shard in like:
            locate.shard(shard)
        outside = [Path(s).parent.parent for s in like if os.path.isabs(s)]
        _remove_leftovers(root, manifest, outside)
        self._root, self._pid = root, os.getpid()
        self.name = f"{stem}.{secrets.token_hex(4)}"
        main = root / _TABLES / self.name
        main.mkdir(parents=True)
        for parent in (main.parent, root):  # leftovers are found by this folder
            sync_directory(parent)
        self.fd = os.open(main, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self.directories = [*dict.fromkeys(parent / self.name for parent in outside), main]
        self.checksums = f"{_TABLES}/{self.name}/checksum.bin"
        self.shards = shard_paths(self.name, outside, max(1, len(like)))

    def close(self) -> None:
        """Remove the files, unless the manifest names them, and release the lock. A forked child removes
        nothing."""
        if os.getpid() != self._pid:
            self.directories = []
        with contextlib.suppress(FormatError, OSError):  # the dataset is gone
            if self.name in _named(read_manifest(self._root)):
                self.directories = []
        _remove_folders(*self.directories)
        os.close(self.fd)


def remove_replaced(entry: TableEntry, locate: Locator, manifest: Manifest) -> None:
    """Remove the files of a table that this manifest no longer names. Ignores errors."""
    with contextlib.suppress(FormatError, OSError):
        main = locate.array(entry.checksums).path.parent
        outside = {locate.shard(shard).path.parent for shard in entry.shards} - {main}
        if not {folder.name for folder in (main, *outside)} & _named(manifest):
            _remove_folders(*sorted(outside), main)


def _named(manifest: Manifest) -> set[str]:
    """The names of the table folders in a manifest."""
    return {Path(p).parent.name for t in manifest.tables for p in (t.checksums.path, *t.shards)}


def _remove_leftovers(root: Path, manifest: Manifest, outside: Sequence[Path]) -> None:
    if not (root / _TABLES).is_dir():
        return
    named = _named(manifest)
    for folder in sorted((root / _TABLES).iterdir()):
        if folder.name in named or folder.is_symlink() or not folder.is_dir():
            continue
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_folders(*(parent / folder.name for parent in outside), folder)
        except BlockingIOError:
            pass  # another writer uses it
        finally:
            os.close(fd)


def _remove_folders(*folders: Path) -> None:
    """Remove the files of a table, and its folders if they are then empty. The last folder is the one in the
    dataset, by which leftovers are found."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for file in folder.iterdir():
                if _OURS.fullmatch(file.name):
                    file.unlink()
            folder.rmdir()
            sync_directory(folder.parent)
