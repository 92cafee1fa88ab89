"""DatasetLoader: the base of gids.pyg's loaders. PyG's minibatches from a dataset on disk, read ahead.

For data in memory its subclasses make PyG's own loaders, with gids' sampler.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, NegativeSampling, NodeSamplerInput

from gids.closing import Closing
from gids.cuda import on_host
from gids.loader import SampledEpoch
from gids.loader.option_names import check_names
from gids.loader.row_source import RowSource
from gids.loader.source import as_row_source
from gids.loader.tables import Tables
from gids.pyg.arguments import NO_EFFECT, not_for_parts, refuse_arguments
from gids.pyg.attributes import attribute_of
from gids.pyg.input_loader import InputLoader, InputSampler, add_labels
from gids.pyg.inputs import Inputs, are_all_edges, count_of
from gids.pyg.memory_graphs import is_typed
from gids.pyg.minibatch_data import MinibatchData
from gids.pyg.neighbor_sampler import NeighborSampler
from gids.pyg.num_neighbors import counts_of
from gids.pyg.outputs import Output
from gids.pyg.stores import graphs_on_disk, is_on_disk, store_of
from gids.sampler import Topology
from gids.store import FeatureStore, Graph

SAMPLING = (
    "num_neighbors",
    "subgraph_type",
    "replace",
    "disjoint",
    "temporal_strategy",
    "time_attr",
    "weight_attr",
    "is_sorted",
    "directed",
)
"""Arguments of NeighborSampler."""

_OF_DATASETS = (
    "tables",
    "labels",
    "seed",
    "rank",
    "world_size",
    "device",
    "topology_on",
    "dtype",
    "minibatch_rows",
)
"""Arguments that loaders of data in memory do not have."""


class DatasetLoader(Closing):
    """What NeighborLoader and LinkNeighborLoader have in common. They document the arguments."""

    in_memory: ClassVar[type]
    """PyG's loader for data in memory."""

    def __init_subclass__(cls) -> None:
        own, common = (inspect.signature(of.__init__).parameters for of in (cls, DatasetLoader))
        more = [p for p in common.values() if p.name not in own and p.kind is p.KEYWORD_ONLY]
        given = [*list(own.values())[1:-1], *more, common["pyg_arguments"]]
        cls.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data")
        return super().__new__(cls) if is_on_disk(data) else _in_memory(cls, args, kwargs)

    def __init__(
        self,
        data: Any,
        inputs_of: Callable[[FeatureStore, Sequence[Graph], torch.Tensor | None], Inputs],
        sampling: Mapping[str, Any],
        neighbor_sampler: BaseSampler | None,
        neg_sampling: NegativeSampling | None,
        *,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        filter_per_worker: bool | None = None,
        custom_cls: type | None = None,
        input_id: torch.Tensor | None = None,
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
        **pyg_arguments: Any,
    ) -> None:
        check_names(f"gids.pyg.{type(self).__name__}", pyg_arguments, _argument_names(type(self)))
        refuse_arguments(pyg_arguments)
        order, batch_size = _order_of(
            sampler, batch_sampler, batch_size, shuffle, drop_last, rank, world_size
        )
        if order is not None:
            rank, world_size = 0, 1
        self._opened = ExitStack()
        source = as_row_source(
            data if isinstance(data, RowSource | str | os.PathLike) else store_of(data),
            self._opened,
            what=f"gids.pyg.{type(self).__name__}",
        )
        if order is not None and source.together:
            name = "sampler" if batch_sampler is None else "batch_sampler"
            raise ValueError(
                f"{name}= chooses the seeds of one rank, and all ranks of gids.distributed.open() share the "
                "seeds: give shuffle=, or open the whole dataset with gids.open()"
            )
        store = source.store
        made = neighbor_sampler is None
        if neighbor_sampler is not None:
            if store.part is not None:
                raise not_for_parts("neighbor_sampler=", "it would sample by itself")
            if changed := [name for name in sampling if _is_changed(type(self), name, sampling[name])]:
                raise ValueError(f"{changed[0]}= is an argument of the sampler: give it to neighbor_sampler")
            graphs = graphs_on_disk(source)
            inputs = inputs_of(store, graphs, input_id)
        else:
            inputs = inputs_of(store, graphs_on_disk(source), input_id)
            if inputs.input_type is None:
                counts_of(sampling["num_neighbors"], None)
            given = source if isinstance(data, str | os.PathLike) else data  # opened once
            neighbor_sampler = NeighborSampler(given, **sampling, threads=source.options.threads)
            graphs = neighbor_sampler.graphs
            if torch.device(device).type != "cpu":
                neighbor_sampler.check_device(device)
        if store.part is not None and are_all_edges(inputs):
            raise not_for_parts("edge_label_index= without edges", "no rank has all edges")
        if tables is None:
            types = {t for g in graphs for t in (g.relation[0], g.relation[2])} | {g.relation for g in graphs}
            tables = [t for one in source.stores for t in one.tables.values() if t.type in types]
        if generator is not None:
            if seed is not None:
                raise ValueError("give seed= or generator=, not both")
            seed = int(torch.randint(torch.iinfo(torch.int64).max, (), generator=generator))
        self._sampler = InputSampler(neighbor_sampler, neg_sampling, transform_sampler_output, own=made)
        self._loader = InputLoader(
            source,
            Topology(graphs[0] if inputs.input_type is None else graphs),
            inputs,
            self._sampler,
            order=order,
            tables=tables,
            labels=labels,
            batch_size=batch_size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            seed=seed or 0,
            rank=rank,
            world_size=world_size,
            device=device,
            topology_on=topology_on,
            dtype=dtype,
            minibatch_rows=minibatch_rows,
        )
        self.data, self.node_sampler = data, neighbor_sampler
        self.neg_sampling = neg_sampling
        self.transform, self.transform_sampler_output = transform, transform_sampler_output
        self.custom_cls = custom_cls
        self.filter_per_worker = bool(filter_per_worker)
        self.input_data = inputs
        self._batch_size, self._dtype, self._torch_device = batch_size, dtype, torch.device(device)
        named = isinstance(tables, Mapping)
        self._data = MinibatchData(
            {
                name: (table.type, name if named else attribute_of(store, table))
                for name, table in self._loader.tables.items()
            },
            of_edges=not isinstance(inputs, NodeSamplerInput),
            input_type=inputs.input_type,
            negatives=neg_sampling,
            labelled=store.labels if labels else (),
            made=custom_cls,
        )

    @property
    def store(self) -> FeatureStore:
        return self._loader.store

    @property
    def dataset(self) -> range:
        """The positions of the seeds."""
        return range(count_of(self.input_data))

    @property
    def batch_size(self) -> int | None:
        """None if the sampler makes the minibatches."""
        return self._batch_size

    @property
    def epoch(self) -> int:
        """The number of the next epoch; may be set."""
        return self._loader.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._loader.epoch = number

    def __len__(self) -> int:
        """Number of minibatches in an epoch, on each rank."""
        return len(self._loader)

    def __iter__(self) -> LoaderEpoch:
        return LoaderEpoch(iter(self._loader), self._data, self.transform)

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
        inputs, sampler = self.input_data[torch.as_tensor(index, dtype=torch.int64)], self.node_sampler
        out = (
            sampler.sample_from_nodes(inputs)
            if isinstance(inputs, NodeSamplerInput)
            else sampler.sample_from_edges(inputs, neg_sampling=self.neg_sampling)
        )
        return self.filter_fn(out) if self.filter_per_worker else out

    def filter_fn(self, out: Output) -> Any:
        """The minibatch of a sampler's output."""
        minibatch = self._sampler.minibatch(out, self._loader.topology)
        for name, table in self._loader.tables.items():
            nodes = minibatch.input_nodes
            if isinstance(table.type, str):
                ids = nodes[table.type] if isinstance(nodes, dict) else nodes
            else:
                ids = minibatch.edge_ids_of(table.type)
            rows = table.read_rows(on_host(ids))
            minibatch.features[name] = rows if self._dtype is None else rows.to(self._dtype)
        add_labels(minibatch, self._loader.labels, lambda values: values)
        data = self._data.of(minibatch)
        data = data if self._torch_device.type == "cpu" else data.to(self._torch_device)
        return data if self.transform is None else self.transform(data)

    def stats(self) -> dict[str, Any]:
        """As in gids.NodeLoader."""
        return self._loader.stats()

    def state_dict(self) -> dict[str, Any]:
        """As in gids.NodeLoader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As in gids.NodeLoader."""
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End the open epochs, release cache and topology. Idempotent."""
        self._loader.close()
        self._opened.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LoaderEpoch(Iterator[Any]):
    """One epoch of a loader. After a StorageError it continues with the next minibatch."""

    def __init__(
        self, epoch: SampledEpoch, data: MinibatchData, transform: Callable[[Any], Any] | None
    ) -> None:
        self._epoch, self._data, self._transform = epoch, data, transform

    def __next__(self) -> Data | HeteroData | Any:
        data = self._data.of(next(self._epoch))
        return data if self._transform is None else self._transform(data)

    def close(self) -> None:
        """End the epoch here. Idempotent."""
        self._epoch.close()


def _in_memory(cls: type[DatasetLoader], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyG's own loader of data in memory, which samples by gids."""
    given = inspect.signature(cls).bind(*args, **kwargs).arguments
    given.update(given.pop("pyg_arguments", {}))
    check_names(f"gids.pyg.{cls.__name__}", given, _argument_names(cls))
    is_typed(given["data"])
    for name in _OF_DATASETS:
        if name in given:
            raise ValueError(
                f"{name}= needs a dataset on disk, and data is {type(given['data']).__name__}: leave it out, "
                "or write the data by `gids convert`"
            )
    if given.get("neighbor_sampler") is None:
        sampling = {name: given[name] for name in SAMPLING if name in given}
        given["neighbor_sampler"] = NeighborSampler(given["data"], **sampling)
    given.pop("directed", None)  # the sampler warns of it
    return cls.in_memory(**given)


def _argument_names(cls: type[DatasetLoader]) -> list[str]:
    own = [name for name in inspect.signature(cls).parameters if name != "pyg_arguments"]
    return [*own, *NO_EFFECT, "collate_fn", "dataset"]


def _is_changed(cls: type[DatasetLoader], name: str, value: Any) -> bool:
    """Whether an argument of the sampler is not the default. Every sampler has num_neighbors of its own."""
    return name != "num_neighbors" and value != inspect.signature(cls).parameters[name].default


def _order_of(
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool,
    rank: int | None,
    world_size: int | None,
) -> tuple[Iterable[Any] | None, int | None]:
    """What gives the order of an epoch, if not the loader, and the batch size: None if it gives lists.

    Raises ValueError and TypeError for arguments that exclude each other, as torch's DataLoader does.
    """
    order = sampler if batch_sampler is None else batch_sampler
    if order is None:
        if batch_size is None:
            raise ValueError("batch_size=None needs sampler=, which yields the positions of each minibatch")
        return None, batch_size
    name = "sampler" if batch_sampler is None else "batch_sampler"
    if not hasattr(order, "__len__"):
        raise TypeError(f"{name}= needs a length: {type(order).__name__} has none")
    others = {"shuffle": bool(shuffle), "rank": rank is not None, "world_size": world_size is not None}
    if batch_sampler is not None:
        others |= {"sampler": sampler is not None, "batch_size": batch_size != 1, "drop_last": drop_last}
        batch_size = None
    elif batch_size is None:
        others |= {"drop_last": drop_last}
    if wrong := [other for other, is_given in others.items() if is_given]:
        raise ValueError(f"give {name}= or {wrong[0]}=, not both")
    return order, batch_size
