"""layerwise: a model's output for all nodes, layer by layer. Each layer reads from disk and writes to disk.

The user's entry. It checks the arguments and makes the outputs; Run computes the layers. Run chooses the size
of blocks so that cache, rows and blocks stay within the budget for every graph.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gids import _core, cuda
from gids.cache.budget import GROWTH, bounce_pool_bytes
from gids.cache.device.state import SMALL_BYTES, order_bytes
from gids.cache.output_dtype import check_out_dtype, out_dtype_of
from gids.cuda import on_host
from gids.errors import FormatError, MemoryBudgetError, MissingError
from gids.inference.layers import (
    EdgeFeatures,
    Inputs,
    Layers,
    Model,
    Neighborhoods,
    Nodes,
    Span,
    TableSink,
    Targets,
    TensorSink,
    block_on,
    output_of,
    per_type,
)
from gids.io import queue_depth
from gids.io.device.device_queue import queue_device_bytes
from gids.loader import FeatureLoader
from gids.loader.options import explain_names
from gids.loader.row_source import Tables, check_table_fits, chosen_tables, default_tables
from gids.loader.source import Dataset, Source, as_source
from gids.sampler import Minibatch, Topology
from gids.sampler.minibatch import PerType
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table, graphs_of
from gids.store.names import check_name, describe_type, table_path
from gids.write import DatasetWriter

BLOCK_BYTES = 64 << 20
"""Target bytes of a block's input rows. Larger blocks are not faster, and layers need more memory."""
_ROW_OVERHEAD = 72
"""Bytes per row of a sampled block in the window: its id, its position, its edge."""

Progress = Callable[[int, int, int], None]
"""(layer, nodes done, nodes of this layer)."""
AnySink = TypeVar("AnySink", TableSink, TensorSink)
Item = tuple[Span, Minibatch]


@dataclass
class LayerwiseResult:
    """The result of layerwise.

    values: the last layer's output, [n, …] on the CPU, in the order of the given nodes, or a dictionary by
    node type; None if it was written. store: the dataset that was written, else the one that was read.
    tables: of the dataset that was written, by node type. layers: for each layer the number of nodes and
    blocks, seconds, and the FeatureLoader's stats.
    """

    values: PerType | None
    store: FeatureStore
    tables: dict[str, Table] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)


@explain_names("layerwise")
def layerwise(
    model: Model,
    source: Source | Dataset | Sequence[Dataset],
    *,
    layer_count: int | None = None,
    tables: Tables | None = None,
    edge_tables: Tables = (),
    nodes: torch.Tensor | Mapping[str, torch.Tensor | None] | None = None,
    output: str | os.PathLike[str] | None = None,
    key: str = "output",
    dtype: torch.dtype = torch.float32,
    feature_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LayerwiseResult:
    """Compute a model's output over full neighborhoods, layer by layer, each node once per layer.

    Args:
        model: a list of layers, each called as layer(block, h_src) -> h_dst; or a function of (i, block,
            h_src), with layer_count. block: a gids.sampler.Block of all in-edges of some nodes. h_src: the
            rows of its sources; the first block.num_dst belong to its destinations. h_dst: [num_dst, …]. In a
            dataset with several types, or with nodes by type, block is a dictionary by relation, h_src and
            h_dst by node type. Only one type has destinations at a time; if no relation leads to it, all its
            rows of h_src are of them. Later layers get no rows of a type that is not in h_dst.
        source: from gids.open(...), or the path of a dataset or a FeatureStore, with default options. Its
            memory (device_memory on CUDA) holds the cache, input rows and sampled blocks, but not the model
            and the returned output.
        tables: features of nodes, one table per type, as in gids.NodeLoader. None: the only table of each
            type. For a type without a table, layers get node ids, int64[n].
        edge_tables: features of edges, one table per relation. Then every layer is called as layer(block,
            h_src, edge_rows), or (i, block, h_src, edge_rows), with the rows of block.edge_ids,
            [block.num_edges, …], or a dictionary by relation for the relations with a table.
        nodes: the nodes to compute: int64[n], or a dictionary by node type (None: all nodes of the type).
            None: all nodes of all types.
        output: path of a new dataset with the last layer's output, to be opened beside the first one:
            gids.open([dataset, output]); requires all nodes. It has the ids of the nodes. None: return the
            output in memory.
        key: of its tables, TYPE.KEY for each type.
        dtype: dtype of floating-point rows in all written tables. The rows that a layer gets from the one
            before are rounded to this dtype, and have the dtype that the layer before returned.
        feature_dtype: dtype of node and edge features, as in FeatureLoader (None: the stored one).
        device: device of the rows that layers get, "cpu" or a CUDA device.
        progress: called after every block as progress(layer, nodes done, nodes of this layer).

    The rows between two layers are on disk, in OUTPUT.partial or, without output, in a new directory beside
    the dataset, NAME.layers-XXXXXXXX. It is removed at the end, also after an error; after a kill you may
    remove it. Layers run under torch.no_grad(). The caller sets the model's mode.

    Raises KeyError for an unknown table or type, FileExistsError for an output that exists, IndexError for a
    node out of range, FormatError for a dataset without topology or a value that does not fit dtype,
    MemoryBudgetError for a node whose neighborhood does not fit, StorageError for a failed read, TypeError
    and ValueError for other arguments and for a layer that returns no output. Errors of the model pass
    through.
    """
    check_out_dtype(feature_dtype)
    opened_source = as_source(source, ExitStack())  # stays open: the result reads its tables
    opened = opened_source.store
    opened_source.refuse_parts("gids.inference")
    layers = Layers(model, layer_count)
    graphs = graphs_of(opened)
    within_one = len(graphs) == 1 and graphs[0].relation[0] == graphs[0].relation[2]
    by_type = isinstance(nodes, Mapping) or (nodes is None and len(opened.node_types) > 1)
    homogeneous = within_one and not by_type
    topology = Topology(graphs[0] if homogeneous else graphs)
    asked = _Asked(topology, nodes)
    if output is not None:
        if not asked.all_nodes:
            raise ValueError("output= needs all nodes, but nodes= selects some: leave one of them out")
        check_name(key, "key=")
        for ntype in asked.nodes:
            table_path(ntype, key)  # which checks its length
    features = _tables_by_type(opened_source, topology, tables, "node", "tables=")
    edge_features = _tables_by_type(opened_source, topology, edge_tables, "edge", "edge_tables=")
    edges = EdgeFeatures(edge_features, feature_dtype, topology)
    near = Neighborhoods(topology, opened_source.options.threads)
    run = Run(opened_source, layers, near, torch.device(device), progress)
    targets = [Targets(topology, asked.nodes)]
    for _ in range(layers.count - 1):
        targets.insert(0, near.needed_by(targets[0]))
    dtypes = {ntype: out_dtype_of(table, feature_dtype) for ntype, table in features.items()}
    inputs = Inputs(features, dtypes, edges)
    with ExitStack() as stack:
        if output is not None:
            last = DatasetWriter(output)
            stack.callback(last.close, discard=True)
            scratch = last.scratch
        elif layers.count > 1:
            made = tempfile.TemporaryDirectory(prefix=f"{opened.name}.layers-", dir=opened.path.parent)
            scratch = Path(stack.enter_context(made))
        store = opened
        for index, wanted in enumerate(targets):
            is_last, before = index == layers.count - 1, store
            if is_last and output is None:
                tensors = {t: TensorSink(wanted.count_of(t)) for t in wanted.nodes}
                values = {t: sink.values for t, sink in run.layer(index, inputs, wanted, tensors).items()}
                return LayerwiseResult(asked.in_order(values), opened, layers=run.stats)
            writer = last if is_last else DatasetWriter(scratch / f"layer-{index}")
            stack.callback(writer.close, discard=True)
            begin = {t: partial(writer.open_table, "node", t, key) for t in wanted.nodes}
            sinks = {t: TableSink(begin[t], wanted.count_of(t), dtype) for t in wanted.nodes}
            sinks = run.layer(index, inputs, wanted, sinks)
            if is_last:
                writer.copy_ids(opened)
            writer.commit()
            if before is not opened and not is_last:  # then all of scratch is removed
                shutil.rmtree(before.path)
            store = FeatureStore(writer.path)
            written = {t: store.table(sink.name) for t, sink in sinks.items()}
            by_target = {t: table.by_row() for t, table in written.items()}
            inputs = Inputs(by_target, {t: sink.layer_dtype for t, sink in sinks.items()}, edges, wanted)
    return LayerwiseResult(None, store, written, run.stats)


def _tables_by_type(
    source: Source, topology: Topology, tables: Tables | None, kind: str, argument: str
) -> dict[Any, Table]:
    """The tables of nodes or edges, at most one of each type. tables: None: those of nodes."""
    if tables is None:
        tables = default_tables([source.store], topology.node_types)
    by_type: dict[Any, Table] = {}
    for table in chosen_tables(source, tables).values():
        if table.kind != kind:
            cure = "tables=" if table.kind == "node" else "edge_tables="
            raise ValueError(f"{table.name} is a table of {table.kind}s: pass it as {cure}")
        check_table_fits(table, topology, source.store.name)
        other = by_type.setdefault(table.type, table)
        if other is not table:
            raise ValueError(
                f"{other.name} and {table.name} are tables of the same {describe_type(table.type)} "
                f"{table.kind}s: choose one with {argument}"
            )
    return by_type


class _Asked:
    """The nodes to compute, and their order."""

    def __init__(
        self, topology: Topology, nodes: torch.Tensor | Mapping[str, torch.Tensor | None] | None
    ) -> None:
        self._homogeneous = topology.homogeneous
        if nodes is not None and not self._homogeneous and not isinstance(nodes, Mapping):
            cure = "a dictionary, node type -> int64[n] or None"
            raise TypeError(f"nodes must be {cure} (got {type(nodes).__name__})")
        by_type = nodes if isinstance(nodes, Mapping) else dict.fromkeys(topology.node_types, nodes)
        self.nodes: dict[str, Nodes] = {}
        self._inverse: dict[str, torch.Tensor] = {}
        counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        for ntype, ids in by_type.items():
            if ntype not in counts:
                raise MissingError(
                    f"nodes of type {ntype!r}: no relation has it (there are {', '.join(counts)})"
                )
            if ids is None:
                self.nodes[ntype] = None
                continue
            if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
                raise TypeError(f"nodes of type {ntype!r} must be a tensor, int64[n]")
            if len(ids) and not (ids.min() >= 0 and ids.max() < counts[ntype]):
                raise IndexError(
                    f"nodes of {ntype!r} run from {ids.min()} to {ids.max()}; ids run from 0 to "
                    f"{counts[ntype] - 1}"
                )
            self.nodes[ntype], self._inverse[ntype] = torch.unique(on_host(ids), return_inverse=True)
        if all(ids is not None and not len(ids) for ids in self.nodes.values()):
            raise ValueError("nodes is empty: leave it out for all nodes of all types")

    @property
    def all_nodes(self) -> bool:
        return all(ids is None for ids in self.nodes.values())

    def in_order(self, values: Mapping[str, torch.Tensor]) -> PerType:
        """The output in the order of the given nodes, which may repeat."""
        ordered = {t: v[self._inverse[t]] if t in self._inverse else v for t, v in values.items()}
        return per_type(ordered, self._homogeneous)


class Run:
    """One call of layerwise. stats: one entry per layer so far."""

    def __init__(
        self,
        source: Source,
        layers: Layers,
        near: Neighborhoods,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._layers, self._near = layers, near
        opened = cuda.open_device(device) if device.type == "cuda" else None
        self._torch_device = opened.torch_device if opened is not None else device
        self._device, self._progress = device, progress
        options = source.options
        planned = options.planned or min(2, max(1, _core.USE_BITS - options.window))
        self._source = source.with_options(planned=planned)
        self._window, self._planned = options.window, planned
        self._memory_bytes = (
            source.memory if opened is None else source.lender.device_bytes(opened, options.cache)
        )
        self.stats: list[dict[str, Any]] = []

    def layer(
        self, index: int, inputs: Inputs, targets: Targets, sinks: Mapping[str, AnySink]
    ) -> dict[str, AnySink]:
        """Compute a layer for its targets. Returns the sinks of the types with an output."""
        begun = time.perf_counter()
        per_row, most, limit = self._block_rows(inputs)
        spans = targets.spans(most, limit, edge_rows=bool(inputs.edges.tables))
        left_out: set[str] = set()  # types without an output
        wanted = (span for span in spans if span.ntype not in left_out)
        source = ((span, self._near.minibatch(targets, span)) for span in wanted)
        shapes: dict[str, torch.Size] = {}
        done, homogeneous = 0, self._near.topology.homogeneous
        with ExitStack() as stack:
            stream: Iterable[tuple[Item, dict[str, torch.Tensor]]] = ((item, {}) for item in source)
            loader = None
            if inputs.tables and spans:
                loader = stack.enter_context(self._loader(inputs, per_row * max(s.cost for s in spans)))
                stream = loader.attach(
                    source,
                    lambda item: inputs.rows_of(self._nodes(item), item[1]),
                    bytes_of=lambda item: item[1].nbytes,
                )
            for item, rows in stream:
                span, minibatch = item
                if span.ntype not in left_out:
                    h_src = inputs.for_layer(self._nodes(item), rows, self._torch_device)
                    block, edge_rows = block_on(minibatch, self._torch_device), inputs.edges.for_layer(rows)
                    try:
                        returned = self._layers(index, block, per_type(h_src, homogeneous), *edge_rows)
                    except KeyError as error:
                        lacking = set(self._near.topology.node_types) - h_src.keys()
                        if error.args and error.args[0] in lacking:
                            error.add_note(
                                f"layer {index} has no rows of type {error.args[0]!r}, because the layer "
                                "before returned none: return them there, or skip relations from that type"
                            )
                        raise
                    count = span.stop - span.start
                    h_dst = output_of(returned, index, span.ntype, count, by_type=not homogeneous)
                    if h_dst is None and span.ntype not in shapes:
                        left_out.add(span.ntype)
                    else:
                        _write(index, sinks[span.ntype], span, h_dst, shapes)
                done += span.stop - span.start
                if self._progress is not None:
                    self._progress(index, done, targets.count)
            stats = loader.stats() if loader is not None else {}
        seconds = time.perf_counter() - begun
        self.stats.append({"nodes": targets.count, "blocks": len(spans), "seconds": seconds, "loader": stats})
        if left_out and not any(targets.count_of(ntype) for ntype in sinks.keys() - left_out):
            types = [repr(ntype) for ntype in sinks if targets.count_of(ntype)] or list(map(repr, sinks))
            raise ValueError(f"layer {index} returned no rows for {', '.join(types)} nodes")
        return {ntype: sink for ntype, sink in sinks.items() if ntype not in left_out}

    def _nodes(self, item: Item) -> list[tuple[str, torch.Tensor]]:
        return self._near.input_nodes(item[1])

    def _block_rows(self, inputs: Inputs) -> tuple[int, int, int]:
        """(bytes per row of a block, target rows of a block, most rows of a block)."""
        window, planned = self._window, self._planned
        # As in FeatureLoader: outputs of the planned blocks, one that the layer holds, and on a device
        # one that it still uses.
        outputs = planned + (2 if self._device.type == "cuda" else 1)
        per_row = int(GROWTH * (outputs * inputs.row_bytes + (window + planned) * _ROW_OVERHEAD))
        limit = max(0, self._memory_bytes - self._fixed_bytes(inputs)) // per_row
        if limit < 4:
            needed = format_bytes(self._fixed_bytes(inputs) + 4 * per_row)
            option = "device_memory" if self._device.type == "cuda" else "memory"
            raise MemoryBudgetError(
                f"{option}={self._memory_bytes} is too small for blocks of four rows, which need {needed}: "
                "give gids.open() more memory"
            )
        return per_row, max(2, min(limit // 2, BLOCK_BYTES // inputs.row_bytes)), limit  # half for the cache

    def _fixed_bytes(self, inputs: Inputs) -> int:
        """Bytes of the page tables and the bounce pool; on a device of row orders, counters and buffers."""
        tables, options = list(inputs.tables.values()), self._source.options
        pages_bytes = sum(8 * t.page_count for t in tables)
        if self._device.type == "cuda":
            queue = queue_device_bytes(options.staging, [t.page_bytes for t in tables]) if tables else 0
            return pages_bytes + order_bytes(tables) + SMALL_BYTES + queue
        shards = [shard for t in tables for shard in t.shard_paths]
        depth = options.queue_depth or queue_depth(shards, options.engine)
        bounce = bounce_pool_bytes(tables, depth, self._memory_bytes) if tables else 0
        return int(bounce + pages_bytes)

    def _loader(self, inputs: Inputs, blocks_bytes: int) -> FeatureLoader:
        """blocks_bytes: of the largest block. The cache gets the memory that blocks do not need."""
        left = self._memory_bytes - blocks_bytes - self._fixed_bytes(inputs)
        asked = self._source.options.cache
        lines = max(0, left if asked is None else min(left, asked))
        return FeatureLoader(self._source.with_options(cache=lines), inputs.tables, device=self._device)


def _write(
    index: int,
    sink: TableSink | TensorSink,
    span: Span,
    rows: torch.Tensor | None,
    shapes: dict[str, torch.Size],
) -> None:
    if rows is None:
        raise ValueError(
            f"layer {index} returned rows of {span.ntype!r} nodes for earlier blocks, but none for this one"
        )
    if shapes.setdefault(span.ntype, rows.shape[1:]) != rows.shape[1:]:
        raise ValueError(
            f"layer {index} returned rows of shape {list(rows.shape[1:])} for {span.ntype!r} nodes, but "
            f"{list(shapes[span.ntype])} for earlier blocks"
        )
    try:
        sink.write(span.start, rows)
    except FormatError as error:
        raise FormatError(f"layer {index}, rows of {span.ntype!r}: {error}") from None
