"""`gids scale` predicts what ranks count: within 5 % of real processes, and of counting in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from datasets import in_edges
from programs import count_epoch
from rank_pool import RankPool

from gids.bench.sampling import make_sampler
from gids.distributed.owners import hash_owners
from gids.sampler import Topology
from gids.scale import Curves, Setting, Work, measure
from gids.scale.model import Model, Plan, received, step_work
from gids.store import FeatureStore, graphs_of
from gids.store.names import Relation
from gids.write import DatasetWriter
from gids.write.partition import partition

NODES, SEEDS, BATCH = 24_000, 2048, 32
FANOUTS = (4, 3)
CITES: Relation = ("paper", "cites", "paper")
NEAR = 0.05
SAMPLERS = ("neighbor", "labor")
BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some nodes are the source of many edges."""
    path = tmp_path_factory.mktemp("scale") / "one.gids"
    rng = np.random.default_rng(1)
    indptr, indices = in_edges(rng.integers(0, 16, NODES), NODES, 2)
    indices = (NODES * rng.random(len(indices)) ** 2).astype(indices.dtype)
    with DatasetWriter(path, page_bytes=512) as writer:
        rows = torch.arange(NODES * 32, dtype=torch.float32).view(NODES, 32)
        writer.write_table("node", "paper", "feat", rows)
        writer.write_graph(CITES, indptr, indices, num_src=NODES)
        writer.write_split("paper", "train", torch.arange(0, 9 * SEEDS, 9))
    return path


def curves_of(dataset: Path, sampler: str) -> Curves:
    setting = Setting(FANOUTS, BATCH, sampler, seconds=600, threads=1)
    return measure(FeatureStore(dataset), setting, 64 * BATCH)


@pytest.fixture(scope="module")
def curves(dataset: Path) -> dict[str, Curves]:
    return {sampler: curves_of(dataset, sampler) for sampler in SAMPLERS}


def work_of(curves: Curves, mode: str, ranks: int, copies: int = 1) -> Work:
    return step_work(curves, Plan(cache_bytes=0), Model(), mode, ranks, copies)


def near(predicted: float, counted: float) -> bool:
    return counted == predicted or abs(predicted / counted - 1) <= NEAR


def compare(predicted: dict[str, float], counted: dict[str, float]) -> None:
    wrong = {name: (p, counted[name]) for name, p in predicted.items() if not near(p, counted[name])}
    assert not wrong


def mean(told: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([of_rank[name] for of_rank in told])) for name in told[0]}


@pytest.mark.few(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("size", [1, 4])
def test_counts_of_processes(
    dataset: Path, curves: dict[str, Curves], ranks: RankPool, tmp_path: Path, size: int, sampler: str
) -> None:
    seeds = FeatureStore(dataset).split("train")
    arguments = seeds, make_sampler(sampler, FANOUTS, BATCH, threads=1), BATCH
    parts = tmp_path / "parts"
    partition(dataset, parts, size)

    alone = work_of(curves[sampler], "independent", size)
    counted = mean(ranks.run(size, count_epoch, dataset, *arguments, "independent"))
    compare(
        {
            "seeds": BATCH,
            "nodes": alone.nodes,
            "edges": alone.edges,
            "input": alone.rows,
            "pages": alone.pages,
        },
        counted,
    )

    divided = work_of(curves[sampler], "partitioned", size)
    counted = mean(ranks.run(size, count_epoch, dataset, *arguments, "partitioned"))
    rows = {"rows asked": divided.rows_received, "rows sent": divided.rows_received, "pages": divided.pages}
    compare({"input": alone.rows, "edges": alone.edges, **rows}, counted)
    counted = mean(ranks.run(size, count_epoch, parts, *arguments, "partitioned"))
    asked, drawn = divided.nodes_asked, divided.edges_received
    answer = 4 * asked + (20 if sampler == "labor" else 16) * drawn
    compare(
        {
            "rows asked": divided.rows_received,
            "sampling: nodes asked": asked,
            "sampling: edges sent": drawn,
            "sampling: bytes sent": 8 * asked + answer,
        },
        counted,
    )

    together = work_of(curves[sampler], "cooperative", size)
    counted = mean(ranks.run(size, count_epoch, dataset, *arguments, "cooperative"))
    compare(
        {
            "seeds": BATCH,
            "nodes": together.nodes,
            "edges": together.edges,
            "input": together.rows,
            "pages": together.pages,
            "received": together.ids_received,
            "received inputs": together.rows_received,
        },
        counted,
    )


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The counts of bench/cooperation.py."""
    monkeypatch.syspath_prepend(BENCH)
    import cooperation

    yield cooperation
    sys.modules.pop("cooperation", None)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_counts_in_one_process_to_64_ranks(
    dataset: Path, curves: dict[str, Curves], counting: ModuleType, sampler: str
) -> None:
    """Other steps and seeds than those that the curves were measured on."""
    store = FeatureStore(dataset)
    topology, made = Topology(graphs_of(store)[0]), make_sampler(sampler, FANOUTS, BATCH, threads=1)
    order = np.random.default_rng(7).permutation(store.split("train").numpy())
    table = store.table("paper.feat")
    degrees = np.diff(graphs_of(store)[0].indptr)
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        counted: list[dict[str, float]] = []
        for repeat in range(64 // ranks):
            mine = order[repeat * ranks * BATCH : (repeat + 1) * ranks * BATCH]
            of_ranks = [
                counting.sample(made, topology, part, 100 + repeat, keep_blocks=False)
                for part in np.split(mine, ranks)
            ]
            *_, union = counting.unite(of_ranks, NODES)
            together = counting.sample(made, topology, mine, 100 + repeat, keep_blocks=True)
            owners = hash_owners(ranks, table.rows_per_page)(np.arange(NODES)).astype(np.uint8)
            by_layer = counting.received(together, owners, ranks)
            foreign = [owners[m.nodes] != r for r, m in enumerate(of_ranks)]
            asked = [
                counting.ask(m, f, degrees, list(FANOUTS)) for m, f in zip(of_ranks, foreign, strict=True)
            ]
            counted.append(
                {
                    "alone": np.mean([len(m.nodes) for m in of_ranks]),
                    "rows": len(union) / ranks,
                    "pages": len(np.unique(union // table.rows_per_page)) / ranks,
                    "received inputs": by_layer[0].mean(),
                    "received": sum(layer.mean() for layer in by_layer),
                    "edges": sum(b.num_edges for b in together.blocks) / ranks,
                    "asked": np.mean([requests for requests, _, _ in asked]),
                    "foreign": np.mean([np.count_nonzero(f) for f in foreign]),
                }
            )
        divided = work_of(curves[sampler], "partitioned", ranks)
        together = work_of(curves[sampler], "cooperative", ranks)
        compare(
            {
                "alone": work_of(curves[sampler], "independent", ranks).rows,
                "rows": together.rows,
                "pages": divided.pages,
                "received inputs": together.rows_received,
                "received": together.ids_received,
                "edges": together.edges,
                "asked": divided.nodes_asked,
                "foreign": divided.rows_received,
            },
            mean(counted),
        )


def test_sizes_that_were_not_measured_are_interpolated_and_extrapolated(
    dataset: Path, curves: dict[str, Curves]
) -> None:
    measured = curves["neighbor"]
    few = Curves(
        measured.setting,
        [p for p in measured.points if p.batch_size in (32, 128, 512)],
        measured.epoch_seeds,
        measured.tables,
        measured.node_counts,
        measured.relations,
    )
    assert few.largest == 512
    for size, most in ((64, 1 + NEAR), (256, 1 + NEAR), (1024, 1.25), (2048, 1.5)):
        [exact] = [p for p in measured.points if p.batch_size == size]
        rows = few.at(size, lambda p: p.input_nodes["paper"], NODES)
        assert 1 - NEAR <= rows / exact.input_nodes["paper"] <= most
        wanted = sum(received(measured, size, 8, 1).values())
        # The curves are concave, so the last slope gives too much.
        assert 1 - NEAR <= sum(received(few, size, 8, 1).values()) / wanted <= most
    assert few.at(1 << 20, lambda p: p.input_nodes["paper"], NODES) == NODES


def test_caches_miss_less_the_larger_they_are_and_dependent_minibatches_miss_less(dataset: Path) -> None:
    store, missed = FeatureStore(dataset), {}
    whole = store.table("paper.feat").page_count * 512
    for policy, kappa in (("static", 1), ("lru", 1), ("lru", 64)):
        setting = Setting(FANOUTS, 64, "labor", kappa, policy=policy, seconds=600, threads=1)
        found = measure(store, setting, 64)
        pages = [
            step_work(found, Plan(cache_bytes=share * whole), Model(), "independent", 1).pages
            for share in (0, 0.05, 0.2, 0.5, 1)
        ]
        assert all(a >= b for a, b in pairwise(pages))
        assert pages[0] == pytest.approx(found.points[-1].pages["paper.feat"], rel=0.03)
        missed[policy, kappa] = pages
    assert missed["static", 1][-1] == 0
    assert missed["static", 1][2] < missed["static", 1][0]
    assert missed["lru", 64][3] < 0.9 * missed["lru", 1][3]


def test_static_misses_are_those_of_the_pages_with_the_least_heat(dataset: Path) -> None:
    store = FeatureStore(dataset)
    table = store.table("paper.feat")
    found = measure(store, Setting(FANOUTS, SEEDS, threads=1), SEEDS)
    heat = np.asarray(store.heat("out-degree", "paper"), np.int64)
    of_pages = np.add.reduceat(heat, np.arange(0, NODES, table.rows_per_page))
    lines = table.page_count // 10
    hottest = np.argsort(-of_pages, kind="stable")[:lines]
    topology = Topology(graphs_of(store)[0])
    seeds = np.random.default_rng(0).permutation(store.split("train").numpy())
    made = make_sampler("neighbor", FANOUTS, SEEDS, threads=1)
    nodes = made.sample(topology, torch.from_numpy(seeds), epoch=0, step=0).input_nodes.numpy()
    pages = np.unique(nodes // table.rows_per_page)
    expected = len(set(pages.tolist()) - set(hottest.tolist()))
    assert found.points[-1].misses["paper.feat"].at(0.1) == pytest.approx(expected, rel=0.01)
