"""Times of nodes and edges: gids convert finds and stores them, and sorts the edges of every node by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import damage
from reader_example import convert, refused

from gids import FeatureStore
from gids.cli import main
from gids.store import verify
from gids.write import DatasetWriter, edge_list

LIKES, REVERSE = ("user", "likes", "item"), ("item", "rev_likes", "user")


def data_of(nodes: int = 40, edges: int = 300, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"num_nodes": nodes, "edge_index": torch.from_numpy(rng.integers(0, nodes, (2, edges))), **more}


def assert_sorted(store: FeatureStore, relation: Any, sources: Any, destinations: Any, times: Any) -> None:
    """times: of the edges, in the order of the source."""
    graph = store.graph(relation)
    sources, destinations, times = map(np.asarray, (sources, destinations, times))
    order = np.lexsort([times, destinations])  # stable
    assert np.array_equal(graph.indices, sources[order])
    assert np.array_equal(np.arange(graph.num_edges) if graph.edge_ids is None else graph.edge_ids, order)
    found = graph.edge_times if graph.sorted_by == "edges" else graph.src_times[graph.indices]  # type: ignore[index]
    assert np.array_equal(found, times[order])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "dtype"),
    [
        (lambda n: (torch.arange(n) % 5).int()[:, None], np.int32),
        (lambda n: (torch.arange(n) % 6) * (1 << 40), np.int64),
        (lambda n: (torch.arange(n) % 9).float() - 3, np.int32),
    ],
    ids=["a column of int32", "beyond int32", "whole floating numbers"],
)
def test_times_of_pyg_sort_the_edges(tmp_path: Path, times: Any, dtype: type) -> None:
    data = data_of(edge_attr=torch.ones(300, 1))
    src, dst = data["edge_index"].numpy()
    of_edges, of_nodes = times(300), times(40)
    torch.save(data | {"time": of_edges}, tmp_path / "edges.pt")
    store = convert(tmp_path / "edges.pt", tmp_path / "edges.gids")
    graph = store.graph()
    assert graph.sorted_by == "edges"
    assert graph.edge_times is not None
    assert graph.edge_times.dtype == dtype
    assert store.node_times() is None
    assert_sorted(store, None, src, dst, of_edges.reshape(-1))
    assert "_N._E._N.time" in store.tables  # models may read it too

    torch.save(data | {"time": of_nodes}, tmp_path / "nodes.pt")
    store = convert(tmp_path / "nodes.pt", tmp_path / "nodes.gids", "--index-dtype", "int32")
    assert np.array_equal(store.node_times(), of_nodes.reshape(-1))  # type: ignore[arg-type]
    assert store.node_times().dtype == dtype  # type: ignore[union-attr]
    assert (store.graph().sorted_by, store.graph().edge_times) == ("nodes", None)
    assert_sorted(store, None, src, dst, of_nodes.reshape(-1)[src])


def test_options_that_change_the_graph_keep_times_with_their_edges(tmp_path: Path) -> None:
    data = data_of()
    src, dst = data["edge_index"].numpy()
    times = np.random.default_rng(1).integers(0, 9, 300)
    torch.save(data | {"time": torch.from_numpy(times)}, tmp_path / "g.pt")
    store = convert(tmp_path / "g.pt", tmp_path / "both.gids", "--reverse-edges")
    assert_sorted(store, None, [*src, *dst], [*dst, *src], [*times, *times])
    users = torch.randint(0, 20, (2, 100))
    hetero = {
        "user": {"num_nodes": 20, "time": torch.arange(20) % 4},
        "item": {"num_nodes": 20},
        LIKES: {"edge_index": users},
    }
    torch.save(hetero, tmp_path / "h.pt")
    store = convert(tmp_path / "h.pt", tmp_path / "h.gids", "--reverse-edges")
    assert_sorted(store, LIKES, *users, users[0] % 4)
    reverse = store.graph(REVERSE)  # its sources have no times
    assert (reverse.sorted_by, reverse.src_times) == (None, None)
    assert np.array_equal(reverse.dst_times, np.arange(20) % 4)  # type: ignore[arg-type]


def test_times_are_left_out_and_conflicts_are_refused(tmp_path: Path, capsys: Any) -> None:
    data = data_of(time=torch.arange(300) % 5)
    torch.save(data, tmp_path / "g.pt")
    store = convert(tmp_path / "g.pt", tmp_path / "no.gids", "--no-times", "--sort-neighbors")
    assert store.graph().sorted_by is None
    for option, message in (
        ("--sort-neighbors", "--sort-neighbors sorts the edges of"),
        ("--dedup", "table 'time' of '_N._E._N' would not fit them; leave out the option or the table"),
    ):
        assert message in refused(capsys, tmp_path / "g.pt", tmp_path / "m.gids", option)
    torch.save(data | {"time": torch.arange(300) / 2}, tmp_path / "f.pt")
    store = convert(tmp_path / "f.pt", tmp_path / "f.gids")
    assert store.graph().edge_times is None
    not_used = "table _N._E._N.time is not used as times: some of its values are not whole"
    assert not_used in capsys.readouterr().err


def test_info_and_verify_know_times(tmp_path: Path, capsys: Any) -> None:
    torch.save(data_of(time=torch.arange(300) % 5), tmp_path / "g.pt")
    store = convert(tmp_path / "g.pt", tmp_path / "g.gids")
    capsys.readouterr()
    assert main(["info", str(store.path)]) == 0
    assert "times int32, sorted by the times of edges" in capsys.readouterr().out
    damage(store.path / "graph/_N._E._N/time.npy", np.int32(99).tobytes(), 128 + 4)  # of the second edge
    faults = list(verify(store.path))
    assert any("time.npy: CRC32C is" in fault for fault in faults)
    assert any("time.npy: the edge at position 2 is earlier than the one before" in fault for fault in faults)


def test_edges_are_sorted_by_time_in_little_memory(tmp_path: Path) -> None:
    """Splits to scratch files, and one node with more edges than fit."""
    rng = np.random.default_rng(2)
    count, nodes = 100_000, 1000
    src = rng.integers(0, nodes, count)
    dst = np.where(rng.random(count) < 0.7, 7, rng.integers(0, nodes, count))
    times, of_nodes = rng.integers(0, 50, count), rng.integers(0, 50, nodes)
    edges = edge_list(src, dst, num_src=nodes, num_dst=nodes)
    with DatasetWriter(tmp_path / "m.gids", memory_bytes=1 << 20) as writer:
        writer.write_times("_N", of_nodes)
        writer.write_edges(("_N", "of edges", "_N"), edges, times=times)
        writer.write_edges(("_N", "of nodes", "_N"), edges, times="nodes", keep_ids=False)
    assert list(verify(tmp_path / "m.gids")) == []
    store = FeatureStore(tmp_path / "m.gids")
    assert_sorted(store, ("_N", "of edges", "_N"), src, dst, times)
    found = store.graph(("_N", "of nodes", "_N"))
    assert (found.sorted_by, found.edge_ids) == ("nodes", None)
    assert np.array_equal(found.indices, src[np.lexsort([of_nodes[src], dst])])


def test_a_writer_refuses_wrong_times(tmp_path: Path) -> None:
    edges = edge_list(np.arange(3), np.arange(3), num_src=3, num_dst=3)
    relation = ("_N", "_E", "_N")
    with DatasetWriter(tmp_path / "m.gids") as writer:
        with pytest.raises(ValueError, match="'_N' nodes have no times: call write_times first"):
            writer.write_edges(relation, edges, times="nodes")
        with pytest.raises(ValueError, match="times order the edges of a node"):
            writer.write_edges(relation, edges, times=np.arange(3), sort_neighbors=True)
        with pytest.raises(ValueError, match=r"times of .* must be whole numbers, int64\[3\]"):
            writer.write_edges(relation, edges, times=np.zeros(3))
        with pytest.raises(ValueError, match=r"times of '_N' are float64\[3\]"):
            writer.write_times("_N", np.zeros(3))
        writer.write_edges(relation, edges, times=np.arange(3))
