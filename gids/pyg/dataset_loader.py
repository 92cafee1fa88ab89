"""DatasetLoader: PyG's minibatches from a dataset on disk, read ahead. The base of gids.pyg's two loaders.

It does for inputs of PyG what NodeLoader and EdgeLoader do for other seeds.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler.base import SubgraphType

from gids.cuda import on_host
from gids.loader.epoch_loader import EpochLoader, SampledEpoch, check_order
from gids.loader.options import WITHOUT_EFFECT, Size, check_names, without_ignored
from gids.loader.row_source import RowSource, Tables, default_tables
from gids.loader.sampling import Epoch, EpochSampling
from gids.loader.source import as_row_source
from gids.pyg.input_sampler import InputSampler, not_for_parts
from gids.pyg.inputs import AllEdges, Inputs, count_of, hash_inputs
from gids.pyg.outputs import MinibatchData, is_of_seeds, seed_attributes
from gids.pyg.stores import attribute_of
from gids.sampler import Minibatch, Topology
from gids.sampler.minibatch import PerType
from gids.store import FeatureStore

_WITHOUT_EFFECT = "is_sorted", "filter_per_worker", *WITHOUT_EFFECT
"""Arguments of PyG's loaders that are accepted: edges are sorted, and there are no worker processes."""

_FROM_PYG = "PyG's own loaders take it, with gids.pyg.MappedFeatures and gids.pyg.MappedGraph as data"
_REFUSED = {
    "neighbor_sampler": _FROM_PYG,
    "transform_sampler_output": _FROM_PYG,
    "sampler": f"give the seeds in your order and shuffle=False; {_FROM_PYG}",
    "batch_sampler": f"give the seeds in your order and shuffle=False; {_FROM_PYG}",
    "custom_cls": "make it of each minibatch in transform=",
    "directed": "give subgraph_type='induced' for directed=False",
    "generator": "give seed=",
    "collate_fn": "PyG's loaders ignore it; give transform=, which is called with each minibatch",
    "dataset": "PyG's loaders ignore it; give the seeds as input_nodes or edge_label_index",
}
"""Arguments of PyG's loaders that are refused, and what to do instead."""


def open_dataset(
    kind: type[DatasetLoader], data: Any, num_neighbors: Any, options: Mapping[str, Any]
) -> tuple[RowSource, ExitStack]:
    """The source of a loader, and what closes it if it is opened here.

    Raises TypeError for data in memory and for an option that does not exist, ValueError for one of PyG that
    is refused.
    """
    name = f"gids.pyg.{kind.__name__}"
    parameters = [p for owner in (kind, DatasetLoader) for p in inspect.signature(owner).parameters.values()]
    known = dict.fromkeys(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    check_names(name, options, [*known, *_WITHOUT_EFFECT, *_REFUSED])
    for option, cure in _REFUSED.items():
        if options.get(option) is not None and (option, options[option]) != ("directed", True):
            raise ValueError(f"{name} does not take {option}=: {cure}")
    if not isinstance(data, RowSource | str | os.PathLike | FeatureStore):
        raise TypeError(
            f"data is {type(data).__name__}, and {name} takes a dataset on disk: gids.open(...), a path or a "
            "gids.FeatureStore. Use PyG's own loader for Data, HeteroData and pairs of stores, or write the "
            "data to disk by `gids convert`"
        )
    seeds = list(inspect.signature(kind).parameters)[2]
    check_order(f"{name}(data, num_neighbors, {seeds})", num_neighbors)
    without_ignored(name, options, above=4)
    closing = ExitStack()
    return as_row_source(data, closing, what=name, memory=options.get("memory")), closing


class DatasetLoader(EpochLoader):
    """The base of NeighborLoader and LinkNeighborLoader, which document the arguments.

    closing: closes what was opened for this loader. inputs: the seeds. without_effect: arguments of PyG's
    loaders that do nothing here.
    """

    def __init__(
        self,
        source: RowSource,
        closing: ExitStack,
        inputs: Inputs,
        sampler: InputSampler,
        /,
        *,
        transform: Callable[[Any], Any] | None,
        batch_size: int = 1,
        shuffle: bool | None = False,
        drop_last: bool = False,
        tables: Tables | None = None,
        labels: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device = "cpu",
        topology_on: str = "auto",
        dtype: torch.dtype | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
        pin_memory: bool = False,
        memory: Size | None = None,
        **without_effect: object,
    ) -> None:
        store, graphs = source.store, sampler.graphs
        if store.part is not None and isinstance(inputs, AllEdges):
            raise not_for_parts("edge_label_index= without edges", "no rank has all edges")
        if sampler.subgraph_type is SubgraphType.induced and torch.device(device).type != "cpu":
            raise ValueError(
                f"subgraph_type='induced' is not supported with device={str(device)!r}: use device='cpu'"
            )
        if tables is None:
            types = {t for g in graphs for t in (g.relation[0], g.relation[2], g.relation)}
            of_seeds = seed_attributes(inputs, sampler.negatives)
            tables = [
                t
                for t in default_tables(source.stores, types)
                if not is_of_seeds(of_seeds, t.type, attribute_of(store, t))
            ]
        super().__init__(
            source,
            sampler,
            memory=None,  # open_dataset() has it
            batch_size=batch_size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self._opened.push(closing)
        self.transform, self._inputs = transform, inputs
        topology = Topology(graphs[0] if inputs.input_type is None else graphs)
        self._labels = {t: store.labels[t] for t in topology.node_types if labels and t in store.labels}
        self._open(topology, tables, device, topology_on, dtype, minibatch_rows, pin_memory=pin_memory)
        is_named = isinstance(tables, Mapping)
        self._data = MinibatchData(
            {
                name: (table.type, name if is_named else attribute_of(store, table))
                for name, table in self.tables.items()
            },
            inputs,
            negatives=sampler.negatives,
            labelled=store.labels if labels else (),
        )

    @property
    def data(self) -> RowSource:
        """The source, in place of PyG's data in memory."""
        return self.source

    def __iter__(self) -> LoaderEpoch:  # type: ignore[override]  # of Data
        return LoaderEpoch(super().__iter__(), self._data, self.transform, pinned=self.pin_memory)

    def _compared(self) -> dict[str, Any]:
        return super()._compared() | {"labels": list(self._labels)}

    @property
    def _seed_count(self) -> int:
        return count_of(self._inputs)

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        hash_inputs(self._inputs, update)

    def _sampling(self, epoch: Epoch) -> EpochSampling:
        return _InputSampling(epoch, self._inputs, self._labels)


class LoaderEpoch(Iterator[Any]):
    """One epoch of a loader."""

    def __init__(
        self,
        epoch: SampledEpoch,
        data: MinibatchData,
        transform: Callable[[Any], Any] | None,
        *,
        pinned: bool,
    ) -> None:
        self._epoch, self._data, self._transform, self._pinned = epoch, data, transform, pinned

    def __next__(self) -> Data | HeteroData | Any:
        return self._epoch.hand_out(self._make)

    def _make(self, minibatch: Minibatch) -> Data | HeteroData | Any:
        data = self._data.make(minibatch)
        if self._pinned:
            data.pin_memory()
        return data if self._transform is None else self._transform(data)

    def close(self) -> None:
        """End the epoch here. Idempotent."""
        self._epoch.close()


class _InputSampling(EpochSampling):
    def __init__(self, epoch: Epoch, inputs: Inputs, labels: Mapping[str, torch.Tensor]) -> None:
        super().__init__(epoch)
        self._inputs, self._labels = inputs, labels

    def draw(self, step: int) -> tuple[PerType, Callable[[Minibatch], Minibatch]]:
        seeds = self.epoch.seeds.at(step)
        seeded: Any = (self._inputs[torch.from_numpy(seeds.own)], seeds.part.start)
        return seeded, partial(_add_labels, labels=self._labels, to_device=self.epoch.stream.to_device)


def _add_labels(
    minibatch: Minibatch,
    labels: Mapping[str, torch.Tensor],
    to_device: Callable[[torch.Tensor], torch.Tensor],
) -> Minibatch:
    """Give a minibatch the labels of its nodes."""
    nodes = minibatch.input_nodes
    if isinstance(nodes, dict):
        minibatch.labels = {t: to_device(values[on_host(nodes[t])]) for t, values in labels.items()} or None
    elif labels:
        minibatch.labels = to_device(next(iter(labels.values()))[on_host(nodes)])
    return minibatch
