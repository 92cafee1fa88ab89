"""Edge options (sort, dedup, reverse, self-loops) compared with a simple implementation."""

import numpy as np
import pytest
from datasets import save_arrays, sorted_edges
from reader_example import assert_graph, assert_table, convert, refused

N, E = 60, 900
RNG = np.random.default_rng(21)
EDGES = RNG.integers(0, N, (2, E))
EDGES[:, 100:160] = EDGES[:, :60]  # repeats
EDGES[0, 200:220] = EDGES[1, 200:220]  # loops


def reversed_too(edges):
    return np.concatenate([edges, edges[::-1]], axis=1)


def with_loops(edges):
    kept = edges[:, edges[0] != edges[1]]
    return np.concatenate([kept, np.stack([np.arange(N)] * 2)], axis=1)


CASES = {
    "--self-loops": (with_loops(EDGES), False, {"by_source": False}),
    "--dedup": (EDGES, False, {"by_source": True, "dedup": True}),
    "--reverse-edges --self-loops --dedup": (
        with_loops(reversed_too(EDGES)),
        False,
        {"by_source": True, "dedup": True},
    ),
    "--reverse-edges --sort-neighbors": (reversed_too(EDGES), True, {"by_source": True}),
}


@pytest.mark.parametrize("in_csc", [False, True])
@pytest.mark.parametrize("arguments", CASES)
def test_edge_options_of_a_conversion(tmp_path, arguments, in_csc):
    edges, has_ids, order = CASES[arguments]
    source = tmp_path / "s"
    if in_csc:
        indptr, indices, ids = sorted_edges(*EDGES, N)
        save_arrays(source, num_nodes=np.array(N), indptr=indptr, indices=indices, edge_ids=ids)
    else:
        save_arrays(source, num_nodes=np.array(N), edge_index=EDGES)
    graph = convert(source, tmp_path / "a.gids", *arguments.split(), "--index-dtype", "auto").graph()
    indptr, indices, ids = sorted_edges(*edges, N, **order)
    assert np.array_equal(graph.indptr, indptr)
    assert graph.indices.dtype == np.int32
    if order["by_source"] or not in_csc:
        assert np.array_equal(graph.indices, indices)
    for v in range(N):  # within a destination, in-edges keep the order of the file
        part = slice(indptr[v], indptr[v + 1])
        assert sorted(graph.indices[part]) == sorted(indices[part])
    assert (graph.edge_ids is not None) == has_ids
    if has_ids:
        position = np.repeat(np.arange(N), np.diff(graph.indptr))
        assert np.array_equal(edges[:, graph.edge_ids], np.stack([graph.indices, position]))


def heterogeneous(source):
    """Authors write papers, with weights; papers cite papers, with weights."""
    writes = np.stack([RNG.integers(0, 30, 99), RNG.integers(0, N, 99)])
    arrays = {
        "nodes/author/num_nodes": np.array(30),
        "nodes/paper/num_nodes": np.array(N),
        "edges/author.writes.paper/edge_index": writes,
        "edges/author.writes.paper/w": np.arange(99.0),
        "edges/paper.cites.paper/edge_index": EDGES,
        "edges/paper.cites.paper/w": np.arange(E * 2.0).reshape(E, 2),
    }
    save_arrays(source, **arrays)
    return arrays


def test_reverse_relations_keep_edge_ids_and_tables(tmp_path):
    arrays = heterogeneous(tmp_path / "s")
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--reverse-edges")
    reverse = ("paper", "rev_writes", "author")
    assert store.relations == [("author", "writes", "paper"), ("paper", "cites", "paper"), reverse]
    assert_graph(store, reverse, *arrays["edges/author.writes.paper/edge_index"][::-1])
    assert_table(store, "paper.rev_writes.author.w", np.arange(99.0))
    cites = arrays["edges/paper.cites.paper/w"]
    assert_table(store, "paper.cites.paper.w", np.concatenate([cites, cites]))


def test_options_that_change_edges_reject_edge_tables_and_a_second_reverse(tmp_path, capsys):
    heterogeneous(tmp_path / "s")
    for option in ("--self-loops", "--dedup"):
        error = refused(capsys, tmp_path / "s", tmp_path / "a.gids", option)
        assert error.startswith(f"gids convert: {option}")
        assert "would not fit them; leave out the option" in error
    save_arrays(tmp_path / "s", **{"edges/paper.rev_writes.author/edge_index": np.zeros((2, 1), int)})
    error = refused(capsys, tmp_path / "s", tmp_path / "a.gids", "--reverse-edges")
    assert "cannot add 'paper.rev_writes.author': the source has it already" in error
