"""The obvious reference of PyG's neighbor sampling, and datasets that have a twin in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from gids.store import FeatureStore, graphs_of
from gids.store.names import Relation
from gids.write import DatasetWriter
from gids.write.edges import edge_list

PAPERS, AUTHORS = 600, 150
COUNTS = {"paper": PAPERS, "author": AUTHORS}
CITES: Relation = ("paper", "cites", "paper")
WRITES: Relation = ("author", "writes", "paper")
WRITTEN: Relation = ("paper", "written by", "author")


class AllNeighbors(BaseSampler):
    """A sampler of PyG in plain Python: pyg-lib's loop with all neighbors taken. Each hop expands the nodes
    that the last one found, once. PyG's own loaders run with it, over data in memory and over gids' stores.

    store: has the topology. hops: for each hop, the relations that it takes; None takes all.
    """

    def __init__(self, store: FeatureStore, hops: Sequence[set[Relation] | None]) -> None:
        self.graphs, self.hops = graphs_of(store), hops

    def sample_from_nodes(self, index: NodeSamplerInput) -> Any:
        return node_sample(index, self._sample)

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: Any = None) -> Any:
        counts = PAPERS if index.input_type is None else COUNTS
        return edge_sample(index, self._sample, counts, False, None, neg_sampling)

    def _sample(self, seeds: Any, times: None = None) -> SamplerOutput | HeteroSamplerOutput:
        types = {t for g in self.graphs for t in (g.relation[0], g.relation[2])}
        by_type = seeds if isinstance(seeds, dict) else {"paper": seeds}
        nodes = {t: by_type[t].tolist() if t in by_type else [] for t in types}
        place = {t: {v: i for i, v in reversed(list(enumerate(ids)))} for t, ids in nodes.items()}
        edges: dict[Relation, list[tuple[int, int, int]]] = {g.relation: [] for g in self.graphs}
        node_counts = {t: [len(ids)] for t, ids in nodes.items()}
        edge_counts: dict[Relation, list[int]] = {g.relation: [] for g in self.graphs}
        begins = dict.fromkeys(types, 0)
        for taken in self.hops:
            ends = {t: len(ids) for t, ids in nodes.items()}
            for g in self.graphs:
                src, _, dst = g.relation
                before = len(edges[g.relation])
                for col in range(begins[dst], ends[dst]) if taken is None or g.relation in taken else ():
                    v = nodes[dst][col]
                    for position in range(g.indptr[v], g.indptr[v + 1]):
                        u = int(g.indices[position])
                        if u not in place[src]:
                            place[src][u] = len(nodes[src])
                            nodes[src].append(u)
                        e = position if g.edge_ids is None else int(g.edge_ids[position])
                        edges[g.relation].append((place[src][u], col, e))
                edge_counts[g.relation].append(len(edges[g.relation]) - before)
            for t in types:
                node_counts[t].append(len(nodes[t]) - ends[t])
            begins = ends
        ids = {t: torch.tensor(n, dtype=torch.int64) for t, n in nodes.items()}
        found = {r: torch.tensor(e, dtype=torch.int64).view(-1, 3).T for r, e in edges.items()}
        if not isinstance(seeds, dict):
            row, col, edge = found[CITES]
            counts = {"num_sampled_nodes": node_counts["paper"], "num_sampled_edges": edge_counts[CITES]}
            return SamplerOutput(ids["paper"], row, col, edge, **counts)
        row, col, edge = ({r: e[i] for r, e in found.items()} for i in range(3))
        counts = {"num_sampled_nodes": node_counts, "num_sampled_edges": edge_counts}
        return HeteroSamplerOutput(ids, row, col, edge, **counts)


def random_edges(num_src: int, num_dst: int, seed: int) -> torch.Tensor:
    """int64[2, n], in no order; sources and destinations."""
    rng = np.random.default_rng(seed)
    count = num_dst * 4
    return torch.from_numpy(
        np.stack([(num_src * rng.random(count) ** 2).astype(np.int64), rng.integers(0, num_dst, count)])
    )


def homogeneous() -> Data:
    generator = torch.Generator().manual_seed(1)
    edges = random_edges(PAPERS, PAPERS, 1)
    return Data(
        x=torch.randn(PAPERS, 24, generator=generator),
        edge_index=edges,
        edge_attr=torch.randn(edges.shape[1], 3, generator=generator),
        y=torch.randint(0, 5, (PAPERS,), generator=generator),
    )


def heterogeneous() -> HeteroData:
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    data["paper"].x = torch.randn(PAPERS, 24, generator=generator)
    data["paper"].y = torch.randint(0, 5, (PAPERS,), generator=generator)
    data["author"].x = torch.randn(AUTHORS, 7, generator=generator)
    data[CITES].edge_index = random_edges(PAPERS, PAPERS, 1)
    data[WRITES].edge_index = random_edges(AUTHORS, PAPERS, 2)
    data[WRITES].edge_attr = torch.randn(data[WRITES].edge_index.shape[1], 2, generator=generator)
    data[WRITTEN].edge_index = random_edges(PAPERS, AUTHORS, 3)
    return data


def write(path: Path, data: Data | HeteroData) -> Path:
    """The dataset of which data is the twin: the same nodes, edge ids, features and labels."""
    is_one = isinstance(data, Data)
    with DatasetWriter(path) as writer:
        for ntype, storage in [("paper", data)] if is_one else data.node_items():
            writer.write_table("node", ntype, "feat", storage.x)
            if "y" in storage:
                writer.write_labels(ntype, storage.y)
        for relation, storage in [(CITES, data)] if is_one else data.edge_items():
            for attribute, key in (("edge_attr", "feat"), ("edge_label", "edge_label")):
                if attribute in storage:
                    writer.write_table("edge", relation, key, storage[attribute])
            num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
            edges = edge_list(*storage.edge_index, num_src=num_src, num_dst=num_dst)
            writer.write_edges(relation, edges)
    return path


def stores(data: Data | HeteroData) -> dict[Any, Any]:
    if isinstance(data, Data):
        return {None: data}
    return {**dict(data.node_items()), **dict(data.edge_items())}


def assert_same(ours: Data | HeteroData, theirs: Data | HeteroData) -> None:
    """The same attributes with the same values."""
    assert type(ours) is type(theirs)
    mine, other = stores(ours), stores(theirs)
    assert mine.keys() == other.keys()
    for key, storage in mine.items():
        assert set(storage.keys()) == set(other[key].keys()), key
        for name, value in storage.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[key][name].dtype
                assert torch.equal(value, other[key][name]), (key, name)
            else:
                assert value == other[key][name], (key, name)


def assert_all_same(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """The same minibatches."""
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
