"""Run: computes one layer after the other, reading rows through a FeatureLoader. Called by layerwise.

It chooses the size of blocks so that cache, rows and blocks stay within the budget for every graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from gids import _core, cuda
from gids.cache.budget import GROWTH, bounce_pool_bytes
from gids.cache.device.state import SMALL_BYTES, order_bytes
from gids.errors import FormatError, MemoryBudgetError
from gids.inference.inputs import Inputs
from gids.inference.layers import Layers, block_on, output_of, per_type
from gids.inference.sinks import TableSink, TensorSink
from gids.inference.targets import Neighborhoods, Span, Targets
from gids.io import queue_depth
from gids.loader import FeatureLoader
from gids.loader.memory import round_buffers_bytes
from gids.loader.source import Source
from gids.sampler import Minibatch
from gids.sizes import format_bytes

BLOCK_BYTES = 64 << 20
"""Target bytes of a block's input rows. Larger blocks are not faster, and layers need more memory."""
_ROW_OVERHEAD = 72
"""Bytes per row of a sampled block in the window: its id, its position, its edge."""

Progress = Callable[[int, int, int], None]
"""(layer, nodes done, nodes of this layer)."""
AnySink = TypeVar("AnySink", TableSink, TensorSink)
Item = tuple[Span, Minibatch]


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
                    returned = self._layers(index, block, per_type(h_src, homogeneous), *edge_rows)
                    count = span.stop - span.start
                    h_dst = output_of(returned, index, span.ntype, count, by_type=not homogeneous)
                    if h_dst is None and span.ntype not in shapes:
                        left_out.add(span.ntype)
                    else:
                        _write(index, sinks[span.ntype], span, h_dst, shapes)
                done += span.stop - span.start
                if self._progress is not None:
                    self._progress(index, done, targets.count)
            if loader is not None and loader.closed:
                raise ValueError(f"the source was closed before layer {index} was complete: open it again")
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
        tables = list(inputs.tables.values())
        pages_bytes = sum(8 * t.page_count for t in tables)
        if self._device.type == "cuda":
            return pages_bytes + order_bytes(tables) + SMALL_BYTES + round_buffers_bytes(self._source.options)
        shards = [shard for t in tables for shard in t.shard_paths]
        options = self._source.options
        depth = options.queue_depth or queue_depth(shards, options.engine)
        bounce = bounce_pool_bytes(tables, depth, memory_bytes=self._memory_bytes) if tables else 0
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
