"""NeighborLoader and LinkNeighborLoader. Users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from gids.pyg.dataset_loader import DatasetLoader, open_dataset
from gids.pyg.hops import Counts
from gids.pyg.input_sampler import InputSampler
from gids.pyg.inputs import InputEdges, InputNodes, check_negatives, edge_inputs, node_inputs


class NeighborLoader(DatasetLoader):
    """``torch_geometric.loader.NeighborLoader`` over a dataset on disk: the same ``Data`` or ``HeteroData``.

    Args:
        data: gids.open(...), or for default options the dataset's path or a gids.FeatureStore.
        num_neighbors: number of neighbors to draw in each hop, -1 for all; or a dictionary of these lists by
            edge type. As in PyG, the first number applies to the seeds. An empty list yields the seeds alone.
        input_nodes: the seeds: the name of a split, such as ``"train"``; int64[n], bool[num_nodes]; None for
            all nodes; in a dataset with several types a node type, or (node type, one of these), also as a
            mapping with one entry.
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
            proportion to it; as in pyg-lib, edges of weight 0 are sampled if a node has no more edges than
            the fanout, or no others are left. The numbers are held in memory (4 bytes per edge), on a GPU
            next to the topology. Relations without such a table are drawn uniformly.
        transform: called with each Data.
        input_id: a number for each seed, which minibatches have as ``input_id``.
        batch_size, shuffle, drop_last: as in PyG; batch_size is per rank (default 1).
        tables: names of the tables to load, such as ``"paper.feat"``, and tables of other stores; or a
            mapping from attribute names to these. None: all tables of nodes and edges in the topology. Empty:
            none.
        labels: include ``y``, if the dataset has labels (default True).
        seed, rank, world_size: as in gids.NodeLoader. In an initialized process group the ranks share the
            seeds: give every rank all of them.
        device: ``"cpu"`` (default) or ``"cuda"``: where the sampling, the cache and the minibatches are.
        topology_on, dtype, minibatch_rows: as in gids.NodeLoader.
        pin_memory: with ``device="cpu"``, minibatches are in pinned memory before `transform` gets them.
        memory: with a path or a gids.FeatureStore, as in gids.open().

    ``num_workers`` and other arguments of torch's DataLoader about workers are ignored, with a warning:
    threads sample and read ahead. ``data`` is the source.

    Attributes of a minibatch: ``x`` (tables with another key than "feat": that name), ``edge_attr``, ``y``,
    ``num_nodes`` of types without tables, ``edge_index``, ``n_id``, ``e_id``, ``input_id``, ``batch_size``,
    ``num_sampled_nodes``, ``num_sampled_edges``; ``batch`` if disjoint, ``seed_time`` with times. Nodes and
    edges are in the order of pyg-lib: seeds first, then hop by hop.

    Each ``for`` is one epoch; ``epoch`` is the number of the next. ``state_dict()`` and ``load_state_dict()``
    resume an epoch, as in gids.NodeLoader.

    Raises the errors of gids.NodeLoader; TypeError for data in memory; ValueError for an argument of PyG that
    is not supported; KeyError and ValueError if weight_attr is not a table of weights. While iterating:
    StorageError, when its minibatch is due. An error ends the epoch, which ``state_dict()`` resumes.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Counts | NumNeighbors,
        input_nodes: InputNodes = None,
        input_time: torch.Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        input_id: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        source, closing = open_dataset(NeighborLoader, data, num_neighbors, options)
        if input_time is not None and time_attr is None:
            raise ValueError("input_time= needs time_attr=, the name of the times of nodes or edges")
        inputs = node_inputs(source.store, input_nodes, input_time, input_id)
        drawing = subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr
        sampler = InputSampler(source, num_neighbors, *drawing)
        super().__init__(source, closing, inputs, sampler, transform=transform, **options)


class LinkNeighborLoader(DatasetLoader):
    """``torch_geometric.loader.LinkNeighborLoader`` over a dataset on disk: the same ``Data`` or
    ``HeteroData``.

    Args:
        edge_label_index: the seed edges: int64[2, n], which need not be in the topology, or None for all
            edges; in a dataset with several types an edge type, or (edge type, one of these). All edges
            are in the order of their ids, as in PyG; this takes 4 bytes of memory per edge.
        edge_label: a label for each seed edge. With binary negatives, labels from 0 on are raised by 1.
        edge_label_time: a time for each seed edge.
        neg_sampling: NegativeSampling, a mode ("binary", "triplet") or a dictionary of its arguments.
            Negatives depend on seed, epoch and step alone. A negative may be an edge by chance.
        neg_sampling_ratio: as NegativeSampling("binary", ratio).

    All other arguments are those of gids.pyg.NeighborLoader.

    Attributes of a minibatch: those of NeighborLoader without ``batch_size``, and ``edge_label_index`` (local
    ids: first the seed edges, then the negatives), ``edge_label``, ``edge_label_time``; with triplets
    ``src_index``, ``dst_pos_index``, ``dst_neg_index`` and ``seed_time``. As in PyG, these take the place of
    tables with these names, and nothing is left out of the subgraph: seed edges that are in the topology,
    and their reverses, may be sampled.

    Raises the errors of NeighborLoader, and ValueError for negatives that do not fit.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Counts | NumNeighbors,
        edge_label_index: InputEdges = None,
        edge_label: torch.Tensor | None = None,
        edge_label_time: torch.Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: int | float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        input_id: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        source, closing = open_dataset(LinkNeighborLoader, data, num_neighbors, options)
        if (edge_label_time is None) != (time_attr is None):
            times, attr = ("not set" if value is None else "set" for value in (edge_label_time, time_attr))
            raise ValueError(
                f"'edge_label_time' is {times}, but 'time_attr' is {attr}: give both, or neither"
            )
        negatives = NegativeSampling.cast(neg_sampling)
        if neg_sampling_ratio:
            if negatives is not None:
                raise ValueError("give neg_sampling= or neg_sampling_ratio=, not both")
            negatives = NegativeSampling("binary", neg_sampling_ratio)
        if negatives is not None and edge_label is not None:
            if negatives.is_triplet():
                raise ValueError("edge_label= and triplet negatives exclude each other: leave edge_label out")
            if len(edge_label) and edge_label.min() == 0:
                edge_label = edge_label + 1  # 0 is the label of negatives
        store, graphs = source.store, source.graphs()
        inputs = edge_inputs(store, graphs, edge_label_index, edge_label, edge_label_time, input_id)
        src, _, dst = inputs.input_type or graphs[0].relation
        check_negatives(negatives, store.num_nodes(src), store.num_nodes(dst))
        drawing = subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr
        sampler = InputSampler(source, num_neighbors, *drawing, negatives)
        super().__init__(source, closing, inputs, sampler, transform=transform, **options)
