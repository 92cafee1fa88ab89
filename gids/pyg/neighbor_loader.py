"""NeighborLoader: PyG's minibatches from a dataset on disk, with features read ahead through a cache.

Users make it. It composes NodeLoader and HopSampler, with PyG's names.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NumNeighbors

from gids.closing import Closing
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
"""Arguments of PyG's loader about workers and arrays in memory. They do not change minibatches."""


class NeighborLoader(Closing):
    """``torch_geometric.loader.NeighborLoader`` over a dataset on disk: the same arguments, the same
    ``Data`` or ``HeteroData``.

    Args:
        data: gids.open(...), or for default options the dataset's path, a gids.FeatureStore, or
            (gids.pyg.FeatureStore, gids.pyg.GraphStore).
        num_neighbors: number of neighbours to draw in each hop, -1 for all; or a dictionary of these lists by
            edge type. As in PyG, the first number applies to the seeds.
        replace: draw with replacement.
        weight_attr: PyG's name of a table of edges with one number per edge. Neighbours are drawn in
            proportion to it. It is in memory (4 bytes per edge), and on a GPU next to the topology. Relations
            without such a table are drawn uniformly.
        input_nodes: the seeds: int64[n], bool[num_nodes] or None for all nodes; in a dataset with several
            types a node type, or (node type, one of these).
        batch_size, shuffle, drop_last: as in PyG; batch_size is per rank.
        transform: called with each Data.
        tables: names of the tables to load, such as ``"paper.feat"``, and tables of other stores; or a
            mapping from attribute names to these. None: all tables of nodes and edges in the topology. Empty:
            none.
        labels: include ``y``, if the dataset has labels.
        seed: random seed of the order and of the sampling; torch's generator is not used.
        rank, world_size: as in gids.NodeLoader. In an initialized process group the ranks share the seeds:
            give every rank all of them.
        device: ``"cpu"`` or ``"cuda"``: where the sampling, the cache and the minibatches are.
        topology_on, dtype, minibatch_rows: as in gids.NodeLoader.
        pyg_arguments: ``num_workers`` and other arguments of PyG's loader about workers are accepted and have
            no effect: sampling uses native threads, and reading is asynchronous.

    Attributes of a minibatch: ``x`` (tables with another key than "feat": that name), ``edge_attr``, ``y``,
    ``edge_index``, ``n_id``, ``e_id``, ``input_id``, ``batch_size``, ``num_sampled_nodes``,
    ``num_sampled_edges``. Nodes and edges are in the order of pyg-lib: seeds first, then hop by hop.

    Each ``for`` is one epoch; ``epoch`` is the number of the next. ``state_dict()`` and ``load_state_dict()``
    resume an epoch, as in gids.NodeLoader.

    Raises the errors of gids.NodeLoader; ValueError for an argument of PyG that is not supported (disjoint,
    times, subgraph_type and others); KeyError, TypeError and ValueError if weight_attr is not a table of
    weights. While iterating: StorageError concerns one minibatch.
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
        """Number of minibatches in an epoch, on each rank."""
        return len(self._loader)

    def __iter__(self) -> NeighborEpoch:
        return NeighborEpoch(iter(self._loader), self._input_ids, self._data, self.transform)

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


class NeighborEpoch(Iterator[Any]):
    """One epoch of a NeighborLoader. After a StorageError it continues with the next minibatch."""

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
