"""Orders of rows: `gids bench hit-ratio` predicts the pages that a converted dataset reads."""

from __future__ import annotations

import pytest
from commands import gids

from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph

SMALL = ("--batch-size", 8, "--fanouts", "5,5", "--cache", "5%", "--policies", "lookahead", "--windows", 16)
SAMPLED = (*SMALL, "--batches", 60)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Many classes, most edges within one, ids in no order: rows of 256 bytes, 16 per page."""
    spec = GraphSpec(20_000, degree=12, dim=64, classes=200, homophily=0.9, train_count=2000)
    return write_graph(tmp_path_factory.mktemp("clustered") / "graph", spec)


def convert(graph, order):
    path = graph.with_name(f"{order}.gids")
    if not path.exists():
        command = ["convert", str(graph), str(path), "--quiet", "--order", order, "--page-bytes", "4096"]
        gids(*command)
    return path


def test_an_order_by_community_reads_fewer_pages_and_converts_to_the_same(graph, bench):
    def read(dataset, order):
        """Pages read per epoch by policy."""
        _, report = bench("hit-ratio", convert(graph, dataset), *SAMPLED, "--order", order)
        return {f["setting"]["policy"]: f["metrics"]["epoch_pages_read"] for f in report["figures"]}

    pages = {order: read("original", order) for order in ("original", "degree", "community")}
    assert pages["original"]["lookahead"] >= 1.5 * pages["community"]["lookahead"]
    assert pages["original"]["lookahead"] >= pages["degree"]["lookahead"]
    for order in ("degree", "community"):
        assert read(order, "stored") == pages[order]
        assert read(order, "original") == pages["original"]


def test_an_order_that_is_none_is_refused(graph, tmp_path, capsys):
    for order in ("hilbert", "trace:rows.trace"):
        assert main(["convert", str(graph), str(tmp_path / "x.gids"), "--order", order]) == 2
        assert f"unknown order '{order}'; choose original, degree, community" in capsys.readouterr().err
    assert not (tmp_path / "x.gids").exists()
