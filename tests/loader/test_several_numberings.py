"""Datasets that number nodes or edges otherwise: rows are matched by ids, or by number, or are refused.

The model is a dictionary: the row of a node is that of its id.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import write_ids

import gids
from gids.write import DatasetWriter, edge_list

NODES, EDGES = 70, 400
RELATION = ("_N", "_E", "_N")
RNG = np.random.default_rng(5)
ENDS = RNG.integers(0, NODES, (2, EDGES))
Ids = np.ndarray | None


def ids_of(kind: str, numbers: np.ndarray) -> Ids:
    if kind == "text":
        return np.array([f"{'é' * (n % 3)}n{n}" for n in numbers.tolist()])
    return numbers * 1000 - 7 if kind == "numbers" else None


def write(
    path: Path,
    ids: Ids,
    tables: dict[str, np.ndarray],
    *,
    count: int = NODES,
    edges: np.ndarray | None = None,
    order: np.ndarray | None = None,
    keep_ids: bool = True,
    edge_rows: np.ndarray | None = None,
    **options: Any,
) -> Path:
    with DatasetWriter(path, **options) as writer:
        writer.add_nodes("_N", count)
        for key, rows in tables.items():
            writer.write_table("node", "_N", key, rows, order=order)
        if ids is not None:
            write_ids(writer, "_N", ids)
        if edges is not None:
            writer.write_edges(RELATION, edge_list(*edges, num_src=count, num_dst=count), keep_ids=keep_ids)
        if edge_rows is not None:
            writer.write_table("edge", RELATION, "w", edge_rows)
    return path


def rows_of(numbers: np.ndarray) -> np.ndarray:
    """A row by which one knows the node."""
    return np.stack([numbers, numbers * 3], 1).astype(np.float32)


FIRST, SECOND = (np.random.default_rng(n).permutation(NODES) for n in (5, 6))
"""The node that is at each number, in each dataset."""


def write_both(folder: Path, kind: str, order: np.ndarray | None = None) -> tuple[Path, Path]:
    first = write(folder / "a.gids", ids_of(kind, FIRST), {"x": rows_of(FIRST)}, edges=ENDS)
    second = write(
        folder / "b.gids", ids_of(kind, SECOND), {"emb": rows_of(SECOND)}, order=order, page_bytes=512
    )
    return first, second


@pytest.fixture(scope="module", params=["text", "numbers"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two datasets of the same nodes in another order; pages of the second one's rows, in a third one."""
    order = RNG.permutation(NODES) if request.param == "text" else None
    return write_both(tmp_path_factory.mktemp(request.param), request.param, order)


def by_features(source: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.arange(NODES).flip(0)
    with gids.FeatureLoader(source, ["emb"]) as loader, loader.attach([ids], lambda _: {"_N.emb": ids}) as it:
        yield ids, next(it)[1]["_N.emb"]


def by_table(source: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    table = gids.NodeLoader(source, torch.arange(NODES), [3], tables=["emb"]).tables["_N.emb"]
    for one in (table, pickle.loads(pickle.dumps(table))):
        yield torch.arange(NODES), one.read_rows(range(NODES))
        for first, rows in one.scan(11):
            yield torch.arange(first, first + len(rows)), rows


@pytest.mark.parametrize("read", [by_features, by_table], ids=lambda read: read.__name__)
def test_rows_of_the_second_dataset_are_those_of_the_same_ids(
    both: tuple[Path, Path], read: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gids")
    with gids.open(list(both), memory="64MB") as source:
        got = list(read(source))
    assert caplog.messages.count("rows are matched to those of a.gids: '_N' of b.gids by ids") == 1
    assert len(got)
    for nodes, rows in got:
        assert np.array_equal(rows.numpy(), rows_of(FIRST[nodes.numpy()]))


def test_a_table_that_is_given_is_matched_too(both: tuple[Path, Path]) -> None:
    table = gids.FeatureStore(both[1]).table("emb")
    (minibatch,) = gids.NodeLoader(both[0], torch.arange(NODES), [3], tables={"b": table}, batch_size=NODES)
    assert np.array_equal(minibatch.features["b"].numpy(), rows_of(FIRST[minibatch.input_nodes.numpy()]))


def test_each_store_has_its_own_numbers(both: tuple[Path, Path]) -> None:
    with gids.open(list(both)) as source:
        second = source.stores[1]
        for store in (second, source.with_options(window=0).stores[1], pickle.loads(pickle.dumps(second))):
            assert np.array_equal(store.read_rows(range(NODES)).numpy(), rows_of(SECOND))
            (one,) = store.ids().find([source.store.ids()[7]])
            assert np.array_equal(store.read_rows([one]).numpy(), rows_of(FIRST[7:8]))


def test_equal_ids_in_one_order_need_no_map(tmp_path: Path) -> None:
    first, _ = write_both(tmp_path, "text")
    with DatasetWriter(tmp_path / "c.gids") as writer:
        writer.write_table("node", "_N", "emb", rows_of(FIRST))
        writer.copy_ids(gids.FeatureStore(first))
    with gids.open([first, tmp_path / "c.gids"]) as source:
        table = source.stores[1].table("emb")
        assert source.match(table) is table
        assert table.order is None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("text", "none", r"only a\.gids stores ids of '_N' nodes .*Convert both with the same column"),
        ("none", "text", r"only b\.gids .*not stored: .* sort the rows of b\.gids by id and convert it"),
        ("numbers", "text", "ids of '_N' nodes are text in one, numbers in the other"),
        ("numbers", -3, rf"b\.gids lacks 3 of the {NODES} ids of '_N' nodes in a\.gids, such as -?\d+: "),
        ("text", 4, rf"a\.gids lacks 4 of the {NODES + 4} ids of '_N' nodes in b\.gids, such as 'é*n7\d': "),
    ],
)
def test_nodes_that_may_be_others_are_refused(
    tmp_path: Path, first: str, second: str | int, message: str
) -> None:
    """second: the kind of its ids, or how many more it has."""
    numbers, kind = SECOND, second if isinstance(second, str) else first
    if isinstance(second, int):
        numbers = np.arange(NODES + second)
    a = write(tmp_path / "a.gids", ids_of(first, FIRST), {"x": rows_of(FIRST)}, edges=ENDS)
    b = write(tmp_path / "b.gids", ids_of(kind, numbers), {"emb": rows_of(numbers)}, count=len(numbers))
    with pytest.raises(ValueError, match=message):
        gids.open([a, b])
    with pytest.raises(ValueError, match=message):
        gids.NodeLoader(a, torch.arange(5), [2], tables=[gids.FeatureStore(b).table("emb")])


SORTED = ENDS[:, np.lexsort(ENDS)]
OTHER = np.array([ENDS[0], np.roll(ENDS[1], 1)])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {}, ""),
        ({}, {"edges": None}, ""),
        ({}, {"edges": OTHER}, "their edges, or the ids of these, differ, or .*index type"),
        ({}, {"edges": ENDS[:, 1:]}, "it has 399 edges, not 400"),
        ({"keep_ids": False}, {"edges": None}, r"the edges of a\.gids have no ids of their own"),
        ({"edges": SORTED}, {"edges": None}, r"the edges of a\.gids have no ids of their own"),
        ({"ids": FIRST}, {"ids": FIRST}, ""),
        ({"ids": FIRST}, {"ids": SECOND, "edges": None}, "their '_N' nodes are others, or in another order"),
    ],
)
def test_rows_of_edges_are_those_of_the_same_edges_or_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    a = {"ids": None, "edges": ENDS} | first
    b = {"ids": None, "edges": ENDS} | second
    count = EDGES if b["edges"] is None else b["edges"].shape[1]
    b.setdefault("edge_rows", np.arange(count * 2.0).reshape(count, 2))
    write(tmp_path / "a.gids", tables={"x": rows_of(FIRST)}, **a)
    write(tmp_path / "b.gids", tables={}, **b)
    with gids.open([tmp_path / "a.gids", tmp_path / "b.gids"]) as source:
        if message:
            with pytest.raises(ValueError, match=rf"rows of _N\._E\._N\.w in b\.gids .*{message}"):
                gids.NodeLoader(source, torch.arange(NODES), [3], tables=["w"])
            gids.NodeLoader(source, torch.arange(NODES), [3], tables=["x"]).close()
            return
        for m in gids.NodeLoader(source, torch.arange(NODES), [3], tables=["w"], batch_size=20):
            (block,) = m.blocks
            src, dst = block.coo()
            ends = torch.stack([m.input_nodes[src], m.input_nodes[dst]]).numpy()
            of_rows = (m.features["_N._E._N.w"][:, 0] / 2).long().numpy()
            assert np.array_equal(a["edges"][:, of_rows], ends)


def test_a_dgl_graph_of_a_second_dataset_that_numbers_nodes_otherwise_is_refused(tmp_path: Path) -> None:
    dgl = pytest.importorskip("gids.dgl", exc_type=ImportError)
    from dgl.dataloading import NeighborSampler

    both = write_both(tmp_path, "text")

    with gids.open(both[0]) as source, gids.open([both[1], both[0]]) as turned:
        graph, sampler = dgl.graph(source), NeighborSampler([3], prefetch_node_feats=["emb"])
        message = r"a\.gids has the edges, and b\.gids numbers nodes otherwise: give a\.gids first"
        with pytest.raises(ValueError, match=message):
            dgl.DataLoader(graph, torch.arange(NODES), sampler, gids=turned)
