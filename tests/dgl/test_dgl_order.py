"""A graph whose nodes or edges are in another order than the dataset's rows is refused, and no other is."""

from __future__ import annotations

from typing import Any

import dgl_model as model
import pytest
import torch

import gids.dgl

import dgl  # isort: skip
from dgl.dataloading import NeighborSampler

TABLES = {"node": "_N.feat", "edge": "_N._E._N.weight"}


def permutation(count: int, share: float = 1) -> torch.Tensor:
    """A permutation that moves this share of the numbers."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(3))[: round(count * share)]
    order = torch.arange(count)
    order[chosen] = chosen.roll(1)
    return order


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


def test_dgls_reordered_graph_and_a_dataset_that_was_made_from_it(homogeneous, tmp_path):
    given = {"edge_permute_algo": "src"}
    graph = dgl.reorder_graph(homogeneous.graph, "rcmk", **given)
    refused(in_format(graph, "csc"), homogeneous.store, r"dgl.NID has their old ids\): give the loader the")
    refused(graph, homogeneous.store, "dgl.EID has their old ids", "edge")
    graph = dgl.reorder_graph(homogeneous.full, "rcmk", store_ids=False, **given)
    columns = {
        column: (graph.ndata if column[0] == "node" else graph.edata)[column[2]]
        for column in homogeneous.columns
    }
    store = model.write(tmp_path / "r.gids", graph, columns)
    for kind, said in (("node", "sampled edges of '_N._E._N'"), ("edge", "with the same ids")):
        refused(graph, homogeneous.store, said, kind)
        serve(graph, store, kind)
    refused(homogeneous.graph, store, r"sampled edges of '_N._E._N' \(\d.\d%\) are in r.gids")


@pytest.mark.parametrize(("share", "made"), [(0.01, "coo"), (0.3, "csr"), (1, "csc")])
def test_some_nodes_or_edges_in_another_order(homogeneous, share, made):
    store, said = homogeneous.store, r"sampled edges .* \(\d+.\d%\) are in small.gids"
    graph = renumbered(homogeneous.graph, {"_N": permutation(300, share)})
    refused(in_format(graph, made), store, said)
    u, v = homogeneous.graph.edges(order="eid")
    order = permutation(1800, share)
    graph = in_format(dgl.graph((u[order], v[order]), num_nodes=300), made)
    serve(graph, store)  # nodes are as they were
    refused(graph, store, f"{said} with the same ids", "edge")
    serve(in_format(dgl.graph((u, v), num_nodes=300), made), store, "edge")


OTHER_GRAPHS = {
    "the same": (lambda g: g, "csc"),
    "self loops, both ways": (lambda g: dgl.add_self_loop(dgl.add_reverse_edges(g)), "coo"),
    "reversed": (dgl.reverse, "coo"),
    "fewer edges": (lambda g: dgl.remove_edges(g, torch.arange(0, 1800, 2)), "csc"),
    "no edges": (lambda g: dgl.graph(([], []), num_nodes=300), "coo"),
    "all nodes of it": (lambda g: dgl.node_subgraph(g, torch.arange(300)), "coo"),
    "int32": (lambda g: g.int(), "csc"),
}


@pytest.mark.parametrize("name", OTHER_GRAPHS)
def test_a_graph_of_these_edges_is_served(homogeneous, name):
    make, made = OTHER_GRAPHS[name]
    graph = make(homogeneous.graph)
    serve(in_format(graph, made), homogeneous.store)
    if name in ("the same", "reversed", "int32"):
        serve(in_format(graph, made), homogeneous.store, "edge")


def test_a_graph_with_edges_of_its_own_is_served_when_it_says_that_its_ids_are_the_same(homogeneous):
    ends = torch.randint(300, (2, 1800), generator=torch.Generator().manual_seed(5))
    graph = dgl.graph((ends[0], ends[1]), num_nodes=300)
    refused(graph, homogeneous.store, r"say so: graph.nodes\['_N'\].data\[dgl.NID\] = torch.arange\(300")
    graph.ndata[dgl.NID] = torch.arange(300)
    serve(graph, homogeneous.store)
    refused(graph, homogeneous.store, r"say so: .*data\[dgl.EID\] = torch.arange\(1800\)", "edge")
    graph.edata[dgl.EID] = torch.arange(1800)
    serve(graph, homogeneous.store, "edge")


def test_one_of_several_types_in_another_order(heterogeneous):
    graph, given = heterogeneous.graph, {"gids": heterogeneous.store, "batch_size": 5}
    moved = {t: renumbered(graph, {t: permutation(graph.num_nodes(t))}) for t in ("paper", "venue")}
    for ntype, refuses in (("paper", ("paper", "venue")), ("author", ("paper",))):  # whose neighbors moved
        arguments = {"paper": torch.arange(10)}, NeighborSampler([2], prefetch_node_feats={ntype: ["feat"]})
        gids.dgl.DataLoader(renumbered(graph, {}), *arguments, **given).close()
        for of_type, other in moved.items():
            if of_type in refuses:
                with pytest.raises(ValueError, match=f"in another order than the rows of '{ntype}.feat'"):
                    gids.dgl.DataLoader(other, *arguments, **given)
            else:
                gids.dgl.DataLoader(other, *arguments, **given).close()
