"""Converts a source to a dataset. Can resume. Called by `gids convert`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from gids.convert.damage import from_library
from gids.convert.edge_options import add_reverse_edges, add_self_loops, as_edges, refuse_tables
from gids.convert.labels import masks_to_splits, normalised, random_split
from gids.convert.page_sizes import PageSizes, direct_alignment
from gids.convert.source import InEdges, Source, TableSource, check_source
from gids.convert.table_orders import ReadRows, RowOrders, bytes_aside, check_order
from gids.convert.times import describe_times
from gids.errors import FormatError
from gids.store.dtypes import dtype_name, table_dtype
from gids.store.geometry import DEFAULT_PAGE_BYTES, Geometry
from gids.store.names import Relation, describe_type
from gids.store.quantize import check_scale, stored_geometry, stored_row_bytes
from gids.write.dataset_writer import DatasetWriter
from gids.write.edge_sort import EDGE_BYTES
from gids.write.edges import EdgeSource
from gids.write.narrow import describe_rounding
from gids.write.publish import dataset_path
from gids.write.space import check_space, total_bytes
from gids.write.workplace import finish_published


@dataclass(frozen=True)
class Options:
    """How to convert.

    page_bytes: of all tables; None: chosen by row, see page_sizes. stripe: a directory per shard. dtypes:
    table name or key ("" for all others) -> type to cast to. scales: the same -> "row" (default) or "column",
    for floating tables cast to int8. order: of rows that share pages, see table_orders; read_rows: for order
    "trace". index_dtype: "int64", "int32" or "auto" (int32 where it fits). reverse_edges, self_loops: see
    edge_options. sort_neighbors, dedup: see DatasetWriter.write_edges. times: store the times of nodes and
    edges, and sort edges by them. split: fractions of train, val and test for labels without splits, or None.
    split_column: column of masks of shape (nodes, splits). workers and memory_bytes do not change the result.
    """

    page_bytes: int | None = None
    stripe: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    order: str = "original"
    read_rows: ReadRows | None = None
    index_dtype: str = "int64"
    keep_edge_ids: bool = True
    reverse_edges: bool = False
    self_loops: bool = False
    sort_neighbors: bool = False
    dedup: bool = False
    times: bool = True
    split: tuple[float, ...] | None = (0.6, 0.2, 0.2)
    split_column: int | None = None
    seed: int = 0
    workers: int = 2
    memory_bytes: int = 256 << 20
    overwrite: bool = False

    def key(self) -> dict[str, Any]:
        """The options that a resumed conversion must have in common with the first run."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FREE}
        values["stripe"] = [os.path.realpath(d) for d in self.stripe]
        return {_OPTIONS.get(name, f"--{name.replace('_', '-')}"): v for name, v in values.items()}


_EDGE_OPTIONS = ("reverse_edges", "self_loops", "sort_neighbors", "dedup")
_TIME_BYTES = 16  # per edge, in the dataset and in a scratch file
_FREE = ("read_rows", "workers", "memory_bytes", "overwrite")  # may change when a conversion resumes
_OPTIONS = {"dtypes": "--dtype", "scales": "--scale", "keep_edge_ids": "--no-edge-ids", "times": "--no-times"}


def _silent(*_: Any) -> None:
    pass


def convert(
    files: Sequence[Path],
    open_source: Callable[[Path], Source],
    path: str | os.PathLike[str],
    options: Options,
    *,
    key: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = _silent,
    warn: Callable[[str], None] = _silent,
    on_total: Callable[[int], None] = _silent,
    on_bytes: Callable[[int], None] = _silent,
    sync_bytes: int = 256 << 20,
) -> None:
    """Convert a source to a dataset at `path`.

    files: the files of the source; if one changes, a resumed conversion starts again. open_source(scratch
    directory): reads the source. key: what else the source depends on. say(sentence): prints a note;
    warn(sentence): prints a warning. on_total(bytes), on_bytes(n): progress.

    After an interrupt, a kill or a full disk, NAME.partial remains and the same call continues. Raises
    FormatError for an unusable source, and then leaves nothing; also FileExistsError and StorageError.
    """
    fingerprint = _fingerprint(files)
    alignment = 1
    if options.page_bytes is None:
        alignment = direct_alignment([dataset_path(path).parent, *map(Path, options.stripe)])
    pages = PageSizes(options.page_bytes, alignment, ordered=options.order != "original")
    resume_key = {"the source": fingerprint, **options.key(), "--page-bytes": pages.key(), **(key or {})}
    if finish_published(dataset_path(path), resume_key):
        say("the dataset is complete; removed the temporary files of an earlier run that was killed")
        return
    writer = DatasetWriter(
        path,
        page_bytes=options.page_bytes or DEFAULT_PAGE_BYTES,
        stripe=options.stripe or 1,
        workers=options.workers,
        memory_bytes=options.memory_bytes,
        overwrite=options.overwrite,
        resume_key=resume_key,
        sync_bytes=sync_bytes,
        on_bytes=on_bytes,
    )
    try:
        if writer.resumed and writer.has_progress:
            say("resuming an unfinished conversion")
        elif writer.restart_reason:
            say(f"found an unfinished conversion, but {writer.restart_reason}: starting again")
        source = open_source(writer.scratch)
        for warning in source.warnings:
            warn(warning)
        for note in source.notes:
            say(note)
        check_source(source)
        _check_edge_tables(source)
        if not options.times:
            source.node_times, source.edge_times = {}, {}
        for note in describe_times(source):
            say(note)
        _change_edges(source, options)
        _check(source, options)
        on_total(sum(_work_bytes(source, options, pages)))
        check_space(_needed(source, options, pages, writer), _written(writer))
        writer.expect_bytes(total_bytes(_needed(source, options, pages, writer)))
        masks_to_splits(source, options.split_column)  # reads the masks
        _write(source, options, pages, writer, say)
        if _fingerprint(files) != fingerprint:
            raise FormatError("the source changed during the conversion; convert it again")
        writer.commit()
    except BaseException as error:
        explained: Exception | None = from_library(error, files)
        if isinstance(error, OSError):
            explained = writer.explain_full(error)
        is_unusable = isinstance(explained or error, FormatError)
        writer.close(discard=is_unusable or not writer.has_progress)
        if explained is None:
            raise
        raise explained from error


def _write(
    source: Source, options: Options, pages: PageSizes, writer: DatasetWriter, say: Callable[[str], None]
) -> None:
    for ntype, count in source.nodes.items():
        writer.add_nodes(ntype, count)
    for ntype, times in source.node_times.items():
        writer.write_times(ntype, times)
    for relation, topology in source.graphs.items():
        index_dtype = _index_dtype(relation, source, options)
        has_loops = options.self_loops and relation[0] == relation[2]
        keep_ids = options.keep_edge_ids and not (options.dedup or has_loops)
        if isinstance(topology, InEdges):
            ids = topology.edge_ids if keep_ids else None
            writer.write_graph(
                relation, topology.indptr, topology.indices, edge_ids=ids, index_dtype=index_dtype
            )
        else:
            writer.write_edges(
                relation,
                topology,
                keep_ids=keep_ids,
                sort_neighbors=options.sort_neighbors,
                dedup=options.dedup,
                index_dtype=index_dtype,
                times=source.edge_times.get(relation, "nodes" if relation[0] in source.node_times else None),
            )
    for ntype, found in source.labels.items():
        labels = normalised(found)
        if found.dtype.is_floating_point and not labels.dtype.is_floating_point:
            say(f"labels of {ntype!r} are whole numbers with gaps: stored as int64, -1 for no label")
        writer.write_labels(ntype, labels)
        if ntype not in source.splits and options.split is not None:
            drawn = source.splits[ntype] = random_split(labels, options.split, options.seed)
            sizes = ", ".join(f"{split} {ids.shape[0]}" for split, ids in drawn.items())
            say(
                f"{ntype!r} nodes have labels but no split: drew {sizes} labelled nodes at random with seed "
                f"{options.seed} (change it with --split and --seed)"
            )
    for ntype, splits in source.splits.items():
        for split, ids in splits.items():
            writer.write_split(ntype, split, ids)
    orders = RowOrders(options.order, writer, options.read_rows, options.memory_bytes, options.workers, say)
    for table in source.tables:
        dtype, scale = _dtype(table, options), _scale(table, options)
        if dtype == torch.float64 and not _chosen(table, options.dtypes):
            say(
                f"{table.name} is float64, twice the bytes of float32, which most models use; convert it "
                "with --dtype float32"
            )
        layout = _layout(table, options, pages, 1)
        rounded = writer.write_table(
            table.kind,
            table.type,
            table.key,
            table.rows,
            dtype=dtype,
            scale=scale,
            order=orders.of(table, layout),
            page_bytes=layout.page_bytes,
        )
        if rounded is not None:
            say(f"{table.name}: {describe_rounding(*rounded)}")


def _check_edge_tables(source: Source) -> None:
    """Raise FormatError for a table of edges with too many or too few rows."""
    counts = {relation: _count(topology) for relation, topology in source.graphs.items()}
    for table in source.tables:
        if isinstance(table.type, str):
            continue
        known = counts.setdefault(table.type, table.rows.shape[0])
        if known != table.rows.shape[0]:
            raise FormatError(
                f"relation {describe_type(table.type)} has {known} edges, but its table {table.key!r} has "
                f"{table.rows.shape[0]} rows"
            )


def _check_applicable(source: Source, options: Options) -> None:
    """Raise FormatError for an option about edges if the source has no such edges."""
    given = [f"--{n.replace('_', '-')}" for n in _EDGE_OPTIONS if getattr(options, n)]
    given += [] if options.keep_edge_ids else ["--no-edge-ids"]
    if given and not source.graphs:
        raise FormatError(f"{', '.join(given)}: the source has no edges; leave out the option")
    if options.self_loops and not any(src == dst for src, _, dst in source.graphs):
        raise FormatError("--self-loops: the source has no relation within a node type; leave out the option")


def _change_edges(source: Source, options: Options) -> None:
    """Apply the options that add edges, and turn in-edges into edges if they must be sorted."""
    _check_applicable(source, options)
    if options.reverse_edges:
        add_reverse_edges(source)
    if options.self_loops:
        add_self_loops(source)
    for relation, topology in source.graphs.items():
        timed = relation in source.edge_times or relation[0] in source.node_times
        if timed and (options.sort_neighbors or options.dedup):
            option = "--dedup" if options.dedup else "--sort-neighbors"
            raise FormatError(
                f"{option} sorts the edges of {describe_type(relation)} by source, but they are in the order "
                "of their times: leave it out, or give --no-times"
            )
        if timed or options.sort_neighbors or options.dedup:
            source.graphs[relation] = as_edges(topology, **source.ends(relation))
    if options.dedup:
        for relation in source.graphs:
            refuse_tables(source, relation, "--dedup removes edges")


def _index_dtype(relation: Relation, source: Source, options: Options) -> str:
    if options.index_dtype != "auto":
        return options.index_dtype
    most = max(source.node_count(relation[0]), _count(source.graphs[relation]))
    return "int32" if most <= 1 << 31 else "int64"


def _check(source: Source, options: Options) -> None:
    check_order(options.order, options.read_rows, source)
    names = {n for t in source.tables for n in (t.name, t.key)}
    for option, named in (("--dtype", options.dtypes), ("--scale", options.scales)):
        for name in named:
            if name and name not in names:
                raise FormatError(f"{option}: no table {name!r}; the source has {', '.join(sorted(names))}")
    scaled = {n for t in source.tables if _scale(t, options) for n in (t.name, t.key, "")}
    for name, scale in options.scales.items():
        check_scale(scale, f"--scale {name}".rstrip())
        if name not in scaled:
            raise FormatError(
                f"--scale {name or scale} is for floating features stored as int8: add --dtype int8"
            )
    edge_tables = [t for t in source.tables if t.kind == "edge"]
    if edge_tables and not options.keep_edge_ids:
        raise FormatError(f"table {edge_tables[0].key!r} of edges needs edge ids: remove --no-edge-ids")


def _dtype(table: TableSource, options: Options) -> torch.dtype:
    chosen = _chosen(table, options.dtypes)
    return table.rows.dtype if chosen is None else table_dtype(chosen)


def _scale(table: TableSource, options: Options) -> str | None:
    """The scale of floating features that become int8. Whole numbers are cast without a scale."""
    if _dtype(table, options) != torch.int8 or not table.rows.dtype.is_floating_point:
        return None
    return _chosen(table, options.scales) or "row"


def _chosen(table: TableSource, options: Mapping[str, str]) -> str | None:
    """The value of an option for a table: by its name, by its key, or for all."""
    return next((options[name] for name in (table.name, table.key, "") if name in options), None)


def _layout(table: TableSource, options: Options, pages: PageSizes, shard_count: int) -> Geometry:
    dtype, scale = _dtype(table, options), _scale(table, options)
    page_bytes = pages.of(table.kind, stored_row_bytes(table.rows.shape[1:], dtype.itemsize, scale))
    try:
        dtype_name(dtype)
        return stored_geometry(
            table.rows.shape, dtype.itemsize, scale, page_bytes=page_bytes, shard_count=shard_count
        )
    except FormatError as error:
        raise FormatError(f"table {table.name!r}: {error}") from None


def _work_bytes(source: Source, options: Options, pages: PageSizes) -> Iterator[int]:
    """The bytes of progress: of edges, of pages, and of rows that are read for scales of columns."""
    yield from (8 * _count(topology) for topology in source.graphs.values())
    for table in source.tables:
        layout = _layout(table, options, pages, 1)
        yield layout.page_count * layout.page_bytes
        if _scale(table, options) == "column":
            yield layout.row_count * layout.row_bytes


def _count(topology: InEdges | EdgeSource) -> int:
    return topology.indices.shape[0] if isinstance(topology, InEdges) else topology.count


def _written(writer: DatasetWriter) -> set[Path]:
    partial = writer.scratch.parent
    return {partial} | {folder for folder in writer.folders if not folder.is_relative_to(partial)}


def _needed(
    source: Source, options: Options, pages: PageSizes, writer: DatasetWriter
) -> Iterator[tuple[Path, int]]:
    """(directory, bytes) that the conversion needs."""
    main = writer.path.parent
    for table in source.tables:
        layout = _layout(table, options, pages, len(writer.folders))
        for shard, folder in enumerate(writer.folders):
            is_main = folder.is_relative_to(writer.scratch.parent)
            yield main if is_main else folder.parent, layout.shard_bytes(shard)
        yield main, 4 * layout.page_count  # checksums
        if options.order != "original":
            yield main, bytes_aside(table, layout)
    for relation, topology in source.graphs.items():
        edge_bytes = 2 * table_dtype(_index_dtype(relation, source, options)).itemsize
        if not isinstance(topology, InEdges):
            edge_bytes += 2 * EDGE_BYTES  # sorting may keep two copies of the edges in scratch files
        edge_bytes += _TIME_BYTES * (relation in source.edge_times)
        yield main, edge_bytes * _count(topology)
    nodes = sum(source.nodes.values())
    yield main, nodes * (4 + 8 * len(source.graphs) + 16)  # out-degrees, indptr, labels, splits
    yield main, 8 * sum(source.nodes[ntype] for ntype in source.node_times)


def _fingerprint(files: Sequence[Path]) -> dict[str, list[int]]:
    found = {os.path.realpath(f): os.stat(f) for f in files}
    return {path: [s.st_size, s.st_mtime_ns, s.st_ino] for path, s in found.items()}
