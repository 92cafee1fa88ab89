"""Takes a DGLGraph apart: features, topology, labels, splits. Called by `gids convert`, which loads it.

Knows DGLGraph's methods but does not import DGL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gids.store.convert.named import LABELS, mask_ids
from gids.store.convert.source import InEdges, Source, TableSource
from gids.store.names import Relation
from gids.store.rows import TensorRows

_MASKS = {"train_mask": "train", "val_mask": "val", "valid_mask": "val", "test_mask": "test"}


def read_dgl_graph(graph: Any) -> Source:
    """What a DGLGraph, homogeneous or not, holds. Its tensors are used in place.

    ndata: `label`, `labels` or `y` with one whole number per node are labels; `train_mask`, `val_mask` and
    `test_mask` are splits; all else is a table. edata: tables, in the order of DGL's edge ids.
    """
    source = Source()
    for ntype in graph.ntypes:
        source.add_nodes(ntype, graph.num_nodes(ntype), "the graph")
        _read_nodes(source, ntype, graph.nodes[ntype].data)
    for relation in graph.canonical_etypes:
        indptr, indices, edge_ids = graph.adj_tensors("csc", etype=relation)
        ids = TensorRows(edge_ids) if len(edge_ids) else None  # DGL leaves them out when they are positions
        source.graphs[relation] = InEdges(TensorRows(indptr), TensorRows(indices), ids)
        _read_edges(source, relation, graph.edges[relation].data)
    return source


def _read_nodes(source: Source, ntype: str, data: Mapping[str, torch.Tensor]) -> None:
    for key, values in data.items():
        is_class = values.dim() == 1 and not values.dtype.is_floating_point and values.dtype != torch.bool
        if key in LABELS and is_class and ntype not in source.labels:
            source.labels[ntype] = TensorRows(values)
        elif key in _MASKS and values.dim() == 1:
            source.splits.setdefault(ntype, {})[_MASKS[key]] = mask_ids(TensorRows(values))
        else:
            source.tables.append(TableSource("node", ntype, key, TensorRows(values)))


def _read_edges(source: Source, relation: Relation, data: Mapping[str, torch.Tensor]) -> None:
    for key, values in data.items():
        source.tables.append(TableSource("edge", relation, key, TensorRows(values)))
