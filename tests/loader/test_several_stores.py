"""Tables of several datasets in one loader: every row is that of its own source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_options import feature_loader, node_loader

import gids
from gids.store import FeatureStore
from gids.write import DatasetWriter, edge_list

PAPERS, AUTHORS, EDGES = 900, 120, 4000
WRITES = ("author", "writes", "paper")
Rows = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source() -> Rows:
    generator = torch.Generator().manual_seed(1)

    def rows(count: int, dim: int) -> torch.Tensor:
        return torch.randn(count, dim, generator=generator)

    return {
        "paper.feat": rows(PAPERS, 64),
        "author.feat": rows(AUTHORS, 32),
        "text": rows(PAPERS, 300),
        "image": rows(PAPERS, 20).half(),
        "weight": rows(EDGES, 4),
        "edges": torch.stack(
            [
                torch.randint(AUTHORS, (EDGES,), generator=generator),
                torch.randint(PAPERS, (EDGES,), generator=generator),
            ]
        ),
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, source: Rows) -> list[Path]:
    """A graph with features; text and images of its papers; weights of its edges; another graph's papers."""
    folder = tmp_path_factory.mktemp("stores")
    paths = [folder / f"{name}.gids" for name in ("graph", "text", "image", "weights", "other")]
    with DatasetWriter(paths[0]) as writer:
        for ntype in ("paper", "author"):
            writer.write_table("node", ntype, "feat", source[f"{ntype}.feat"])
        edges = edge_list(*source["edges"], num_src=AUTHORS, num_dst=PAPERS)
        writer.write_edges(WRITES, edges)
        writer.write_labels("paper", torch.arange(PAPERS) % 5)
    for path, name, stripe in ((paths[1], "text", 2), (paths[2], "image", 1)):
        with DatasetWriter(path, page_bytes=512, stripe=stripe) as writer:
            writer.write_table("node", "paper", "feat", source[name])
    with DatasetWriter(paths[3]) as writer:
        writer.write_table("edge", WRITES, "weight", source["weight"])
        writer.add_nodes("author", AUTHORS)
        writer.add_nodes("paper", PAPERS)
    with DatasetWriter(paths[4]) as writer:
        writer.write_table("node", "paper", "x", source["text"][:-1])
        writer.write_table("node", "venue", "x", source["text"])
    return paths


def test_a_list_names_them_by_their_own_names(paths: list[Path], source: Rows) -> None:
    graph, weights = FeatureStore(paths[0]), FeatureStore(paths[3])
    tables = ["author.feat", weights.table("weight"), FeatureStore(paths[1]).table("feat").named("bert")]
    with node_loader(graph, {"paper": torch.arange(50)}, [3], tables=tables, memory=1 << 28) as loader:
        minibatch = next(iter(loader))
    assert list(minibatch.features) == ["author.feat", "author.writes.paper.weight", "bert"]
    assert torch.equal(minibatch.features["bert"], source["text"][minibatch.input_nodes["paper"]])  # type: ignore
    ids = {"bert": torch.tensor([5, 5, 0]), "author.feat": torch.tensor([1])}
    with feature_loader(graph, tables, memory=1 << 28) as features:
        [(_, rows)] = features.attach([ids], lambda m: m)
        assert torch.equal(rows["bert"], source["text"][ids["bert"]])
        assert torch.equal(rows["author.feat"], source["author.feat"][1:2])


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        (lambda s: ["paper.feat", s[1].table("feat")], ValueError, r"two tables are called 'paper\.feat'"),
        (
            lambda s: [s[4].table("paper.x")],
            ValueError,
            r"paper\.x has 899 rows, and graph\.gids has 900 nodes of type 'paper': tables of other datasets",
        ),
        (lambda s: [s[4].table("venue.x")], ValueError, r"venue\.x: no relation has nodes of type 'venue'"),
        (lambda s: [s[1]], TypeError, "tables has a FeatureStore: give names of tables, or Tables"),
        (lambda s: "paper.feat", TypeError, r"give a list, \['paper\.feat'\]"),
        (lambda s: {"a": "paper.none"}, KeyError, r"no table 'paper\.none' in graph\.gids"),
    ],
)
def test_what_does_not_fit_is_refused(
    paths: list[Path], tables: Callable[[list[FeatureStore]], Any], error: type[Exception], message: str
) -> None:
    stores = [FeatureStore(path) for path in paths]
    with pytest.raises(error, match=message):
        gids.NodeLoader(stores[0], {"paper": torch.arange(9)}, [3], tables=tables(stores))
