"""A graph whose nodes or edges are in another order than the dataset's rows is refused, and no other is."""

from __future__ import annotations

import shutil
from typing import Any

import dgl_model as model
import numpy as np
import pytest
import torch

import gids.dgl
from gids.store import FeatureStore
from gids.write import DatasetWriter

import dgl  # isort: skip
from dgl.dataloading import NeighborSampler

E = ("_N", "_E", "_N")
TABLES = {"node": "_N.feat", "edge": "_N._E._N.weight"}


def permutation(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def drawn(nodes: int, edges: int) -> Any:
    """A graph of random edges, the same in each run: dgl.rand_graph may draw many of another's."""
    ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(5))
    return dgl.graph((ends[0], ends[1]), num_nodes=nodes)


def in_format(graph: Any, name: str) -> Any:
    """With this format made, and no other; DGL may make CSC of a list of edges."""
    made = graph.formats(name)
    made.create_formats_()
    return made.formats(["coo", "csc"]) if name == "coo" else made


def serve(graph: Any, store: Any, kind: str = "node") -> None:
    """Make a loader, and read a minibatch, which equals rows of the graph's own ids."""
    name = "prefetch_node_feats" if kind == "node" else "prefetch_edge_feats"
    keys = ["feat"] if kind == "node" else ["weight"]
    seeds = torch.arange(10, dtype=graph.idtype)
    sampler = NeighborSampler([2], **{name: keys})
    loader = gids.dgl.DataLoader(graph, seeds, sampler, gids=store, batch_size=5)
    if graph.formats()["created"] != ["csr"] and graph.num_edges():  # of which DGL samples no in-edges
        for _, _, blocks in loader:
            column = blocks[0].srcdata["feat"] if kind == "node" else blocks[0].edata["weight"]
            ids = blocks[0].srcdata[dgl.NID] if kind == "node" else blocks[0].edata[dgl.EID]
            assert torch.equal(column, store.tables[TABLES[kind]].read_rows(ids.long()))
    loader.close()


def refused(graph: Any, store: Any, message: str, kind: str = "node") -> None:
    with pytest.raises(ValueError, match=f"are in another order than the rows of .*{message}"):
        serve(graph, store, kind)


def renumbered(graph: Any, perms: dict[str, torch.Tensor]) -> Any:
    """The same graph with other numbers for its nodes, and nothing that tells."""
    edges = {}
    for src, name, dst in graph.canonical_etypes:
        u, v = graph.edges(etype=(src, name, dst), order="eid")
        ends = [perms[t][x] if t in perms else x for t, x in ((src, u), (dst, v))]
        edges[src, name, dst] = tuple(ends)
    return dgl.heterograph(edges, {t: graph.num_nodes(t) for t in graph.ntypes})


@pytest.mark.parametrize("store_ids", [True, False])
@pytest.mark.parametrize("made", ["coo", "csc", "csr"])
def test_dgls_reordered_graph(homogeneous, store_ids, made):
    graph = dgl.reorder_graph(homogeneous.graph, "rcmk", edge_permute_algo="src", store_ids=store_ids)
    refused(in_format(graph, made), homogeneous.store, "give the loader the graph from before the reordering")
    refused(dgl.add_self_loop(graph), homogeneous.store, "sampled edges")
    refused(graph, homogeneous.store, "with the same ids", "edge")
    assert ("_ID" in graph.ndata) == store_ids


def test_edges_alone_in_another_order(homogeneous):
    graph, order = homogeneous.graph, permutation(1800)
    u, v = graph.edges(order="eid")
    for made in ("coo", "csc", "csr"):
        other = in_format(dgl.graph((u[order], v[order]), num_nodes=300), made)
        serve(other, homogeneous.store)  # nodes are as they were
        refused(other, homogeneous.store, r" of 1000 sampled edges .*are in small.gids with the same", "edge")
        serve(in_format(dgl.graph((u, v), num_nodes=300), made), homogeneous.store, "edge")
    subgraph = dgl.edge_subgraph(graph, order, relabel_nodes=False)
    serve(subgraph, homogeneous.store)
    refused(subgraph, homogeneous.store, "with the same ids", "edge")


def test_a_dataset_that_was_made_from_the_reordered_graph(homogeneous, tmp_path):
    graph = dgl.reorder_graph(homogeneous.full, "rcmk", edge_permute_algo="src")
    columns = {("node", "_N", "feat"): graph.ndata["feat"], ("edge", E, "weight"): graph.edata["weight"]}
    store = model.write(tmp_path / "r.gids", graph, columns)
    for kind in ("node", "edge"):
        serve(graph, store, kind)
        serve(gids.dgl.graph(store), store, kind)
    refused(homogeneous.graph, store, r"sampled edges of '_N._E._N' \(\d.\d%\) are in r.gids")
    with DatasetWriter(tmp_path / "f.gids") as writer:
        writer.write_table("node", "_N", "feat", graph.ndata["feat"])
    rows_only = FeatureStore(tmp_path / "f.gids")
    refused(graph, rows_only, r"dgl.NID has their old ids.* if its nodes have the ids of f.gids all the same")
    graph.ndata[dgl.NID] = torch.arange(300)
    serve(graph, rows_only)


def partly(count: int, share: float) -> torch.Tensor:
    """A permutation that moves this share of the numbers."""
    chosen = permutation(count)[: round(count * share)]
    order = torch.arange(count)
    order[chosen] = chosen.roll(1)
    return order


@pytest.mark.parametrize(("share", "made"), [(0.01, "coo"), (0.1, "csc"), (0.3, "csr")])
def test_some_nodes_or_edges_in_another_order(homogeneous, share, made):
    store, said = homogeneous.store, r"sampled edges .* \(\d\d.\d%\) are in small.gids"
    graph = renumbered(homogeneous.graph, {"_N": partly(300, share)})
    refused(in_format(graph, made), store, said)
    refused(in_format(dgl.add_self_loop(graph), made), store, "sampled edges")
    u, v = homogeneous.graph.edges(order="eid")
    order = partly(1800, share)
    graph = in_format(dgl.graph((u[order], v[order]), num_nodes=300), made)
    serve(graph, store)  # nodes are as they were
    refused(graph, store, f"{said} with the same ids", "edge")


def rewired(graph: Any) -> Any:
    """As many edges, from other nodes: every in-degree stays."""
    u, v = graph.edges(order="eid")
    return dgl.graph((u[permutation(len(u))], v), num_nodes=graph.num_nodes())


OTHER_GRAPHS = {
    "the same": lambda g: g,
    "reverse edges": dgl.add_reverse_edges,
    "self loops": dgl.add_self_loop,
    "reversed": dgl.reverse,
    "both ways": dgl.to_bidirected,
    "fewer edges": lambda g: dgl.remove_edges(g, torch.arange(0, 1800, 2)),
    "no edges": lambda g: dgl.graph(([], []), num_nodes=300),
    "all nodes of it": lambda g: dgl.node_subgraph(g, torch.arange(300)),
    "int32": lambda g: g.int(),
}


@pytest.mark.parametrize("name", OTHER_GRAPHS)
@pytest.mark.parametrize("made", ["coo", "csc"])
def test_a_graph_of_other_edges_is_served(homogeneous, name, made):
    graph = OTHER_GRAPHS[name](homogeneous.graph)
    serve(in_format(graph, made), homogeneous.store)


GRAPHS_OF_THEIR_OWN = {
    "other edges": lambda g: drawn(300, 1801),
    "as many other edges": lambda g: drawn(300, 1800),
    "the same in-degrees": rewired,
    "some more edges": lambda g: dgl.add_edges(g, permutation(300), permutation(300, seed=4)),
}


@pytest.mark.parametrize("name", GRAPHS_OF_THEIR_OWN)
@pytest.mark.parametrize("made", ["coo", "csc"])
def test_a_graph_with_edges_of_its_own_is_served_when_it_says_that_its_ids_are_the_same(
    homogeneous, name, made
):
    graph = in_format(GRAPHS_OF_THEIR_OWN[name](homogeneous.graph), made)
    refused(graph, homogeneous.store, r"say so: graph.nodes\['_N'\].data\[dgl.NID\] = torch.arange\(300")
    graph.nodes["_N"].data[dgl.NID] = torch.arange(300)
    serve(graph, homogeneous.store)
    if graph.num_edges() == 1800:
        refused(graph, homogeneous.store, r"say so: .*data\[dgl.EID\] = torch.arange\(1800\)", "edge")
        graph.edges[E].data[dgl.EID] = torch.arange(1800)
        serve(graph, homogeneous.store, "edge")


@pytest.mark.parametrize("name", ["the same", "reversed", "int32"])
@pytest.mark.parametrize("made", ["coo", "csc", "csr"])
def test_edges_of_the_same_ids_are_served(homogeneous, name, made):
    serve(in_format(OTHER_GRAPHS[name](homogeneous.graph), made), homogeneous.store, "edge")


@pytest.mark.parametrize("types", [("paper",), ("venue",), ("author", "paper", "venue")])
@pytest.mark.parametrize("made", ["coo", "csc", "csr"])
def test_one_of_several_types_in_another_order(heterogeneous, types, made):
    graph = heterogeneous.graph
    perms = {t: permutation(graph.num_nodes(t)) for t in types}
    other = in_format(renumbered(graph, perms), made)
    ask = {t: ["feat"] for t in ("paper", "author")}
    for ntype in ("paper", "author"):
        sampler = NeighborSampler([2], prefetch_node_feats={ntype: ask[ntype]})
        given = {"gids": heterogeneous.store, "batch_size": 5}
        seeds = {"paper": torch.arange(10)}
        if ntype == "paper" or types != ("venue",):  # authors and venues have edges with papers alone
            with pytest.raises(
                ValueError, match=f"nodes are in another order than the rows of '{ntype}.feat'"
            ):
                gids.dgl.DataLoader(other, seeds, sampler, **given)
        else:
            gids.dgl.DataLoader(other, seeds, sampler, **given).close()
    gids.dgl.DataLoader(in_format(renumbered(graph, {}), made), seeds, sampler, **given).close()


def test_of_long_lists_of_neighbors_as_many_as_allowed_are_searched(homogeneous, monkeypatch):
    graph = homogeneous.graph
    reordered = renumbered(graph, {"_N": permutation(300)})
    for neighbors in (1 << 20, 500, 0):
        monkeypatch.setattr("gids.dgl.order._NEIGHBORS", neighbors)
        serve(graph, homogeneous.store)
        if neighbors:
            refused(reordered, homogeneous.store, "sampled edges")
    serve(reordered, homogeneous.store)  # no edge could be looked up


def test_a_topology_that_is_damaged_is_no_crash(homogeneous, tmp_path):
    path = shutil.copytree(homogeneous.path, tmp_path / "d.gids")
    file = path / "graph/_N._E._N/indptr.npy"
    header = len(file.read_bytes()) - 301 * 8
    for values in (np.full(301, 1 << 60), np.full(301, -5), np.arange(301)[::-1]):
        file.write_bytes(file.read_bytes()[:header] + values.astype(np.int64).tobytes())
        serve(homogeneous.graph, FeatureStore(path))
