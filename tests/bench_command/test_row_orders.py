"""Orders of rows: `gids bench hit-ratio` predicts the pages that a converted dataset reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gids
from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph
from gids.store import verify

Bench = Callable[..., tuple[int, str, dict[str, Any]]]
SMALL = ("--batch-size", 8, "--fanouts", "5,5", "--cache", "5%", "--policies", "lookahead", "--windows", 16)
SAMPLED = (*SMALL, "--batches", 60)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many classes, most edges within one, ids in no order: rows of 256 bytes, 16 per page."""
    spec = GraphSpec(20_000, degree=12, dim=64, classes=200, homophily=0.9, train_count=2000)
    return write_graph(tmp_path_factory.mktemp("clustered") / "graph", spec)


def convert(graph: Path, order: str) -> Path:
    path = graph.with_name(f"{order.partition(':')[0]}.gids")
    if not path.exists():
        command = ["convert", str(graph), str(path), "--quiet", "--order", order, "--page-bytes", "4096"]
        assert main(command) == 0
    return path


def pages(report: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Pages read per epoch by (order, policy)."""
    return {
        (f["setting"]["order"], f["setting"]["policy"]): f["metrics"]["epoch_pages_read"]["median"]
        for f in report["figures"]
    }


def test_an_order_by_community_reads_fewer_pages_and_converts_to_the_same(graph: Path, bench: Bench) -> None:
    status, said, report = bench(
        "hit-ratio", convert(graph, "original"), *SAMPLED, "--order", "original,degree,community"
    )
    assert status == 0, said
    found = pages(report)
    assert found["original", "lookahead"] >= 1.5 * found["community", "lookahead"]
    assert found["original", "lookahead"] >= found["degree", "lookahead"]
    for order in ("degree", "community"):
        _, _, report = bench("hit-ratio", convert(graph, order), *SAMPLED)
        stored = pages(report)
        for policy in ("MIN", "lookahead"):
            assert stored["stored", policy] == found[order, policy]
        _, _, report = bench("hit-ratio", convert(graph, order), *SAMPLED, "--order", "original")
        assert pages(report)["original", "lookahead"] == found["original", "lookahead"]


def test_a_trace_of_rows_gives_an_order(graph: Path, bench: Bench, tmp_path: Path) -> None:
    trace, original = tmp_path / "rows.trace", convert(graph, "original")
    status, said, _ = bench("hit-ratio", original, *SMALL, "--batches", 250, "--rows", "--record", trace)
    assert status == 0, said
    assert "--rows: each row counts as a page" in said
    path = convert(graph, f"trace:{trace}")
    assert not list(verify(path))
    ids = np.random.default_rng(0).integers(0, 20_000, 3000)
    table = gids.FeatureStore(path).table("feat")
    assert np.array_equal(table.read_rows(ids).numpy(), np.load(graph / "feat.npy")[ids])
    _, _, report = bench("hit-ratio", original, *SAMPLED, "--seed", 3, "--order", f"original,trace:{trace}")
    found = pages(report)
    assert found["original", "lookahead"] >= 1.5 * found[f"trace:{trace}", "lookahead"]
    _, _, report = bench("hit-ratio", path, *SAMPLED, "--seed", 3)
    assert pages(report)["stored", "lookahead"] == found[f"trace:{trace}", "lookahead"]


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (
            ("--order", "hilbert"),
            "--order must be one of stored, original, degree, community, trace:FILE (got 'hilbert')",
        ),
        (("--order", "trace"), "(got 'trace')"),
        (("--order", "degree:x"), "(got 'degree:x')"),
        (("--order", "degree", "--rows"), "remove --order"),
        (("--order", "degree,original", "--record", "x"), "--record writes one trace"),
    ],
)
def test_bad_orders_of_a_trace(graph: Path, bench: Bench, args: tuple[str, ...], cause: str) -> None:
    status, said, _ = bench("hit-ratio", convert(graph, "original"), *SAMPLED, *args)
    assert status == 2
    assert cause in said.replace("\n  ", " ")


def test_bad_orders_of_a_conversion(
    graph: Path, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_advice_speaks_about_pages_with_several_rows(graph: Path, bench: Bench) -> None:
    args = ("--batch-size", 8, "--fanouts", "5,5", "--batches", 30, "--advise", "20%")
    status, said, report = bench("hit-ratio", convert(graph, "original"), *args)
    assert status == 0, said
    (answer,) = (a for a in report["answers"] if "--page-bytes" in a)
    assert answer.startswith("a page of 4096 B has 16 rows; if rows are read at random, the same memory ")
    assert "in pages of 512 B: convert with --page-bytes 512, on a disk" in answer
    short = graph.with_name("short.gids")
    assert main(["convert", str(graph), str(short), "--quiet", "--page-bytes", "512"]) == 0
    status, said, report = bench("hit-ratio", short, *args)
    assert status == 0, said
    assert report["answers"]
    assert not [a for a in report["answers"] if "--page-bytes" in a]
