"""NeighborLoader: PyG's minibatches from a store, whose features are read ahead through a cache.

The user's entry. It composes NodeLoader and HopSampler, and names things as PyG does.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NumNeighbors

from gids.loader import NodeLoader, SampledEpoch
from gids.loader.option_names import check_names
from gids.loader.source import Dataset, Source, as_source
from gids.loader.tables import Tables
from gids.pyg.arguments import refuse_other_values
from gids.pyg.attributes import attribute_of
from gids.pyg.edge_weights import stored_weights
from gids.pyg.hops import Counts, HopSampler
from gids.pyg.input_nodes import InputNodes, input_nodes_of
from gids.pyg.minibatch_data import MinibatchData
from gids.pyg.num_neighbors import counts_of
from gids.pyg.stores import store_of
from gids.store import FeatureStore, graphs_of

_NOTHING_TO_DO = {
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
    "filter_per_worker",
    "is_sorted",
}
"""Arguments of PyG's loader about workers and about arrays in memory: minibatches are the same without."""


class NeighborLoader:
    """``torch_geometric.loader.NeighborLoader`` over a dataset on disk: the same arguments, the same
    ``Data`` or ``HeteroData``.

    Args:
        data: gids.open(...), or for default options the dataset's path, a gids.FeatureStore, or
            (gids.pyg.FeatureStore, gids.pyg.GraphStore).
        num_neighbors: for each hop, the seeds' first, how many neighbours every newly found node draws, -1
            for all; or a dictionary of such lists by edge type.
        replace: draw with replacement, so many neighbours of every node that has any.
        weight_attr: the name, in PyG, of a table of edges with one number for each, in proportion to which
            neighbours are drawn; it is held in memory (4 bytes per edge), and copied beside the topology for
            a GPU. Relations without such a table are drawn from uniformly.
        input_nodes: the seeds: int64[n], or bool[num_nodes], or None for all nodes, or (of a dataset with
            several types) a node type, or (node type, one of those).
        batch_size, shuffle, drop_last: as there; batch_size on each rank.
        transform: called with each Data.
        tables: names of the tables to load, such as ``"paper.feat"``, and tables of other stores; None: all
            of the store's nodes and edges that the topology has; empty: none. In a mapping, by the names of
            the attributes to be.
        labels: give ``y``, where the store has labels.
        seed: of the order and of what is sampled; torch's generator has no part in them.
        rank, world_size: as of gids.NodeLoader: where a process group is initialized, its ranks share the
            seeds. Give every rank all of them.
        device: ``"cpu"``, or ``"cuda"``: then sampling, cache and all that is handed out are there.
        topology_on, dtype, minibatch_rows: as in gids.NodeLoader.
        pyg_arguments: ``num_workers`` and other arguments of PyG's loader about workers are accepted and have
            no effect: sampling uses native threads, and reading is asynchronous.

    Of a minibatch: ``x`` (a table of another key than "feat": that name), ``edge_attr``, ``y``,
    ``edge_index``, ``n_id``, ``e_id``, ``input_id``, ``batch_size``, ``num_sampled_nodes``,
    ``num_sampled_edges``. Nodes and edges stand in the order of pyg-lib: seeds first, then hop by hop.

    Each ``for`` is one epoch, ``epoch`` the number of the next; ``state_dict()`` and ``load_state_dict()``
    resume in the middle of one, as of gids.NodeLoader.

    Raises as gids.NodeLoader; ValueError for an argument of PyG's that is not supported (disjoint, times,
    subgraph_type and others); KeyError, TypeError and ValueError for a weight_attr that names no weights.
    While iterating: StorageError belongs to one minibatch.
    """

    def __init__(
        self,
        data: Source | Dataset | tuple[Any, Any],
        num_neighbors: Counts | NumNeighbors,
        input_nodes: InputNodes = None,
        *,
        replace: bool = False,
        weight_attr: str | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        tables: Tables | None = None,
        labels: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device = "cpu",
        topology_on: str = "auto",
        dtype: torch.dtype | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
        **pyg_arguments: Any,
    ) -> None:
        refuse_other_values(pyg_arguments)
        own = [name for name in inspect.signature(NeighborLoader).parameters if name != "pyg_arguments"]
        check_names("gids.pyg.NeighborLoader", pyg_arguments.keys() - _NOTHING_TO_DO, own)
        self._opened = ExitStack()
        source = as_source(
            data if isinstance(data, Source | str | os.PathLike) else store_of(data), self._opened
        )
        store = source.store
        seeds = input_nodes_of(store, input_nodes)
        graphs = graphs_of(store)
        if tables is None:
            types = {t for g in graphs for t in (g.relation[0], g.relation[2])} | {g.relation for g in graphs}
            tables = [t for one in source.stores for t in one.tables.values() if t.type in types]
        counts = counts_of(num_neighbors, None if seeds.ntype is None else [g.relation for g in graphs])
        weights = None
        if weight_attr is not None:
            weights = stored_weights(store, graphs, weight_attr)
        self._loader = NodeLoader(
            source,
            seeds.ids if seeds.ntype is None else {seeds.ntype: seeds.ids},
            HopSampler(counts, replace=replace, weights=weights, threads=source.options.threads),
            tables=tables,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
            device=device,
            topology_on=topology_on,
            dtype=dtype,
            minibatch_rows=minibatch_rows,
            labels="inputs" if labels else False,
        )
        self.transform = transform
        named = isinstance(tables, Mapping)
        self._data = MinibatchData(
            {
                name: (table.type, name if named else attribute_of(store, table))
                for name, table in self._loader.tables.items()
            },
            input_type=seeds.ntype,
            labelled=store.labels if labels else (),
        )
        self._input_ids = seeds.input_ids

    @property
    def store(self) -> FeatureStore:
        return self._loader.store

    @property
    def batch_size(self) -> int:
        return self._loader.batch_size

    @property
    def epoch(self) -> int:
        """The number of the next epoch; may be set."""
        return self._loader.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._loader.epoch = number

    def __len__(self) -> int:
        """Minibatches that each rank gets in an epoch."""
        return len(self._loader)

    def __iter__(self) -> NeighborEpoch:
        return NeighborEpoch(iter(self._loader), self._input_ids, self._data, self.transform)

    def stats(self) -> dict[str, Any]:
        """As of gids.NodeLoader."""
        return self._loader.stats()

    def state_dict(self) -> dict[str, Any]:
        """As of gids.NodeLoader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of gids.NodeLoader."""
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End the open epoch, release cache and topology. Idempotent."""
        self._loader.close()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NeighborEpoch(Iterator[Any]):
    """One epoch of a NeighborLoader. After a StorageError the next minibatch can be asked for."""

    def __init__(
        self,
        epoch: SampledEpoch,
        input_ids: torch.Tensor | None,
        data: MinibatchData,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._epoch, self._input_ids, self._data, self._transform = epoch, input_ids, data, transform

    def __next__(self) -> Data | HeteroData | Any:
        minibatch = next(self._epoch)
        positions = self._epoch.positions(minibatch.step)
        data = self._data.of(minibatch, positions if self._input_ids is None else self._input_ids[positions])
        return data if self._transform is None else self._transform(data)

    def close(self) -> None:
        """End the epoch here. Idempotent."""
        self._epoch.close()
