"""LinkNeighborLoader: PyG's minibatches of seed edges. Users make it."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.sampler import BaseSampler, NegativeSampling, NumNeighbors

from gids.pyg.dataset_loader import SAMPLING, DatasetLoader
from gids.pyg.hops import Counts
from gids.pyg.inputs import InputEdges, edge_inputs
from gids.pyg.negatives import check_negatives


class LinkNeighborLoader(DatasetLoader):
    """``torch_geometric.loader.LinkNeighborLoader`` over a dataset on disk: the same arguments, the same
    ``Data`` or ``HeteroData``. For data in memory it is PyG's own LinkNeighborLoader, with gids' sampler.

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
    ``src_index``, ``dst_pos_index``, ``dst_neg_index`` and ``seed_time``. As in PyG, nothing is left out of
    the subgraph: seed edges that are in the topology, and their reverses, may be sampled.

    Raises the errors of NeighborLoader, and ValueError for negatives that do not fit.
    """

    in_memory = PygLinkNeighborLoader

    def __init__(
        self,
        data: Any,
        num_neighbors: Counts | NumNeighbors,
        edge_label_index: InputEdges = None,
        edge_label: torch.Tensor | None = None,
        edge_label_time: torch.Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: int | float | None = None,
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
        if (edge_label_time is None) != (time_attr is None) and neighbor_sampler is None:
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
            if edge_label.min() == 0:
                edge_label = edge_label + 1  # 0 is the label of negatives

        def inputs_of(store: Any, graphs: Any, input_id: Any) -> Any:
            inputs = edge_inputs(
                store, graphs, edge_label_index, labels=edge_label, times=edge_label_time, input_id=input_id
            )
            relation = inputs.input_type or graphs[0].relation
            check_negatives(negatives, store.num_nodes(relation[0]), store.num_nodes(relation[2]))
            return inputs

        super().__init__(
            data,
            inputs_of,
            {name: given[name] for name in SAMPLING},
            neighbor_sampler,
            negatives,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            **options,
        )
