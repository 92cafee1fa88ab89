"""How many pages does lookahead hit, and what do planning, gathering and computing heat cost?

    python bench/cache.py hits       hit ratio by policy and window, compared with Belady's MIN
                                     (--trace FILE: window buffering and pinning on that trace)
    python bench/cache.py heat       hit ratio by method of heat, seeds from all nodes and from 1 % of them
    python bench/cache.py planning   enter + plan + retire, per page of the minibatch, by number of lines
                                     (--most-lines 100000000 for more than 10 million)
    python bench/cache.py gather     plan + gather of cached rows, compared with torch.index_select
    python bench/cache.py carry      edges per second of a pass of reverse PageRank

Baselines: MIN over the same trace; torch.index_select(out=) on the same rows in memory. Seeds are fixed. The
tests use `--small`; docs/performance.md has the default sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from harness import make_parser, median_ratio
from traces import FANOUTS, popular_pages, rmat, sample_trace, skewed_trace

import gids
from gids import _core
from gids.cache import page_heat
from gids.heat import expected_visits, reverse_pagerank, sampled_counts
from gids.store import FeatureStore
from gids.store.names import NODE, RELATION
from gids.trace import Trace
from gids.trace.optimum import BatchList, Optimum
from gids.trace.replay import replay
from gids.write import DatasetWriter

SEEDS = 12  # of a minibatch, so that 1 % of the pages are about five minibatches


def compute_heats(
    indptr: np.ndarray, indices: np.ndarray, train: np.ndarray, args: argparse.Namespace
) -> dict[str, np.ndarray]:
    """A page's heat, by each method, for the sampling of `sample_trace` with other random draws."""
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        path = Path(directory) / "heat.gids"
        with DatasetWriter(path) as writer:
            writer.write_graph(RELATION, indptr, indices, num_src=len(indptr) - 1, index_dtype="int32")
        store = FeatureStore(path)

        def trial(minibatches: int) -> Mapping[str, np.ndarray]:
            options = {"batch_size": SEEDS, "batches": minibatches, "seed": 7}
            return sampled_counts(store, {NODE: train}, FANOUTS, **options)

        lengths = (50, 500) if args.small else (50, 500, 5000)
        methods: dict[str, Callable[[], Mapping[str, np.ndarray]]] = {
            "out-degree": lambda: {NODE: store.out_degrees()},
            "reverse-pagerank --damping 0.85": lambda: reverse_pagerank(store, {NODE: train}),
            "reverse-pagerank --fanouts 5,5,10": lambda: expected_visits(store, {NODE: train}, FANOUTS),
            "reverse-pagerank --fanouts 10,10,10": lambda: expected_visits(store, {NODE: train}, [10] * 3),
            **{f"sampled --batches {n}": partial(trial, n) for n in lengths},
        }
        heats = {"none": np.zeros(len(indptr) - 1, np.uint8)}
        for name, compute in methods.items():
            begun = time.perf_counter()
            values = compute()[NODE]
            print(f"{name} took {time.perf_counter() - begun:.2f} s", flush=True)
            heats[name] = page_heat(values, 1)
        return heats


def heat(args: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(1)
    log2_nodes, minibatches = (14, 200) if args.small else (20, 1200)
    nodes = 1 << log2_nodes
    indptr, indices = rmat(log2_nodes, 16, rng)
    has_in_edges = np.flatnonzero(np.diff(indptr))
    figures = {}
    for share in (1.0, 0.01):
        train = rng.permutation(has_in_edges)[: int(share * nodes)]
        trace = sample_trace(indptr, indices, rng, train=train, seeds=SEEDS, minibatches=minibatches)
        lines = int(5 * np.mean([len(b) for b in trace]))
        warm = minibatches // 4
        best = Optimum(BatchList(trace), nodes).hits(lines)[warm:].sum() / sum(len(b) for b in trace[warm:])
        print(f"seeds from {len(train)} nodes, {lines} lines = 5 minibatches: MIN {100 * best:.2f} %")
        for name, values in compute_heats(indptr, indices, train, args).items():
            found = []
            for policy, window in (("static", 0), ("lookahead", 16)):
                options = {"lines": lines, "policy": policy, "window": window, "planned": 2, "heat": values}
                found.append(replay(BatchList(trace), nodes, **options, seed=1, warm=warm).hit_ratio)
                assert found[-1] <= best, "no policy can beat MIN"
            shares = f"static {100 * found[0]:6.2f} %   lookahead W=16 {100 * found[1]:6.2f} %"
            print(f"{name:<36} {shares}", flush=True)
            figures[f"{100 * share:g} % of the nodes are seeds, {name}: static of MIN"] = found[0] / best
    return figures


def carry(args: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(3)
    log2_nodes = 14 if args.small else 20
    indptr, indices = rmat(log2_nodes, 16, rng)
    nodes = len(indptr) - 1
    shares = rng.random(nodes)
    expected = np.bincount(indices, np.repeat(shares, np.diff(indptr)), nodes)
    times = []
    for _ in range(args.repeat):
        visits = np.zeros(nodes)
        begun = time.perf_counter()
        assert _core.carry_to_sources(indptr, indices, shares, visits) is None
        times.append(time.perf_counter() - begun)
        assert np.allclose(visits, expected)
    return {
        f"{nodes} nodes, million edges carried per second (target 20)": len(indices) / median(times) / 1e6
    }


def hits(args: argparse.Namespace) -> dict[str, float]:
    if args.trace:
        return hits_of_trace(args.trace)
    rng = np.random.default_rng(1)
    log2_nodes, seeds, minibatches = (15, 4, 200) if args.small else (20, SEEDS, 1200)
    nodes = 1 << log2_nodes
    indptr, indices = rmat(log2_nodes, 16, rng)
    train = np.flatnonzero(np.diff(indptr))
    trace = sample_trace(indptr, indices, rng, train=train, seeds=seeds, minibatches=minibatches)
    heat = page_heat(np.bincount(indices, minlength=nodes), 1)
    lines = int(5 * np.mean([len(b) for b in trace])) if args.small else nodes // 100
    ratio, best = compare_with_min(trace, heat, lines)
    for policy in ("random", "lru", "static"):
        ratio(policy, 0)
    pin = ratio("window-pin", 8)
    for window in (16, 22):
        ratio("window-pin", window)
    by_window = [ratio("lookahead", w) for w in range(23)]
    assert best >= max(*by_window, pin), "no policy can beat MIN"
    return {
        "W=16 of MIN (target 0.87)": by_window[16] / best,
        "W=20 of MIN (target 0.90)": by_window[20] / best,
        "W=16 over window-pin W=8 (target 1.4)": by_window[16] / pin,
        "largest fall as W grows, points (target 0.5)": 100
        * max(np.maximum.accumulate(by_window) - by_window),
    }


def hits_of_trace(path: Path) -> dict[str, float]:
    """Compare window buffering with static pinning (the paper's Figure 11) on a trace of gids bench."""
    figures = {}
    with Trace(path) as found:
        trace, heat = [found.pages(batch) for batch in range(found.batch_count)], found.tables[0].heat
        assert heat is not None, "the trace has no heat"
        for minibatches in (2, 5, 10):
            lines = int(minibatches * np.mean([len(b) for b in trace]))
            ratio, _ = compare_with_min(trace, heat, lines)
            figures[f"{minibatches} minibatches, pinned"] = pinned_hits(trace, heat, lines)
            figures[f"{minibatches} minibatches, window-pin W=8"] = ratio("window-pin", 8)
            figures[f"{minibatches} minibatches, lookahead W=16"] = ratio("lookahead", 16)
    return figures


def pinned_hits(trace: list[np.ndarray], heat: np.ndarray, lines: int, share: float = 0.4) -> float:
    """The hit ratio if a share of the lines always holds the hottest pages and the rest evicts at random."""
    pinned = np.zeros(len(heat), bool)
    pinned[np.argsort(heat)[len(heat) - int(share * lines) :]] = True
    rest = BatchList([pages[~pinned[pages]] for pages in trace])
    warm = len(trace) // 4
    options = {"lines": lines - int(share * lines), "policy": "random", "window": 0, "planned": 2}
    found = replay(rest, len(heat), **options, seed=1, warm=warm)
    missed = (found.pages - found.hits).sum()
    return float(1 - missed / sum(len(pages) for pages in trace[warm:]))


def compare_with_min(
    trace: list[np.ndarray], heat: np.ndarray, lines: int
) -> tuple[Callable[[str, int], float], float]:
    """Return a function that prints and returns the hit ratio of (policy, window), and that of MIN."""
    warm = len(trace) // 4
    average, pages = np.mean([len(b) for b in trace]), sum(len(b) for b in trace[warm:])
    best = Optimum(BatchList(trace), len(heat)).hits(lines)[warm:].sum() / pages
    print(
        f"{len(heat)} pages, {len(trace)} minibatches of {average:.0f} pages, "
        f"{lines} lines = {lines / average:.1f} minibatches"
    )
    print(f"{'MIN':<24} {100 * best:6.2f} %")

    def ratio(policy: str, window: int) -> float:
        options = {"lines": lines, "policy": policy, "window": window, "planned": 2, "heat": heat}
        value = replay(BatchList(trace), len(heat), **options, seed=1, warm=warm).hit_ratio
        print(f"{policy + f' W={window}':<24} {100 * value:6.2f} %   {value / best:.3f} of MIN", flush=True)
        return value

    return ratio, best


def planning(args: argparse.Namespace) -> dict[str, float]:
    figures = {}
    most = 10**5 if args.small else args.most_lines
    for lines in (10**n for n in range(4, 10) if 10**n <= most):
        rng = np.random.default_rng(2)
        batch, minibatches, pages = min(lines // 5, 100_000), 60 if args.small else 160, 4 * lines
        trace = skewed_trace(pages, batch, minibatches, rng)
        heat = rng.integers(0, 256, pages, np.uint8)
        costs = []
        for _ in range(args.repeat):
            planner = _core.Planner(pages, lines, "lookahead", 0, heat)  # alone: it takes 52 B per line
            # Fill the cache first: planning is dearest when every admission evicts.
            step = 0
            for first in range(0, lines, batch):
                planner.enter(step, popular_pages(pages, np.arange(first, min(first + batch, lines))))
                planner.plan(step)
                planner.retire(step)
                step += 1
            times = []
            window, planned = 16, 2
            entered = step
            base = step
            for t in range(base, base + minibatches):
                start = time.perf_counter_ns()
                if t - base >= planned:
                    planner.retire(t - planned)
                while entered < min(base + minibatches, t + 1 + window):
                    planner.enter(entered, trace[entered - base])
                    entered += 1
                planner.plan(t)
                if t - base > window and entered < base + minibatches:
                    times.append((time.perf_counter_ns() - start) / len(trace[t - base]))
            costs.append(median(times))
            stats = planner.stats()
            del planner
        bar = "target 100" if lines <= 10**7 else "no target"
        figures[f"{lines} lines, ns per page ({bar})"] = median(costs)
        ratio = stats["hits"] / stats["pages"]
        print(
            f"{lines:>9} lines, {batch} pages a minibatch: {median(costs):6.1f} ns per page "
            f"(hit ratio {ratio:.2f})",
            flush=True,
        )
    return figures


def gather(args: argparse.Namespace) -> dict[str, float]:
    import torch

    def ids_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"_N.feat": ids}

    threads = torch.get_num_threads()
    figures = {}
    for row_bytes in (512, 4096):
        count = (8 << 20 if args.small else 1 << 30) // row_bytes
        batch = count // 8
        source = torch.randn(count, row_bytes // 4, generator=torch.Generator().manual_seed(0))
        batches = [torch.randperm(count)[:batch] for _ in range(4)]
        times: dict[str, list[float]] = {"plan + gather": [], "gather": [], "torch.index_select": []}
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            path = Path(directory) / "gather.gids"
            with DatasetWriter(path) as writer:
                writer.write_table("node", "_N", "feat", source)
            opened = gids.open(path, memory=8 << 30, window=2, threads=threads)
            with gids.FeatureLoader(opened, ["_N.feat"]) as loader:
                everything = list(torch.arange(count).split(batch))
                for ids, features in loader.attach(everything, ids_of):  # fills the cache
                    assert torch.equal(features["_N.feat"], source[ids])
                del features
                stats = loader.stats()
                out = torch.empty(batch, row_bytes // 4)
                for _ in range(args.repeat):
                    before = loader.stats()["seconds"]
                    start = time.perf_counter()
                    for ids, features in loader.attach(batches, ids_of):
                        last = ids, features["_N.feat"]
                    del features
                    times["plan + gather"].append(time.perf_counter() - start)
                    times["gather"].append(loader.stats()["seconds"]["gather"] - before["gather"])
                    assert torch.equal(last[1], source[last[0]])
                    del last
                    start = time.perf_counter()
                    for ids in batches:
                        torch.index_select(source, 0, ids, out=out)
                    times["torch.index_select"].append(time.perf_counter() - start)
                assert loader.stats()["misses"] == stats["misses"], "all were hits"
        for name, seconds in times.items():
            rate = 4 * batch / median(seconds) / 1e6
            print(f"{row_bytes:>5} B rows: {name:<20} {rate:6.2f} M rows/s", flush=True)
        for name, bar in (("plan + gather", 0.6), ("gather", 0.8)):
            ratio = median_ratio(times["torch.index_select"], times[name])
            figures[f"{row_bytes} B, {name} over index_select (target {bar})"] = ratio
    return figures


def main() -> None:
    parser = make_parser(__doc__, "dir", "repeat")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="hits: a trace of `gids bench hit-ratio --record`"
    )
    parser.add_argument("question", choices=["hits", "heat", "planning", "gather", "carry"])
    parser.add_argument(
        "--most-lines",
        type=int,
        default=10**7,
        help="planning: lines of the largest cache (default: 10000000; 100000000, "
        "0.4 TB of rows of 4 KiB, takes 6 GB of memory)",
    )
    args = parser.parse_args()
    questions = {"hits": hits, "heat": heat, "planning": planning, "gather": gather, "carry": carry}
    for name, value in questions[args.question](args).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
