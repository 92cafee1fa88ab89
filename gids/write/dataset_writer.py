"""DatasetWriter: builds a dataset beside its final path, syncs it, and renames it to that path.

Called by the converters and by users. A reader of the final path sees the whole dataset or none. With a
`resume_key`, a killed conversion keeps the tables and arrays that were finished.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gids.errors import FormatError, StorageError, naming
from gids.store import FeatureStore
from gids.store.dtypes import TABLE_DTYPES, check_scale, dtype_name, is_whole
from gids.store.files import array_rows, load_scales, map_array
from gids.store.geometry import DEFAULT_PAGE_BYTES, table_page_bytes
from gids.store.ids import ID_ROLES
from gids.store.manifest import (
    ArrayEntry,
    Manifest,
    NodesEntry,
    RelationEntry,
    ScaleEntry,
    TableEntry,
    array_entry,
    position_dtype,
    table_entry,
)
from gids.store.names import SPLITS, Relation, describe_type, encode_path, shard_paths, table_name, table_path
from gids.store.rows import Rows, Values, as_int64, as_rows, blocks, checked_ids, checked_order
from gids.write.edges import EdgeSource, out_degrees
from gids.write.files import write_array
from gids.write.graph_writer import GraphWriter, TimesOf, check_times, scratch_times, time_dtype
from gids.write.narrow import Narrowing, Tally, column_scales, narrowed, quantized
from gids.write.page_sink import PageSink, write_rows
from gids.write.row_order import InEdges, ScatteredRows, as_positions
from gids.write.table_writer import TableWriter
from gids.write.workplace import Workplace, dataset_path

_PIECE_BYTES = 8 << 20
_LABEL_DTYPES = [TABLE_DTYPES[n] for n in ("float16", "float32", "float64", "int8", "uint8", "int32", "bool")]
"""Besides int64: the types that arrays of a dataset have and that torch calculates with."""

Positions = np.ndarray | torch.Tensor
RowOrder = Positions | Callable[[], Positions]


class DatasetWriter:
    """Writes a dataset. A context manager that publishes the dataset on success.

    path: the dataset to make, NAME.gids. page_bytes: page size of tables, a multiple of 512; longer rows get
    longer pages. stripe: number of shards in the dataset's directory, or directories that get one shard each.
    workers: number of threads. memory_bytes: limit of the memory for buffers. resume_key: JSON that describes
    the input. A later writer with an equal key keeps the tables and arrays that are finished; without a key,
    unfinished work is removed. overwrite: replace the dataset at `path` when this one is finished; its shards
    in other directories stay. on_bytes(n): progress, from any thread.

    Raises FileExistsError if something is at `path`, FormatError, and StorageError if the disk is full (errno
    ENOSPC, EDQUOT, EFBIG). Then nothing is published.

    Attributes: resumed (whether work of an earlier writer is resumed); restart_reason (why existing work is
    not resumed, or "").
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        page_bytes: int = DEFAULT_PAGE_BYTES,
        stripe: int | Sequence[str | os.PathLike[str]] = 1,
        workers: int = 2,
        memory_bytes: int = 256 << 20,
        resume_key: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        table_page_bytes(1, page_bytes)
        if workers < 1 or memory_bytes < 1 << 20:
            raise ValueError(
                f"workers={workers}, memory_bytes={memory_bytes}; they must be at least 1 and 1 MiB"
            )
        if isinstance(stripe, str | os.PathLike):  # of which each character would be a directory
            raise TypeError(f"stripe must be a list of directories: give [{os.fspath(stripe)!r}]")
        stripe_dirs = [] if isinstance(stripe, int) else [Path(directory) for directory in stripe]
        self._shard_count = stripe if isinstance(stripe, int) else len(stripe_dirs)
        if self._shard_count < 1:
            raise ValueError(f"stripe={stripe!r}; it must be 1 or more shards, or a list of directories")
        self.path = dataset_path(path)
        self._page_bytes, self._workers, self._memory_bytes = page_bytes, workers, memory_bytes
        self._on_bytes = on_bytes
        self._counts: dict[str, int] = {}
        self._node_arrays: dict[str, dict[str, ArrayEntry]] = {}
        self._relations: dict[Relation, tuple[int, dict[str, ArrayEntry]]] = {}
        self._sorted_by: dict[Relation, str] = {}
        self._tables: list[TableEntry] = []
        self._open_tables: list[TableWriter] = []
        self._resumable = resume_key is not None
        self._workplace = Workplace(
            self.path, stripe_dirs, resume_key, overwrite=overwrite, on_bytes=on_bytes
        )
        self._once = self._workplace.once
        self._root = self._workplace.root
        self.resumed = self._workplace.resumed
        self.restart_reason = self._workplace.restart_reason

    @property
    def scratch(self) -> Path:
        """A directory for temporary files. The next writer empties it."""
        return self._workplace.scratch

    @property
    def folders(self) -> list[Path]:
        """The folders of shards: the new dataset, or one folder in each stripe directory."""
        return self._workplace.folders or [self._root]

    @property
    def has_progress(self) -> bool:
        """Whether a later writer with the same key would find work to resume."""
        return self._workplace.has_progress

    def expect_bytes(self, size_bytes: int) -> None:
        """Set the total number of bytes, for the error when the disk is full."""
        self._workplace.needed_bytes = size_bytes

    def explain_full(self, error: OSError) -> StorageError | None:
        """A StorageError with advice if the error means that the disk is full, else None."""
        return self._workplace.explain_full(error, "it")

    def add_nodes(self, ntype: str, count: int) -> None:
        """Declare a node type. Writing a table, labels or a graph also declares its types."""
        known = self._counts.setdefault(ntype, count)
        if known != count:
            raise FormatError(
                f"node type {ntype!r} has {known} nodes in one part of the source and {count} in another"
            )

    def write_table(
        self,
        kind: str,
        type_: str | Relation,
        key: str,
        rows: Values,
        *,
        dtype: torch.dtype | None = None,
        scale: str | None = None,
        order: RowOrder | None = None,
        page_bytes: int | None = None,
        columns: Sequence[str] = (),
    ) -> tuple[Narrowing, Tally] | None:
        """Write one table.

        kind: "node" or "edge". type_: node type or (src, rel, dst). rows: values[row_count, *shape], for
        edges in order of edge ids: a tensor, an array, or anything with shape, dtype and slices (of h5py,
        zarr, …), which several threads read by blocks. dtype: cast to this type. Rounding to a shorter
        floating type is allowed; any other change of a value raises FormatError. scale: "row" or "column",
        for floating rows stored as int8: one scale per row or column; "column" reads the source twice. order:
        the position of each row on disk, int[row_count], each position once, or a function that returns it.
        Readers still use ids. An order needs the size of the table as scratch space on disk. page_bytes: page
        size of this table; None: that of the writer. columns: the names of the values of a row of one
        dimension (default: none).

        Returns how values were rounded and the largest error, or None if all values are exact.
        """
        rows = as_rows(rows)
        dtype = dtype or rows.dtype
        name = table_name(type_, key)
        if not rows.shape:
            raise FormatError(f"table {name!r} is a single number; its first dimension must be rows")
        folder = table_path(type_, key)
        with naming(f"table {name!r}"):
            if scale is not None:
                check_scale(scale, "scale")
            narrowing = Narrowing.of(rows.dtype, dtype, scale)
        entry = self._entry(kind, type_, key, rows.shape, dtype, page_bytes, scale, columns)
        with naming(f"table {name!r}"):
            if order is not None:
                entry = replace(entry, order=self._write_order(folder, name, rows.shape[0], order))
            if scale == "column":
                scales = self._write_column_scales(folder, rows, entry)
                entry = replace(entry, scale=ScaleEntry(scale, scales))
            item, size_bytes = _table_item(type_, key), entry.geometry.page_count * entry.page_bytes
            done = self._once(item, size_bytes, lambda: self._write_pages(rows, dtype, entry, narrowing))
        self._tables.append(entry.with_crc(done["crc32c"]))
        return None if narrowing is None else (narrowing, Tally(done["rounding"]))

    def open_table(
        self,
        kind: str,
        type_: str | Relation,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        page_bytes: int | None = None,
    ) -> TableWriter:
        """A table that is written block by block, in the order of its rows. See TableWriter.

        shape: [row_count, *shape of a row]. The other arguments are those of write_table. A writer with a
        resume_key writes it again when it resumes.
        """
        entry = self._entry(kind, type_, key, tuple(shape), dtype, page_bytes)
        table = TableWriter(self._root, entry, self._tables.append)
        self._open_tables.append(table)
        return table

    def _entry(
        self,
        kind: str,
        type_: str | Relation,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        page_bytes: int | None,
        scale: str | None = None,
        columns: Sequence[str] = (),
    ) -> TableEntry:
        """The entry of a new table, whose type is declared."""
        name, folder = table_name(type_, key), table_path(type_, key)
        names = {t.name for t in self._tables} | {t.name for t in self._open_tables}
        _refuse_twice(f"table {name!r}", name in names)
        if isinstance(type_, str):
            self.add_nodes(type_, shape[0])
        else:
            self._add_edges(type_, shape[0])
        with naming(f"table {name!r}"):
            return table_entry(
                kind,
                type_,
                key,
                shape,
                dtype,
                page_bytes=self._page_bytes if page_bytes is None else page_bytes,
                shards=shard_paths(folder, self._workplace.folders, self._shard_count),
                checksums=f"tables/{folder}/checksum.bin",
                scale=scale,
                columns=columns,
            )

    def _write_column_scales(self, folder: str, rows: Rows, entry: TableEntry) -> ArrayEntry:
        row_bytes = entry.geometry.row_bytes
        path = f"tables/{folder}/scale.npy"
        scales = column_scales(rows, lambda n: self._on_bytes(n * row_bytes))
        size_bytes = rows.shape[0] * row_bytes
        return self._write_array(
            f"scales {path}", path, "float32", entry.shape, scales, size_bytes=size_bytes
        )

    def _write_order(self, folder: str, name: str, row_count: int, order: RowOrder) -> ArrayEntry:
        def pieces() -> Iterator[np.ndarray]:
            positions = as_positions(order() if callable(order) else order, row_count, name)
            yield from checked_order(as_rows(positions), _PIECE_BYTES)

        path = f"tables/{folder}/order.npy"
        return self._write_array(f"order {folder}", path, position_dtype(row_count), (row_count,), pieces())

    def _write_pages(
        self, rows: Rows, dtype: torch.dtype, entry: TableEntry, narrowing: Narrowing | None
    ) -> dict[str, Any]:
        """Returns the CRC32C of the checksums, and the Tally of values that were rounded, as JSON."""
        source_row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
        tally, memory_bytes = Tally(), self._memory_bytes
        reordered = self.scratch / "reordered-rows"
        if entry.order is not None:
            rows = ScatteredRows(rows, self._map(entry.order), reordered, memory_bytes)
            memory_bytes //= 2
        if entry.scale is not None:
            columns = entry.scale.columns
            scales = None if columns is None else load_scales(self._root / columns.path, columns)
            rows, dtype = quantized(rows, scales, tally), torch.uint8
        elif narrowing is not None:
            rows = narrowed(rows, dtype, tally)

        with PageSink(self._root, entry) as sink:
            write_rows(
                rows,
                dtype,
                sink,
                source_row_bytes=source_row_bytes,
                workers=self._workers,
                memory_bytes=memory_bytes,
                on_bytes=self._on_bytes,
            )
            crc = sink.finish()
        reordered.unlink(missing_ok=True)
        return {"crc32c": crc, "rounding": tally.to_json()}

    def write_graph(
        self,
        relation: Relation,
        indptr: Values,
        indices: Values,
        *,
        num_src: int | None = None,
        edge_ids: Values | None = None,
        index_dtype: str = "int64",
    ) -> None:
        """Write the topology of a relation as in-edges (CSC).

        The sources of destination v are indices[indptr[v]:indptr[v + 1]]. num_src: required unless the source
        type is declared. edge_ids: the id of each edge in that order. index_dtype: "int64", "int32", or
        "auto": int32 where it fits. Raises FormatError for an invalid indptr or an id out of range.
        """
        indptr, indices = as_rows(indptr), as_rows(indices)
        ids = None if edge_ids is None else as_rows(edge_ids)
        self._declare(relation, num_src, indptr.shape[0] - 1)
        edge_count = indices.shape[0]
        if ids is not None and ids.shape != (edge_count,):
            raise FormatError(f"{describe_type(relation)} has {edge_count} edges but {ids.shape} edge ids")

        write = lambda files: files.write_in_edges(indptr, indices, ids)  # noqa: E731
        self._add_graph(relation, edge_count, write, index_dtype=index_dtype, keep_ids=ids is not None)

    def write_edges(
        self,
        relation: Relation,
        edges: EdgeSource,
        *,
        keep_ids: bool = True,
        sort_neighbors: bool = False,
        dedup: bool = False,
        index_dtype: str = "int64",
        times: Values | Literal["nodes"] | None = None,
    ) -> None:
        """Sort edges by destination (stable) and write the topology of the relation.

        edges: made by `edge_list` or `out_edges`. keep_ids: write edge_ids, unless ids are positions.
        sort_neighbors: sort the edges of one destination by source. dedup: remove duplicate edges; needs
        keep_ids=False and sorts neighbors. times: sort the edges of one destination by their times,
        int[count] in the order of ids, and write these; or "nodes": by those of their sources, which
        write_times wrote. Takes 40 bytes of memory per edge of one destination, and for times of edges 8
        bytes of scratch space per edge.
        """
        if times is not None and (dedup or sort_neighbors):
            raise ValueError(
                "times order the edges of a node, so sort_neighbors and dedup cannot: leave them out"
            )
        if dedup and keep_ids:
            raise ValueError("dedup removes edges, so ids would have gaps: give keep_ids=False")
        self._declare(relation, edges.num_src, edges.num_dst)

        edge_times = None if times is None or isinstance(times, str) else as_rows(times)
        if edge_times is not None:
            check_times(edge_times, edges.count, describe_type(relation))
        elif times is not None and "time" not in self._node_arrays.get(relation[0], {}):
            raise ValueError(f"{relation[0]!r} nodes have no times: call write_times first")

        def write(files: GraphWriter) -> dict[str, ArrayEntry]:
            times_of: TimesOf | None = None
            if edge_times is not None:
                by_id = scratch_times(edge_times, self.scratch / "edge-times")
                times_of = lambda _, ids: by_id[ids]  # noqa: E731
            elif times is not None:
                by_node = self._map(self._node_arrays[relation[0]]["time"])
                times_of = lambda sources, _: by_node[sources]  # noqa: E731
            return files.write_sorted(
                edges,
                self.scratch,
                self._memory_bytes // 2,
                sort_neighbors=sort_neighbors,
                workers=self._workers,
                times_of=times_of,
            )

        dtype = None if edge_times is None else time_dtype(edge_times)
        options = {"index_dtype": index_dtype, "keep_ids": keep_ids, "time_dtype": dtype}
        self._add_graph(relation, edges.count, write, dedup=dedup, **options)
        if times is not None:
            self._sorted_by[relation] = "nodes" if isinstance(times, str) else "edges"

    def write_times(self, ntype: str, times: Values) -> None:
        """Write one time per node, int[num_nodes]; stored as int32 if they fit, else int64."""
        rows = as_rows(times)
        self.add_nodes(ntype, rows.shape[0] if rows.shape else 0)
        check_times(rows, self._counts[ntype], repr(ntype))
        pieces = (block.numpy() for _, block in blocks(rows, _PIECE_BYTES))
        self._write_node_array(ntype, "time", time_dtype(rows), rows.shape, pieces)

    def _declare(self, relation: Relation, num_src: int | None, num_dst: int | None) -> None:
        for ntype, count in ((relation[0], num_src), (relation[2], num_dst)):
            if count is not None:
                self.add_nodes(ntype, count)
            elif ntype not in self._counts:
                raise FormatError(f"the number of {ntype!r} nodes is not known: declare it with add_nodes")

    def _add_edges(self, relation: Relation, count: int) -> dict[str, ArrayEntry]:
        known, arrays = self._relations.setdefault(relation, (count, {}))
        if known != count:
            raise FormatError(
                f"relation {describe_type(relation)} has {known} edges in one part of the source "
                f"and {count} in another"
            )
        return arrays

    def _add_graph(
        self,
        relation: Relation,
        edge_count: int,
        write: Callable[[GraphWriter], dict[str, ArrayEntry]],
        *,
        dedup: bool = False,
        **options: Any,
    ) -> None:
        """options: of GraphWriter."""
        if not dedup:
            self._add_edges(relation, edge_count)

        what = f"relation {describe_type(relation)}"
        _refuse_twice(what, relation in self._relations and bool(self._relations[relation][1]))

        def work() -> dict[str, ArrayEntry]:
            sizes = {"num_src": self._counts[relation[0]], "num_dst": self._counts[relation[2]]}
            options.update(sizes, edge_count=edge_count, dedup=dedup, on_bytes=self._on_bytes)
            with naming(what), GraphWriter(self._root, relation, **options) as files:
                return write(files)

        written = self._once(_graph_item(relation), edge_count * 8, work)
        arrays = self._add_edges(relation, written["indices"]["shape"][0])
        arrays.update({role: array_entry(fields) for role, fields in written.items()})

    def write_labels(self, ntype: str, labels: Values) -> None:
        """Write the label or labels of each node: labels[num_nodes, …], in this shape.

        Integers and bool of shape [num_nodes] or [num_nodes, 1] become int64; so do int16, uint16, uint32 and
        uint64. bfloat16 becomes float32. Raises FormatError for 2^63 and more.
        """
        labels = as_rows(labels)
        if not labels.shape:
            raise FormatError(f"labels of {ntype!r} are a single number; there must be one per node")
        self.add_nodes(ntype, labels.shape[0])
        is_class = math.prod(labels.shape[1:]) == 1 and (is_whole(labels.dtype) or labels.dtype == torch.bool)
        dtype = torch.float32 if labels.dtype == torch.bfloat16 else labels.dtype
        if is_class or (is_whole(dtype) and dtype not in _LABEL_DTYPES):
            dtype = torch.int64
        elif dtype not in _LABEL_DTYPES:
            described = f"{str(dtype).removeprefix('torch.')}{list(labels.shape)}"
            raise FormatError(f"labels of {ntype!r} are {described}; save them as float32 or int64")
        pieces = (
            (as_int64(block, "a label", first) if dtype == torch.int64 else block.to(dtype)).numpy()
            for first, block in blocks(labels, _PIECE_BYTES)
        )
        with naming(f"labels of {ntype!r}"):
            self._write_node_array(ntype, "label", dtype_name(dtype), labels.shape, pieces)

    def write_split(self, ntype: str, split: str, ids: Values) -> None:
        """Write the node ids, int[n], of a split: "train", "val" or "test"."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}: choose {', '.join(map(repr, SPLITS))}")
        ids = as_rows(ids)
        self._declare((ntype, "", ntype), None, None)
        if len(ids.shape) != 1 or not is_whole(ids.dtype):
            raise FormatError(
                f"{split}_idx of {ntype!r} is {ids.dtype}{list(ids.shape)}; it must be node ids, int64[n]"
            )
        pieces = checked_ids(ids, self._counts[ntype], f"{split}_idx", _PIECE_BYTES)
        self._write_node_array(ntype, f"{split}_idx", "int64", ids.shape, pieces)

    def copy_ids(self, store: FeatureStore) -> None:
        """Write the ids that another dataset stores of the node types declared here.

        Tables have their rows in the order of its nodes. gids.open([store, …]) matches them by these ids.
        Raises FormatError for another number of nodes.
        """
        for nodes in (n for n in store.manifest.nodes if n.type in self._counts):
            self.add_nodes(nodes.type, nodes.count)
            for role in (role for role in ID_ROLES if role in nodes.arrays):
                self.copy_node_array(nodes.type, role, store.locate.rows(nodes.arrays[role]))

    def copy_node_array(self, ntype: str, role: str, rows: Values) -> None:
        """Write an array of a dataset as it is: ids or heat. The type is declared."""
        values = as_rows(rows)
        pieces = (block.numpy() for _, block in blocks(values, _PIECE_BYTES))
        self._write_node_array(ntype, role, dtype_name(values.dtype), values.shape, pieces)

    def _write_node_array(
        self, ntype: str, role: str, dtype: str, shape: Sequence[int], pieces: Iterable[np.ndarray]
    ) -> None:
        arrays = self._node_arrays.setdefault(ntype, {})
        _refuse_twice(f"{role} of {ntype!r}", role in arrays)
        name = f"{encode_path(ntype)}.{role}"
        entry = self._write_array(f"nodes {name}", f"nodes/{name}.npy", dtype, shape, pieces)
        arrays[role] = entry

    def _write_array(
        self,
        item: str,
        path: str,
        dtype: str,
        shape: Sequence[int],
        pieces: Iterable[np.ndarray],
        *,
        size_bytes: int = 0,
    ) -> ArrayEntry:
        """Write an array, unless it is written already. size_bytes: its progress in that case."""

        write = partial(write_array, self._root, path, dtype, shape, pieces)
        return array_entry(self._once(item, size_bytes, write))

    def in_edges(self, ntype: str) -> list[InEdges]:
        """The memory-mapped graphs written so far between nodes of this type."""
        arrays = [a for r, (_, a) in self._relations.items() if r[0] == r[2] == ntype and a]
        return [(self._map(a["indptr"]), self._map(a["indices"])) for a in arrays]

    def order(self, table: str) -> np.ndarray | None:
        """The positions of the rows of a written table, memory-mapped; None: they are the ids."""
        (entry,) = (t.order for t in self._tables if t.name == table)
        return None if entry is None else self._map(entry)

    def _map(self, entry: ArrayEntry) -> np.ndarray:
        return map_array(self._root / entry.path, entry)

    def out_degrees(self, ntype: str) -> np.ndarray | None:
        """The out-degrees of nodes, uint32[n], or None without a graph. Call after all graphs are written."""
        self._write_out_degrees()
        entry = self._node_arrays.get(ntype, {}).get("out_degree")
        return None if entry is None else self._map(entry)

    def _write_out_degrees(self) -> None:
        for ntype, count in self._counts.items():
            entries = [
                a["indices"] for r, (_, a) in self._relations.items() if r[0] == ntype and "indices" in a
            ]
            if not entries or "out_degree" in self._node_arrays.get(ntype, {}):
                continue
            indices = [array_rows(self._root / e.path, e) for e in entries]
            pieces = out_degrees(indices, count, self._memory_bytes)
            self._write_node_array(ntype, "out_degree", "uint32", (count,), pieces)

    def commit(self, check: Callable[[], None] = lambda: None) -> None:
        """Finish, sync and publish the dataset. Raises FormatError if its parts do not agree, and ValueError
        if a table of open_table lacks rows. check: see Workplace.publish."""
        for table in self._open_tables:
            table.finish()
        self._write_out_degrees()
        nodes = [NodesEntry(t, n, self._node_arrays.get(t, {})) for t, n in self._counts.items()]
        relations = [
            RelationEntry(r, n, arrays, self._sorted_by.get(r)) for r, (n, arrays) in self._relations.items()
        ]
        manifest = Manifest(tuple(nodes), tuple(relations), tuple(self._tables))
        self._workplace.publish({"": manifest}, check=check)

    def close(self, *, discard: bool) -> None:
        """Stop without publishing. discard: remove what was written; else it can be resumed."""
        for table in self._open_tables:
            table.close()
        self._workplace.close(discard=discard)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._workplace.in_own_process:
                self.commit()
        finally:
            self.close(discard=not self._resumable)


def _graph_item(relation: Relation) -> str:
    return f"graph {encode_path(*relation)}"


def _table_item(type_: str | Relation, key: str) -> str:
    return f"table {table_path(type_, key)}"


def _refuse_twice(what: str, is_there: bool) -> None:
    """Raise FormatError for what was written already."""
    if is_there:
        raise FormatError(f"{what} occurs twice: write it once")
