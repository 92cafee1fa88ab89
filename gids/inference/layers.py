"""Calls the user's layers, checks their output, and writes it to a table or a tensor. Called by layerwise."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gids.sampler import Block, Minibatch
from gids.store import FeatureStore, Table
from gids.store.names import Relation
from gids.write import create_table, temporary_table
from gids.write.table_writer import TableWriter

Layer = Callable[..., Any]
"""layer(block, h_src) -> h_dst, or layer(block, h_src, edge_rows) with edge tables.

In a dataset with several types, block and edge_rows are dictionaries by relation, h_src and h_dst by type.
"""
Model = Sequence[Layer] | torch.nn.ModuleList | Callable[..., Any]
Type = TypeVar("Type")

log = logging.getLogger("gids")


class Layers:
    """A model as numbered layers."""

    def __init__(self, model: Model, layer_count: int | None) -> None:
        self._all: list[Layer] = []
        if isinstance(model, Sequence | torch.nn.ModuleList):
            self._all = list(model)
            self.count = len(self._all)
            if layer_count not in (None, self.count):
                raise ValueError(
                    f"layer_count={layer_count}, but the model has {self.count} layers: leave it out"
                )
        elif callable(model):
            if layer_count is None:
                raise ValueError("the model is a function, layer(i, block, h_src): give layer_count as well")
            self.count = layer_count
        else:
            raise TypeError(f"model must be a list of layers or a function (got {type(model).__name__})")
        if self.count < 1 or not all(map(callable, self._all)):
            raise ValueError(
                f"model must have one or more layers, each a function of (block, h_src) (got {self.count})"
            )
        self._model: Any = model
        if any(getattr(part, "training", False) for part in (model, *self._all)):
            log.warning("the model is in training mode, where dropout is active: call model.eval() first")

    def __call__(self, index: int, *arguments: Any) -> Any:
        with torch.no_grad():
            return self._all[index](*arguments) if self._all else self._model(index, *arguments)


def output_of(returned: Any, index: int, ntype: str, count: int, *, by_type: bool) -> torch.Tensor | None:
    """A layer's output for `count` nodes of a type, or None if it has none for that type.

    Raises TypeError and ValueError for a wrong output.
    """
    if by_type and not isinstance(returned, dict):
        raise TypeError(
            f"layer {index} returned {type(returned).__name__}; with several types it must return a "
            "dictionary, node type -> tensor"
        )
    rows = returned.get(ntype) if by_type else returned
    if rows is None and by_type:
        return None
    if not isinstance(rows, torch.Tensor):
        raise TypeError(
            f"layer {index} returned {type(rows).__name__} for {ntype!r} nodes; it must return a tensor"
        )
    if not rows.dim() or len(rows) != count:
        raise ValueError(
            f"layer {index} returned {list(rows.shape)} for {count} {ntype!r} nodes; it must return one row "
            "per destination, block.num_dst rows (their inputs are h_src[:block.num_dst])"
        )
    return rows


def block_on(minibatch: Minibatch, device: torch.device) -> Block | dict[Relation, Block]:
    """The only layer of a minibatch, on a device."""
    layer = minibatch.blocks[0]
    if isinstance(layer, dict):
        return {relation: _moved(block, device) for relation, block in layer.items()}
    return _moved(layer, device)


def _moved(block: Block, device: torch.device) -> Block:
    arrays = {name: getattr(block, name).to(device) for name in ("indptr", "indices", "positions")}
    return dataclasses.replace(block, **arrays)


def per_type(values: dict[Type, torch.Tensor], homogeneous: bool) -> torch.Tensor | dict[Type, torch.Tensor]:
    """values, or its only tensor if homogeneous."""
    return next(iter(values.values())) if homogeneous else values


class TableSink:
    """A table of `count` nodes of a type. It is created when the first rows show their shape.

    dtype: of floating-point rows; other rows keep theirs. key: of the table (None: a temporary one). replace:
    a table of that name.
    """

    def __init__(
        self,
        store: FeatureStore,
        ntype: str,
        count: int,
        dtype: torch.dtype,
        *,
        key: str | None = None,
        replace: bool = False,
    ) -> None:
        self._store, self._ntype, self._count, self._dtype = store, ntype, count, dtype
        self._key, self._replace = key, replace
        self._writer: TableWriter | None = None
        self.layer_dtype = dtype
        """The dtype of the layer's rows."""

    @property
    def writer(self) -> TableWriter:
        assert self._writer is not None, "write() was never called"
        return self._writer

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._writer is None:
            self.layer_dtype = rows.dtype
            dtype = self._dtype if rows.dtype.is_floating_point else rows.dtype
            shape, key = tuple(rows.shape[1:]), self._key
            if key is None:
                self._writer = temporary_table(self._store, self._ntype, self._count, shape, dtype)
            else:
                self._writer = create_table(
                    self._store, key, self._count, shape, dtype, type_=self._ntype, replace=self._replace
                )
        self._writer.write(start, rows)

    def finish(self) -> Table:
        """The finished table."""
        return self.writer.finish()

    def discard(self) -> None:
        """Remove the table, unless it was published."""
        if self._writer is not None:
            self._writer.discard()


class TensorSink:
    """A tensor of `count` rows on the CPU, in the layer's dtype."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        assert self._values is not None, "write() was never called"
        return self._values

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._values is None:
            self._values = torch.empty((self._count, *rows.shape[1:]), dtype=rows.dtype)
        self._values[start : start + len(rows)] = rows
