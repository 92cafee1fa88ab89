"""DatasetLoader: PyG's minibatches from a dataset on disk, read ahead. Made by gids.pyg's two loaders.

It does for inputs of PyG what NodeLoader and EdgeLoader do for other seeds. Its InputSampler samples them by
any sampler of PyG.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, NegativeSampling, NodeSamplerInput

from gids.cache.output_dtype import out_dtype_of
from gids.cuda import on_host
from gids.loader import SampledEpoch
from gids.loader.epoch_loader import EpochLoader
from gids.loader.row_source import RowSource, Tables, default_tables
from gids.loader.sampling import Epoch, EpochSampling, EpochSeeds, StepSeeds
from gids.loader.source import as_row_source
from gids.pyg.hops import HopMinibatch
from gids.pyg.inputs import AllEdges, Inputs, StepNegatives, count_of, hash_inputs
from gids.pyg.neighbor_sampler import NeighborSampler, Sampling, counts_of, not_for_parts
from gids.pyg.outputs import MinibatchData, Output, is_of_seeds, minibatch_of, output_of, seed_attributes
from gids.pyg.stores import attribute_of, graphs_on_disk, store_of
from gids.sampler import Minibatch, Topology
from gids.sampler.layered import LayeredSampler, array_digest
from gids.sampler.minibatch import PerType


class Opened:
    """The dataset of a loader. data: as the user gives it, is_on_disk. name: of the loader.

    closing: closes what is opened here.
    """

    def __init__(self, name: str, data: Any) -> None:
        self.name, self.data, self.closing = name, data, ExitStack()
        dataset = data if isinstance(data, RowSource | str | os.PathLike) else store_of(data)
        self.source = as_row_source(dataset, self.closing, what=f"gids.pyg.{name}")
        self.graphs = graphs_on_disk(self.source)


class DatasetLoader(EpochLoader):
    """What NeighborLoader and LinkNeighborLoader return for a dataset. They document the arguments.

    inputs: the seeds. sampling: arguments of NeighborSampler, or none of them if neighbor_sampler is given.
    others: arguments of PyG's loaders that do nothing here.

    Attributes as in PyG: data, node_sampler, neg_sampling, transform, transform_sampler_output, custom_cls,
    filter_per_worker, input_data; batch_size: None if the sampler makes the minibatches.
    """

    def __init__(
        self,
        opened: Opened,
        inputs: Inputs,
        neg_sampling: NegativeSampling | None,
        *,
        sampling: Sampling,
        neighbor_sampler: BaseSampler | None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        filter_per_worker: bool | None = None,
        custom_cls: type | None = None,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        generator: torch.Generator | None = None,
        tables: Tables | None = None,
        labels: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device = "cpu",
        topology_on: str = "auto",
        dtype: torch.dtype | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
        **others: object,
    ) -> None:
        source, store = opened.source, opened.source.store
        batches = _batches_of(sampler, batch_sampler, batch_size, shuffle, drop_last, rank, world_size)
        if batches is not None:
            rank, world_size = 0, 1
            if source.together:
                raise ValueError(
                    "sampler= and batch_sampler= choose the seeds of one rank, and all ranks of "
                    "gids.distributed.open() share the seeds: give shuffle=, or open the whole dataset with "
                    "gids.open()"
                )
        if generator is not None:
            if seed is not None:
                raise ValueError("give seed= or generator=, not both")
            seed = int(torch.randint(torch.iinfo(torch.int64).max, (), generator=generator))
        if store.part is not None and isinstance(inputs, AllEdges):
            raise not_for_parts("edge_label_index= without edges", "no rank has all edges")
        own, graphs = neighbor_sampler is None, opened.graphs
        if neighbor_sampler is None:
            if inputs.input_type is None:
                counts_of(sampling.num_neighbors, None)
            data = source if isinstance(opened.data, str | os.PathLike) else opened.data  # opened once
            neighbor_sampler = NeighborSampler(data, **vars(sampling), threads=source.options.threads)
            graphs = neighbor_sampler.graphs
            if neighbor_sampler.subgraph_type.value == "induced" and torch.device(device).type != "cpu":
                raise ValueError(
                    f"subgraph_type='induced' is not supported with device={str(device)!r}: use device='cpu'"
                )
        elif store.part is not None:
            raise not_for_parts("neighbor_sampler=", "it would sample by itself")
        elif changed := sampling.changed():
            raise ValueError(f"{changed[0]}= is an argument of the sampler: give it to neighbor_sampler")
        if tables is None:
            types = {t for g in graphs for t in (g.relation[0], g.relation[2], g.relation)}
            of_seeds = seed_attributes(inputs, neg_sampling)
            tables = [
                t
                for t in default_tables(source.stores, types)
                if not is_of_seeds(of_seeds, t.type, attribute_of(store, t))
            ]
        inputs_sampler = InputSampler(neighbor_sampler, neg_sampling, transform_sampler_output, own=own)
        super().__init__(
            source,
            inputs_sampler,
            batch_size=1 if batch_size is None else batch_size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            seed=seed or 0,
            rank=rank,
            world_size=world_size,
        )
        self._opened.push(opened.closing)
        if batch_size is None or batch_sampler is not None:
            self.batch_size = None  # type: ignore[assignment]  # as in PyG
        self.data, self.node_sampler, self.neg_sampling = opened.data, neighbor_sampler, neg_sampling
        self.transform, self.transform_sampler_output = transform, transform_sampler_output
        self.custom_cls, self.filter_per_worker = custom_cls, bool(filter_per_worker)
        self.input_data, self._name, self._batches, self._dtype = inputs, opened.name, batches, dtype
        self._inputs_sampler, self._torch_device = inputs_sampler, torch.device(device)
        topology = Topology(graphs[0] if inputs.input_type is None else graphs)
        self._labels = {t: store.labels[t] for t in topology.node_types if labels and t in store.labels}
        self._open(topology, tables, device, topology_on, dtype, minibatch_rows)
        is_named = isinstance(tables, Mapping)
        self._data = MinibatchData(
            {
                name: (table.type, name if is_named else attribute_of(store, table))
                for name, table in self.tables.items()
            },
            inputs,
            negatives=neg_sampling,
            labelled=store.labels if labels else (),
            made=custom_cls,
        )

    @property
    def dataset(self) -> range:
        """The positions of the seeds."""
        return range(count_of(self.input_data))

    def __len__(self) -> int:
        """Number of minibatches in an epoch, on each rank."""
        return super().__len__() if self._batches is None else self._seed_count

    def __iter__(self) -> LoaderEpoch:  # type: ignore[override]  # of Data
        return LoaderEpoch(super().__iter__(), self._data, self.transform)

    def __call__(self, index: torch.Tensor | Sequence[int]) -> Any:
        """The minibatch of the seeds at these positions. Blocks, and reads without the cache.

        It takes its random numbers from torch's generator.
        """
        out = self.collate_fn(index)
        return out if self.filter_per_worker else self.filter_fn(out)

    def collate_fn(self, index: torch.Tensor | Sequence[int]) -> Any:
        """PyG's output of the sampler for the seeds at these positions; with filter_per_worker the minibatch.
        For loaders that sample with several others, such as PyG's ZipLoader.
        """
        inputs = self.input_data[torch.as_tensor(index, dtype=torch.int64)]
        out = sample_from(self.node_sampler, inputs, self.neg_sampling)
        return self.filter_fn(out) if self.filter_per_worker else out

    def filter_fn(self, out: Output) -> Any:
        """The minibatch of a sampler's output."""
        minibatch = self._inputs_sampler.minibatch(out, self._topology)
        for name, table in self.tables.items():
            if isinstance(table.type, str):
                ids = minibatch.by_type(minibatch.input_nodes)[table.type]
            else:
                ids = minibatch.edge_ids_of(table.type)
            rows = table.read_rows(on_host(ids))
            minibatch.features[name] = rows.to(out_dtype_of(table, self._dtype))
        _add_labels(minibatch, self._labels, lambda values: values)
        data = self._data.make(minibatch)
        data = data if self._torch_device.type == "cpu" else data.to(self._torch_device)
        return data if self.transform is None else self.transform(data)

    def __repr__(self) -> str:
        return f"{self._name}()"

    def _compared(self) -> dict[str, Any]:
        return super()._compared() | {"labels": list(self._labels)}

    @property
    def _seed_count(self) -> int:
        return count_of(self.input_data) if self._batches is None else len(self._batches)  # type: ignore[arg-type]

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        hash_inputs(self.input_data, update)

    def _sampling(self, epoch: Epoch) -> EpochSampling:
        return _InputSampling(epoch, self.input_data, self._labels)

    @property
    def _repeatable(self) -> bool:
        return self._batches is None and super()._repeatable

    def _seeds_of(self, epoch: int) -> EpochSeeds:
        if self._batches is None:
            return super()._seeds_of(epoch)
        batches = [_positions(item) for item in self._batches]
        if len(batches) != self._seed_count:
            raise ValueError(f"the sampler yields {len(batches)} items, and its length is {self._seed_count}")
        order = np.concatenate([np.empty(0, np.int64), *batches])
        count = count_of(self.input_data)
        if len(order) and not (order.min() >= 0 and order.max() < count):
            raise IndexError(
                f"the sampler yields positions from {order.min()} to {order.max()}; there are {count} seeds"
            )
        return _BatchSeeds(order, 1, self._ranks, batches)


class DatasetLoaderBySampler(DatasetLoader):
    """With sampler= or batch_sampler=, whose position is not known. Lightning saves the state of every loader
    that has these methods."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class LoaderEpoch(Iterator[Any]):
    """One epoch of a loader. After a StorageError it continues with the next minibatch."""

    def __init__(
        self, epoch: SampledEpoch, data: MinibatchData, transform: Callable[[Any], Any] | None
    ) -> None:
        self._epoch, self._data, self._transform = epoch, data, transform

    def __next__(self) -> Data | HeteroData | Any:
        return self._epoch.hand_out(self._make)

    def _make(self, minibatch: Minibatch) -> Data | HeteroData | Any:
        data = self._data.make(minibatch)
        return data if self._transform is None else self._transform(data)

    def close(self) -> None:
        """End the epoch here. Idempotent."""
        self._epoch.close()


@dataclass(frozen=True)
class _BatchSeeds(EpochSeeds):
    """Seeds of an epoch by batch_sampler. batches: the positions of each minibatch."""

    batches: Sequence[np.ndarray]

    def at(self, step: int) -> StepSeeds:
        positions = self.batches[step]
        return StepSeeds(positions, slice(0, len(positions)))


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


def _batches_of(
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool,
    rank: int | None,
    world_size: int | None,
) -> Iterable[Any] | None:
    """What yields the positions of each minibatch, if that is not the loader.

    Raises ValueError and TypeError for arguments that exclude each other, as torch's DataLoader does.
    """
    batches = sampler if batch_sampler is None else batch_sampler
    if batches is None:
        if batch_size is None:
            raise ValueError("batch_size=None needs sampler=, which yields the positions of each minibatch")
        return None
    name = "sampler" if batch_sampler is None else "batch_sampler"
    if not hasattr(batches, "__len__"):
        raise TypeError(f"{name}= needs a length: {type(batches).__name__} has none")
    others = {"shuffle": bool(shuffle), "rank": rank is not None, "world_size": world_size is not None}
    if batch_sampler is not None:
        others |= {"sampler": sampler is not None, "batch_size": batch_size != 1, "drop_last": drop_last}
    elif batch_size is None:
        others |= {"drop_last": drop_last}
    if wrong := [other for other, is_given in others.items() if is_given]:
        raise ValueError(f"give {name}= or {wrong[0]}=, not both")
    if batch_sampler is not None or batch_size is None:
        return batches
    return BatchSampler(batches, batch_size, drop_last)


def _positions(item: Any) -> np.ndarray:
    """What a sampler yields for a minibatch, a position or several: int64[n]."""
    try:
        positions = np.atleast_1d(np.asarray(item))
    except ValueError:  # lists of different lengths
        positions = np.empty((0, 0))
    if positions.ndim > 1:
        raise ValueError("the sampler yields lists: give it as batch_sampler=, or give batch_size=None")
    if len(positions) and positions.dtype.kind not in "iu":
        raise TypeError(f"the sampler yields {item!r}: it must yield whole numbers, the positions of seeds")
    return positions.astype(np.int64, copy=False)


class InputSampler:
    """A Sampler of gids.loader whose seeds are inputs of PyG.

    own: the sampler was made for the loader. It samples from the loader's topology, and its random numbers
    depend on (seed, epoch, step). Others have their own topology and random numbers. negatives: for edges.
    transform: is called with each SamplerOutput.

    Attributes: divisible: whether the edges of the topology may be divided among ranks.
    """

    def __init__(
        self,
        sampler: NeighborSampler | BaseSampler,
        negatives: NegativeSampling | None,
        transform: Callable[[Any], Any] | None,
        *,
        own: bool,
    ) -> None:
        self.sampler, self.negatives, self.transform = sampler, negatives, transform
        self._own = self.divisible = own

    def sample(
        self, topology: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> HopMinibatch:
        """seeds: inputs of PyG, and the position of the first one among those of all ranks."""
        inputs, first = seeds
        negatives = None
        if self.negatives is not None:
            negatives = StepNegatives(self.negatives, (seed, epoch, step), first)
        output: Output
        if self._own:
            drawn = self.sampler.draw(topology, inputs, negatives, seed=seed, epoch=epoch, step=step)
            if self.transform is None and self.sampler.subgraph_type.value == "directional":
                return drawn
            output = self.sampler.finished(output_of(drawn))
        else:
            output = sample_from(self.sampler, inputs, negatives)
        return self.minibatch(output, topology, epoch=epoch, step=step)

    def minibatch(self, output: Output, topology: Topology, *, epoch: int = 0, step: int = 0) -> HopMinibatch:
        """The transformed output as a minibatch, without features."""
        if self.transform is not None:
            output = self.transform(output)
        device = torch.device("cpu") if topology.device is None else topology.device.torch_device
        permutation = self.sampler.edge_permutation
        return minibatch_of(output, topology, permutation, device, epoch=epoch, step=step)

    @property
    def layered(self) -> LayeredSampler | None:
        """The sampler of gids that it samples by."""
        return self.sampler.hops if self._own else None

    @property
    def nbytes(self) -> int:
        return self.sampler.hops.nbytes if self._own else 0

    @property
    def repeatable(self) -> bool:
        """See gids.sampler.Sampler. The weights of edges and negatives may change."""
        negatives = self.negatives
        weighted = negatives is not None and (
            negatives.src_weight is not None or negatives.dst_weight is not None
        )
        return self._own and self.transform is None and not weighted and self.sampler.hops.weights is None

    @property
    def without_repr(self) -> list[str]:
        """What minibatches depend on, and of which only the name is known."""
        parts = [self.transform, None if self._own else self.sampler]
        return [_name_of(p) for p in parts if p is not None and type(p).__repr__ in _NO_REPR]

    def __repr__(self) -> str:
        """Everything that minibatches depend on, as far as it is known."""
        negatives = "" if self.negatives is None else f", {_described(self.negatives)}"
        if self.transform is not None:
            negatives += f", transform={_name_of(self.transform)}"
        if not self._own:
            return f"{_name_of(self.sampler)}{negatives}"
        kind, tables = self.sampler.subgraph_type.value, self.sampler.tables_read
        read = f", tables={tables}" if tables else ""
        return f"{self.sampler.hops!r}{read}{negatives}{'' if kind == 'directional' else f', {kind}'}"


def sample_from(sampler: BaseSampler, inputs: Inputs, negatives: NegativeSampling | None) -> Output:
    """What a sampler of PyG samples by itself for these inputs."""
    if isinstance(inputs, NodeSamplerInput):
        return sampler.sample_from_nodes(inputs)
    return sampler.sample_from_edges(inputs, neg_sampling=negatives)


_NO_REPR: tuple[Any, ...] = (object.__repr__, FunctionType.__repr__, MethodType.__repr__)


def _name_of(part: Any) -> str:
    """The repr of a sampler or a transform, or else the name of its class, or its own."""
    if type(part).__repr__ not in _NO_REPR:
        return repr(part)
    return str(getattr(part, "__qualname__", type(part).__qualname__))


def _described(negatives: NegativeSampling) -> str:
    ends = {"src": negatives.src_weight, "dst": negatives.dst_weight}
    weights = {end: array_digest(on_host(w).numpy()) for end, w in ends.items() if w is not None}
    return f"negatives={negatives.mode.value} {negatives.amount} {weights}"
