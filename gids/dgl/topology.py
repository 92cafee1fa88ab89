"""A dataset's graph as a DGLGraph over memory-mapped files. Users call it.

DGL's public constructors scan the arrays for the largest id, which would read the whole topology, and allow
formats other than CSC, which would be made in memory. So the graph is built one level below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dgl
import torch
from dgl import heterograph_index, utils

from gids.loader.row_source import RowSource
from gids.loader.source import Dataset
from gids.store import FeatureStore, Graph
from gids.store.files import private_tensor
from gids.store.part import refuse_part


def graph(dataset: RowSource | Dataset, *, formats: str | Sequence[str] = "csc") -> Any:
    """A DGLGraph over the topology of a dataset: a source, a FeatureStore or a path.

    Homogeneous if the store has DGL's types "_N" and "_E" only.

    Ids are int64. Arrays stored as int64 are memory-mapped: resident memory grows as sampling reads them, and
    the kernel may drop them again. int32 ``indices`` are copied to int64.

    formats: formats that DGL may use. Most samplers need "csc"; edge prediction and SAINT by edges also need
    "coo", SAINT by nodes or walks "csr". DGL makes these in memory when needed, 16 to 24 bytes per edge each.
    Labels are ``ndata["label"]``.

    Raises ValueError if formats leave out "csc", or if the store has features only.
    """
    allowed = [formats] if isinstance(formats, str) else list(formats)
    if "csc" not in allowed:
        raise ValueError(f"formats={allowed!r}: the stored topology is CSC, so 'csc' must be among them")
    store = dataset.store if isinstance(dataset, RowSource) else dataset
    if not isinstance(store, FeatureStore):
        store = FeatureStore(store)
    refuse_part(store, "gids.dgl.graph")
    relations = store.relations
    if not relations:
        raise ValueError(f"{store.name} has features, but no topology: convert the graph with them")
    if store.node_types == ["_N"] and relations == [("_N", "_E", "_N")]:
        result = dgl.DGLGraph(_relation_index(store.graph(relations[0]), allowed), ["_N"], ["_E"])
    else:
        result = _heterograph(store, allowed)
    for node_type, labels in store.labels.items():
        result.nodes[node_type].data["label"] = labels
    return result


def _heterograph(store: FeatureStore, formats: list[str]) -> Any:
    metagraph, node_types, edge_types, relations = heterograph_index.create_metagraph_index(
        store.node_types, store.relations
    )
    parts = [_relation_index(store.graph(relation), formats) for relation in relations]
    counts = utils.toindex([store.num_nodes(node_type) for node_type in node_types], "int64")
    index = heterograph_index.create_heterograph_from_relations(metagraph, parts, counts)
    return dgl.DGLGraph(index, node_types, edge_types)


def _relation_index(part: Graph, formats: list[str]) -> Any:
    source, _, destination = part.relation
    edge_ids = torch.empty(0, dtype=torch.int64) if part.edge_ids is None else private_tensor(part.edge_ids)
    return heterograph_index.create_unitgraph_from_csr(
        1 if source == destination else 2,
        part.num_src,
        part.num_dst,
        private_tensor(part.indptr),
        private_tensor(part.indices),
        edge_ids,  # without edge_ids, an edge's id is its position
        formats,
        transpose=True,
    )
