"""Converts a source to a dataset. After a kill, keeps what was finished. Called by `gids convert`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gids.convert.edges import add_reverse_edges, add_self_loops, as_edges, refuse_tables
from gids.convert.labels import describe_times, masks_to_splits, normalised, random_split
from gids.convert.layout import PageSizes, RowOrders, check_order, direct_alignment, order_of
from gids.convert.options import DEFAULT_SPLIT, Options
from gids.convert.source import InEdges, Source, StoredGraph, TableSource, check_source
from gids.errors import FormatError, naming
from gids.store.dtypes import check_scale, dtype_name, stored_geometry, stored_row_bytes, table_dtype
from gids.store.geometry import DEFAULT_PAGE_BYTES, Geometry
from gids.store.names import HEAT_ROLES, Relation, describe_type
from gids.write.dataset_writer import DatasetWriter
from gids.write.edges import EDGE_BYTES, EdgeSource
from gids.write.files import check_space
from gids.write.graph_writer import chosen_index_dtype
from gids.write.narrow import describe_rounding
from gids.write.row_order import bytes_needed
from gids.write.workplace import dataset_path

_EDGE_OPTIONS = ("reverse_edges", "self_loops", "sort_neighbors", "dedup")
_CHANGES_DEGREES = ("reverse_edges", "self_loops", "dedup")
_TIME_BYTES = 8  # per edge, in the dataset, and also in a scratch file


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
    on_stage: Callable[[str], None] = _silent,
    on_total: Callable[[int], None] = _silent,
    on_bytes: Callable[[int], None] = _silent,
) -> None:
    """Convert a source to a dataset at `path`.

    files: the files of the source; if one changes, a resumed conversion starts again. open_source(scratch
    directory): reads the source. key: what else the source depends on. say(sentence): prints a note;
    warn(sentence): prints a warning. on_stage(what is written now), on_total(bytes), on_bytes(n): progress.

    After an interrupt, a kill or a full disk, NAME.partial remains; the same call keeps the tables and arrays
    that are finished, and writes the others again. Raises FormatError for an unusable source, and then leaves
    nothing; FileExistsError if something is at `path`, StorageError.
    """
    fingerprint = _fingerprint(files)
    alignment = 1
    if options.page_bytes is None:
        alignment = direct_alignment([dataset_path(path).parent, *map(Path, options.stripe)])
    pages = PageSizes(options.page_bytes, alignment, options.order)
    writer = DatasetWriter(
        path,
        page_bytes=options.page_bytes or DEFAULT_PAGE_BYTES,
        stripe=options.stripe or 1,
        workers=options.workers,
        memory_bytes=options.memory_bytes,
        overwrite=options.overwrite,
        resume_key={"the source": fingerprint, **options.key(), "--page-bytes": pages.key(), **(key or {})},
        on_bytes=on_bytes,
    )
    try:
        if writer.resumed and writer.has_progress:
            say("resuming an unfinished conversion")
        elif writer.restart_reason:
            say(f"found an unfinished conversion, but {writer.restart_reason}: starting again")
        on_stage("reading the source")
        source = open_source(writer.scratch)
        for warning in source.warnings:
            warn(warning)
        for note in source.notes:
            if not (options.self_loops and "--self-loops" in note):
                say(note)
        check_source(source)
        if not options.times:
            source.node_times, source.edge_times = {}, {}
        if source.stored is None and (note := describe_times(source)):
            say(note)
        _change_edges(source, options)
        conversion = _Conversion(source, options, pages, writer, say, on_stage)
        on_total(conversion.work_bytes())
        if not writer.resumed:  # what is finished takes its room already
            check_space(conversion.needed())  # before masks are read, which takes long if they are large
        masks_to_splits(source, writer.scratch, options.split_column)
        if not writer.resumed:
            writer.expect_bytes(check_space(conversion.needed()))
        conversion.write()
        on_stage("publishing")
        writer.commit(lambda: _check_unchanged(files, fingerprint))
    except BaseException as error:
        explained = writer.explain_full(error) if isinstance(error, OSError) else None
        is_unusable = isinstance(explained or error, FormatError)
        writer.close(discard=is_unusable or not writer.has_progress)
        if explained is None:
            raise
        raise explained from error


def _change_edges(source: Source, options: Options) -> None:
    """Apply the options that add edges, and turn in-edges into edges if they must be sorted.

    Raises FormatError for an option about edges if the source has no such edges.
    """
    chosen = [f"--{n.replace('_', '-')}" for n in _EDGE_OPTIONS if getattr(options, n)]
    chosen += [] if options.keep_edge_ids else ["--no-edge-ids"]
    if chosen and not source.graphs:
        raise FormatError(f"{', '.join(chosen)}: the source has no edges; leave out the option")
    if options.self_loops and not any(src == dst for src, _, dst in source.graphs):
        raise FormatError("--self-loops: the source has no relation within a node type; leave out the option")
    if options.reverse_edges:
        add_reverse_edges(source)
    if options.self_loops:
        add_self_loops(source)
    if options.dedup:
        for relation in source.graphs:
            refuse_tables(source, relation, "--dedup removes edges")
    for relation, topology in source.graphs.items():
        is_timed = source.times_of(relation) is not None
        if is_timed and (options.sort_neighbors or options.dedup):
            option = "--dedup" if options.dedup else "--sort-neighbors"
            raise FormatError(
                f"{option} sorts the edges of {describe_type(relation)} by source, but they are in the order "
                "of their times: leave it out, or give --no-times"
            )
        if is_timed or options.sort_neighbors or options.dedup:
            source.graphs[relation] = as_edges(topology, **source.ends(relation))


@dataclass(frozen=True)
class _TablePlan:
    """How a table is written: its type, its scale, its layout in one shard, and the order of its rows."""

    table: TableSource
    dtype: torch.dtype
    scale: str | None
    layout: Geometry
    order: str | None


def _plan(table: TableSource, options: Options, pages: PageSizes) -> _TablePlan:
    """What the options, or else the dataset that is read, say about a table."""
    chosen, stored, rows = _chosen(table, options.dtypes), table.stored, table.rows
    dtype = table_dtype(chosen) if chosen else rows.dtype if stored is None else stored.dtype
    scale = None
    if dtype == torch.int8 and rows.dtype.is_floating_point:  # whole numbers are cast without a scale
        scale = _chosen(table, options.scales) or (None if stored is None else stored.scale) or "row"
    row_bytes = stored_row_bytes(rows.shape[1:], dtype.itemsize, scale)
    page_bytes = pages.choose(table.kind, row_bytes, stored)
    with naming(f"table {table.name!r}"):
        dtype_name(dtype)
        layout = stored_geometry(rows.shape, dtype.itemsize, scale, page_bytes=page_bytes, shard_count=1)
    return _TablePlan(table, dtype, scale, layout, order_of(table, layout, options.order))


@dataclass
class _Conversion:
    """A source, the options, and the writer: what is written, how, and how much space it needs.

    Raises FormatError for options that do not fit the source, and tables that do not fit the edges.
    """

    source: Source
    options: Options
    pages: PageSizes
    writer: DatasetWriter
    say: Callable[[str], None]
    on_stage: Callable[[str], None]
    plans: list[_TablePlan] = field(init=False)

    def __post_init__(self) -> None:
        source, options = self.source, self.options
        self._check_edges()
        check_order(options.order, source)
        names = {n for t in source.tables for n in (t.name, t.key)}
        for option, chosen in (("--dtype", options.dtypes), ("--scale", options.scales)):
            for name in chosen:
                if name and name not in names:
                    raise FormatError(
                        f"{option}: no table {name!r}; the source has {', '.join(sorted(names))}"
                    )
        self.plans = [_plan(table, options, self.pages) for table in source.tables]
        scaled = {n for p in self.plans if p.scale for n in (p.table.name, p.table.key, "")}
        for name, scale in options.scales.items():
            check_scale(scale, f"--scale {name}".rstrip())
            if name not in scaled:
                raise FormatError(
                    f"--scale {name or scale} is for floating features stored as int8: add --dtype int8"
                )
        if options.split and not source.labels.keys() - source.splits.keys() - source.masks.keys():
            why = "has splits already" if source.labels else "has no labels"
            raise FormatError(f"--split draws a split of labeled nodes, but the source {why}: leave it out")

    def _check_edges(self) -> None:
        counts = {relation: _count(topology) for relation, topology in self.source.graphs.items()}
        for table in [t for t in self.source.tables if t.kind == "edge"]:
            count = table.rows.shape[0]
            known = counts.setdefault(table.type, count)  # type: ignore[arg-type]
            if known != count:
                raise FormatError(
                    f"relation {describe_type(table.type)} has {known} edges, but its table {table.key!r} "
                    f"has {count} rows; leave it out with --skip {table.key}"
                )
            if not self.options.keep_edge_ids:
                raise FormatError(f"table {table.key!r} of edges needs edge ids: remove --no-edge-ids")

    def write(self) -> None:
        source, writer = self.source, self.writer
        for ntype, count in source.nodes.items():
            writer.add_nodes(ntype, count)
        for ntype, times in source.node_times.items():
            writer.write_times(ntype, times)
        for ntype, arrays in source.ids.items():
            for role, rows in arrays.items():
                writer.copy_node_array(ntype, role, rows)
        for relation in source.graphs:
            self._write_graph(relation)
        for ntype in source.labels:
            self._write_labels(ntype)
        for ntype, splits in source.splits.items():
            for split, ids in splits.items():
                writer.write_split(ntype, split, ids)
        if source.stored is not None:
            self._write_heat(source.stored)
        orders = RowOrders(self.options, writer, self.say)
        for plan in self.plans:
            self._write_table(plan, orders)

    def _write_graph(self, relation: Relation) -> None:
        options, topology = self.options, self.source.graphs[relation]
        self.on_stage(f"edges {describe_type(relation)}")
        index_dtype = self._index_dtype(relation)
        has_loops = options.self_loops and relation[0] == relation[2]
        keep_ids = options.keep_edge_ids and not (options.dedup or has_loops)
        if isinstance(topology, InEdges):
            ids = topology.edge_ids if keep_ids else None
            self.writer.write_graph(
                relation, topology.indptr, topology.indices, edge_ids=ids, index_dtype=index_dtype
            )
        else:
            self.writer.write_edges(
                relation,
                topology,
                keep_ids=keep_ids,
                sort_neighbors=options.sort_neighbors,
                dedup=options.dedup,
                index_dtype=index_dtype,
                times=self.source.times_of(relation),
            )

    def _write_labels(self, ntype: str) -> None:
        """Write the labels of a node type, and draw a split if it has none."""
        source, options, values = self.source, self.options, self.source.labels[ntype]
        labels = normalised(values) if source.stored is None else values
        if values.dtype.is_floating_point and not labels.dtype.is_floating_point:
            self.say(f"labels of {ntype!r} are whole numbers with gaps: stored as int64, -1 for no label")
        self.writer.write_labels(ntype, labels)
        fractions = options.split
        if fractions is None and source.stored is None:
            fractions = DEFAULT_SPLIT
        if ntype in source.splits or not fractions:
            return
        drawn = source.splits[ntype] = random_split(labels, fractions, options.seed)
        sizes = ", ".join(f"{split} {ids.shape[0]}" for split, ids in drawn.items())
        self.say(
            f"{ntype!r} nodes have labels but no split: drew {sizes} labelled nodes at random with seed "
            f"{options.seed} (change it with --split and --seed)"
        )

    def _write_heat(self, stored: StoredGraph) -> None:
        if any(getattr(self.options, name) for name in _CHANGES_DEGREES):
            if stored.heat:
                self.say("left out the heat of the nodes, because the edges change: see `gids heat`")
            return
        for ntype, methods in stored.heat.items():
            for method, heat in methods.items():
                self.writer.copy_node_array(ntype, HEAT_ROLES[method], heat)

    def _write_table(self, plan: _TablePlan, orders: RowOrders) -> None:
        table, stored = plan.table, plan.table.stored
        self.on_stage(f"table {table.name}")
        if plan.dtype == torch.float64 and not _chosen(table, self.options.dtypes) and stored is None:
            self.say(
                f"{table.name} is float64, twice the bytes of float32, which most models use; convert it "
                "with --dtype float32"
            )
        rounded = self.writer.write_table(
            table.kind,
            table.type,
            table.key,
            table.rows,
            dtype=plan.dtype,
            scale=plan.scale,
            order=orders.choose(table, plan.order),
            page_bytes=plan.layout.page_bytes,
            columns=table.columns,
        )
        if rounded is None:
            return
        if stored is None or (stored.dtype, stored.scale) != (plan.dtype, plan.scale):
            self.say(f"{table.name}: {describe_rounding(*rounded)}")
        elif rounded[1].error:
            raise FormatError(
                f"values of table {table.name!r} would change, because gids scales its int8 in another way: "
                f"convert it with --dtype {table.key}=float32"
            )

    def _index_dtype(self, relation: Relation) -> str:
        chosen, stored = self.options.index_dtype, self.source.stored
        if chosen is None:
            return "int64" if stored is None else stored.index_dtypes.get(relation, "int64")
        num_src, edge_count = self.source.node_count(relation[0]), _count(self.source.graphs[relation])
        return chosen_index_dtype(chosen, num_src, edge_count)

    def work_bytes(self) -> int:
        """The bytes of progress: of edges, of pages, and of rows that are read for scales of columns."""
        total = sum(8 * _count(topology) for topology in self.source.graphs.values())
        for plan in self.plans:
            layout = plan.layout
            total += layout.page_count * layout.page_bytes
            total += layout.row_count * layout.row_bytes * (plan.scale == "column")
        return total

    def needed(self) -> Iterator[tuple[Path, int]]:
        """(directory, bytes) that the conversion needs."""
        source, writer = self.source, self.writer
        main = writer.path.parent
        for plan in self.plans:
            layout = replace(plan.layout, shard_count=len(writer.folders))
            for shard, folder in enumerate(writer.folders):
                is_main = folder.is_relative_to(writer.scratch.parent)
                yield main if is_main else folder.parent, layout.shard_bytes(shard)
            yield main, 4 * layout.page_count  # checksums
            if plan.order is not None:
                yield main, 8 * layout.row_count
                yield main, bytes_needed(plan.table.rows)  # while they are written
        for relation, topology in source.graphs.items():
            time_bytes = _TIME_BYTES * (relation in source.edge_times)
            edge_bytes = 2 * table_dtype(self._index_dtype(relation)).itemsize + time_bytes
            if not isinstance(topology, InEdges):
                # Sorting may keep two copies of the edges in scratch files.
                edge_bytes += 2 * EDGE_BYTES + time_bytes
            yield main, edge_bytes * _count(topology)
        nodes, starts = source.nodes, {src for src, _, _ in source.graphs}
        yield main, 8 * sum(nodes.get(dst, 0) for _, _, dst in source.graphs)  # indptr
        yield main, 4 * sum(nodes.get(ntype, 0) for ntype in starts)  # out-degrees
        yield main, 8 * sum(math.prod(labels.shape) for labels in source.labels.values())
        yield main, 8 * sum(ids.shape[0] for splits in source.splits.values() for ids in splits.values())
        yield main, 8 * sum(nodes.get(ntype, 0) for ntype in source.labels.keys() - source.splits.keys())
        yield main, 8 * sum(nodes[ntype] for ntype in source.node_times)
        heat = {} if source.stored is None else source.stored.heat
        for arrays in [*source.ids.values(), *heat.values()]:
            yield main, sum(rows.shape[0] * rows.dtype.itemsize for rows in arrays.values())


def _chosen(table: TableSource, options: Mapping[str, str]) -> str | None:
    """The value of an option for a table: by its name, by its key, or for all."""
    return next((options[name] for name in (table.name, table.key, "") if name in options), None)


def _count(topology: InEdges | EdgeSource) -> int:
    return topology.indices.shape[0] if isinstance(topology, InEdges) else topology.count


def _check_unchanged(files: Sequence[Path], fingerprint: Mapping[str, list[int]]) -> None:
    """Raise FormatError if a file of the source changed."""
    is_same = False
    with contextlib.suppress(FileNotFoundError):
        is_same = _fingerprint(files) == fingerprint
    if not is_same:
        raise FormatError("the source changed during the conversion; convert it again")


def _fingerprint(files: Sequence[Path]) -> dict[str, list[int]]:
    """By path, as a link may lead to another file by now. A file's ctime changes with any of its bytes."""
    status = {os.path.abspath(f): os.stat(f) for f in files if f.exists()}
    return {path: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for path, s in status.items()}
