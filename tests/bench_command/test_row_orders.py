"""Orders of rows: `gids bench hit-ratio` predicts the pages that a converted dataset reads."""

from __future__ import annotations

import numpy as np
import pytest
from commands import gids

from gids import FeatureStore
from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph
from gids.store import verify

SMALL = ("--batch-size", 8, "--fanouts", "5,5", "--cache", "5%", "--policies", "lookahead", "--windows", 16)
SAMPLED = (*SMALL, "--batches", 60)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Many classes, most edges within one, ids in no order: rows of 256 bytes, 16 per page."""
    spec = GraphSpec(20_000, degree=12, dim=64, classes=200, homophily=0.9, train_count=2000)
    return write_graph(tmp_path_factory.mktemp("clustered") / "graph", spec)


def convert(graph, order):
    path = graph.with_name(f"{order.partition(':')[0]}.gids")
    if not path.exists():
        command = ["convert", str(graph), str(path), "--quiet", "--order", order, "--page-bytes", "4096"]
        gids(*command)
    return path


def pages(report):
    """Pages read per epoch by (order, policy)."""
    return {
        (f["setting"]["order"], f["setting"]["policy"]): f["metrics"]["epoch_pages_read"]["median"]
        for f in report["figures"]
    }


def test_an_order_by_community_reads_fewer_pages_and_converts_to_the_same(graph, bench):
    _, report = bench(
        "hit-ratio", convert(graph, "original"), *SAMPLED, "--order", "original,degree,community"
    )
    found = pages(report)
    assert found["original", "lookahead"] >= 1.5 * found["community", "lookahead"]
    assert found["original", "lookahead"] >= found["degree", "lookahead"]
    for order in ("degree", "community"):
        _, report = bench("hit-ratio", convert(graph, order), *SAMPLED)
        stored = pages(report)
        for policy in ("MIN", "lookahead"):
            assert stored["stored", policy] == found[order, policy]
        _, report = bench("hit-ratio", convert(graph, order), *SAMPLED, "--order", "original")
        assert pages(report)["original", "lookahead"] == found["original", "lookahead"]


def test_a_trace_of_rows_gives_an_order(graph, bench, tmp_path):
    trace, original = tmp_path / "rows.trace", convert(graph, "original")
    said, _ = bench("hit-ratio", original, *SMALL, "--batches", 250, "--rows", "--record", trace)
    assert "--rows: each row counts as a page" in said
    path = convert(graph, f"trace:{trace}")
    assert not list(verify(path))
    ids = np.random.default_rng(0).integers(0, 20_000, 3000)
    table = FeatureStore(path).table("feat")
    assert np.array_equal(table.read_rows(ids).numpy(), np.load(graph / "feat.npy")[ids])
    _, report = bench("hit-ratio", original, *SAMPLED, "--seed", 3, "--order", f"original,trace:{trace}")
    found = pages(report)
    assert found["original", "lookahead"] >= 1.5 * found[f"trace:{trace}", "lookahead"]
    _, report = bench("hit-ratio", path, *SAMPLED, "--seed", 3)
    assert pages(report)["stored", "lookahead"] == found[f"trace:{trace}", "lookahead"]


def test_bad_orders_of_a_conversion(graph, bench, tmp_path, capsys):
    pages_only = tmp_path / "pages.trace"
    bench("hit-ratio", convert(graph, "original"), *SMALL, "--batches", 5, "--record", pages_only)
    for order, cause in (
        ("trace", "--order trace needs a file: --order trace:FILE"),
        ("degree:x", "--order degree takes no file; only trace does"),
        ("hilbert", "unknown order 'hilbert'; choose original, degree, community, trace"),
        (f"trace:{pages_only}", "is a trace of pages, and an order needs a trace of rows"),
        (f"trace:{graph / 'feat.npy'}", "is not a complete trace of this gids"),
    ):
        assert main(["convert", str(graph), str(tmp_path / "x.gids"), "--order", order]) == 2
        assert cause in capsys.readouterr().err
    assert not (tmp_path / "x.gids").exists()
