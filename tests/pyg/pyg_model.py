"""The obvious reference of PyG's neighbor sampling, and datasets that have a twin in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from gids.cuda import Device
from gids.store import Graph
from gids.store.names import Relation
from gids.write import DatasetWriter
from gids.write.edges import edge_list

PAPERS, AUTHORS = 600, 150
CITES: Relation = ("paper", "cites", "paper")
WRITES: Relation = ("author", "writes", "paper")
WRITTEN: Relation = ("paper", "written by", "author")


def sample_all(
    graphs: list[Graph], seeds: Mapping[str, list[int]], hops: int
) -> tuple[dict[str, list[int]], dict[Relation, list[tuple[int, int, int]]], dict, dict]:
    """pyg-lib's loop with all neighbors taken: each hop expands the nodes that the last one found, once.

    Nodes by type; (row, col, edge id) by relation; the counts of nodes and of edges that each hop found.
    """
    types = {t for g in graphs for t in (g.relation[0], g.relation[2])}
    nodes = {t: list(seeds.get(t, [])) for t in types}
    place = {t: {} for t in types}
    for t, ids in nodes.items():
        for i, v in enumerate(ids):
            place[t].setdefault(v, i)
    edges: dict[Relation, list[tuple[int, int, int]]] = {g.relation: [] for g in graphs}
    node_counts = {t: [len(ids)] for t, ids in nodes.items()}
    edge_counts: dict[Relation, list[int]] = {g.relation: [] for g in graphs}
    begins = dict.fromkeys(types, 0)
    for _ in range(hops):
        ends = {t: len(ids) for t, ids in nodes.items()}
        for g in graphs:
            src, _, dst = g.relation
            before = len(edges[g.relation])
            for col in range(begins[dst], ends[dst]):
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
    return nodes, edges, node_counts, edge_counts


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
    with DatasetWriter(path) as writer:
        if isinstance(data, Data):
            nodes = [("paper", data)]
            edges = [(CITES, data)]
        else:
            nodes, edges = list(data.node_items()), list(data.edge_items())
        counts = {t: len(s.x) for t, s in nodes}
        for ntype, storage in nodes:
            writer.write_table("node", ntype, "feat", storage.x)
            if "y" in storage:
                writer.write_labels(ntype, storage.y)
        for relation, storage in edges:
            for attribute, key in (("edge_attr", "feat"), ("edge_label", "edge_label")):
                if attribute in storage:
                    writer.write_table("edge", relation, key, storage[attribute])
            row, col = storage.edge_index
            num_src, num_dst = counts[relation[0]], counts[relation[2]]
            writer.write_edges(relation, edge_list(row, col, num_src=num_src, num_dst=num_dst))
    return path


def stores(data: Data | HeteroData) -> dict[Any, Any]:
    if isinstance(data, Data):
        return {None: data}
    return {**dict(data.node_items()), **dict(data.edge_items())}


def assert_part_of(batch: HeteroData, several: HeteroData) -> None:
    """A minibatch has the features of its nodes, and edges of the whole graph."""
    for ntype in ("paper", "author"):
        assert torch.equal(batch[ntype].x, several[ntype].x[batch[ntype].n_id])
    for relation in (CITES, WRITES, WRITTEN):
        row, col = batch[relation].edge_index
        ends = torch.stack([batch[relation[0]].n_id[row], batch[relation[2]].n_id[col]])
        assert torch.equal(ends, several[relation].edge_index[:, batch[relation].e_id])


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


def assert_same_on(device: Device, make: Callable[..., Any], steps: int = 100, **options: Any) -> None:
    """A loader yields the same on a device as on the CPU, and all tensors but input_id are there."""
    found = []
    for name in ("cpu", "cuda"):
        with make(device=name, **options) as loader:
            found.append(list(itertools.islice(loader, steps)))
    for batch in found[1]:
        for storage in stores(batch).values():
            for name, value in storage.items():
                if isinstance(value, torch.Tensor) and name != "input_id":
                    assert value.device == device.torch_device, name
    assert_all_same((batch.cpu() for batch in found[1]), found[0])


def assert_drawn_by_weight(edges: torch.Tensor, weights: torch.Tensor, destinations: torch.Tensor) -> None:
    """edges: ids of drawn edges. Those of weight 0 lead to nodes that have no others."""
    totals = torch.zeros(int(destinations.max()) + 1).index_add(0, destinations, weights.float())
    assert ((weights[edges] > 0) | (totals[destinations[edges]] == 0)).all()
