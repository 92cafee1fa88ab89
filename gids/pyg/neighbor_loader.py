"""NeighborLoader: PyG's minibatches of seed nodes. Users make it."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.sampler import BaseSampler, NumNeighbors

from gids.pyg.dataset_loader import SAMPLING, DatasetLoader
from gids.pyg.hops import Counts
from gids.pyg.inputs import InputNodes, node_inputs


class NeighborLoader(DatasetLoader):
    """``torch_geometric.loader.NeighborLoader`` over a dataset on disk: the same arguments, the same
    ``Data`` or ``HeteroData``. For data in memory it is PyG's own NeighborLoader, with gids' sampler.

    Args:
        data: gids.open(...), or for default options the dataset's path, a gids.FeatureStore, or
            (gids.pyg.FeatureStore, gids.pyg.GraphStore). In memory: Data, HeteroData, or any (FeatureStore,
            GraphStore) with PyG's interfaces; then arguments that PyG does not have are refused.
        num_neighbors: number of neighbors to draw in each hop, -1 for all; or a dictionary of these lists by
            edge type. As in PyG, the first number applies to the seeds. An empty list yields the seeds alone.
        input_nodes: the seeds: int64[n], bool[num_nodes] or None for all nodes; in a dataset with several
            types a node type, or (node type, one of these).
        input_time: int64[n], a time for each seed. None, with times of nodes: the seeds' own.
        replace: draw with replacement.
        subgraph_type: ``"directional"`` (the sampled edges), ``"bidirectional"`` (also their reverses, as
            PyG makes them) or ``"induced"`` (all edges among the nodes; on the CPU only).
        disjoint: sample a tree of its own for each seed.
        temporal_strategy: ``"uniform"`` (draw among the neighbors that are not later than the seed) or
            ``"last"`` (take the latest of them).
        time_attr: PyG's name of a table of nodes or edges with one integer each, or ``"time"`` for the times
            that `gids convert` stores. Nodes or edges that are later than the seed's time are left out. Makes
            minibatches disjoint.
        weight_attr: PyG's name of a table of edges with one number per edge. Neighbors are drawn in
            proportion to it. The numbers are held in memory (4 bytes per edge), on a GPU next to the
            topology. Relations without such a table are drawn uniformly.
        transform: called with each Data.
        transform_sampler_output: called with each SamplerOutput, before features are read.
        is_sorted: the edges of data in memory are sorted by destination. Those of a dataset always are.
        filter_per_worker: whether ``collate_fn()`` returns Data, not the sampler's output.
        neighbor_sampler: any sampler of PyG in place of gids'. Its random numbers are its own.
        custom_cls: class of the minibatches, in place of Data or HeteroData.
        input_id: a number for each seed, which minibatches have as ``input_id``.
        batch_size, shuffle, drop_last: as in PyG; batch_size is per rank.
        sampler, batch_sampler: as in PyG, for the order of the seeds: positions, or lists of positions with
            batch_sampler or batch_size=None. Each rank has its own, and ``state_dict()`` is not supported.
        generator: seed is drawn from it.
        tables: names of the tables to load, such as ``"paper.feat"``, and tables of other stores; or a
            mapping from attribute names to these. None: all tables of nodes and edges in the topology. Empty:
            none.
        labels: include ``y``, if the dataset has labels.
        seed: random seed of the order and of the sampling (default 0); torch's generator is not used.
        rank, world_size: as in gids.NodeLoader. In an initialized process group the ranks share the seeds:
            give every rank all of them.
        device: ``"cpu"`` or ``"cuda"``: where the sampling, the cache and the minibatches are.
        topology_on, dtype, minibatch_rows: as in gids.NodeLoader.

    ``num_workers`` and other arguments of torch's DataLoader about workers are accepted and have no effect:
    sampling uses native threads, and reading is asynchronous.

    Attributes of a minibatch: ``x`` (tables with another key than "feat": that name), ``edge_attr``, ``y``,
    ``edge_index``, ``n_id``, ``e_id``, ``input_id``, ``batch_size``, ``num_sampled_nodes``,
    ``num_sampled_edges``; ``batch`` if disjoint, ``seed_time`` with times. Nodes and edges are in the order
    of pyg-lib: seeds first, then hop by hop.

    Each ``for`` is one epoch; ``epoch`` is the number of the next. ``state_dict()`` and ``load_state_dict()``
    resume an epoch, as in gids.NodeLoader. ``loader(positions)`` is the minibatch of these seeds.

    Raises the errors of gids.NodeLoader; ValueError for an argument of PyG that is not supported; KeyError,
    TypeError and ValueError if weight_attr is not a table of weights. While iterating: StorageError concerns
    one minibatch.
    """

    in_memory = PygNeighborLoader

    def __init__(
        self,
        data: Any,
        num_neighbors: Counts | NumNeighbors,
        input_nodes: InputNodes = None,
        input_time: torch.Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Any = None,
        transform_sampler_output: Any = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: BaseSampler | None = None,
        directed: bool = True,
        **options: Any,
    ) -> None:
        given = locals()
        if input_time is not None and time_attr is None and neighbor_sampler is None:
            raise ValueError("input_time= needs time_attr=, the name of the times of nodes or edges")

        def inputs_of(store: Any, graphs: Any, input_id: Any) -> Any:
            return node_inputs(store, input_nodes, times=input_time, input_id=input_id)

        super().__init__(
            data,
            inputs_of,
            {name: given[name] for name in SAMPLING},
            neighbor_sampler,
            None,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            **options,
        )
