"""How many pages does an epoch read with each order of rows, and what does writing the order cost?

    python bench/orders.py                # 2^19 nodes, rows of 64 float32, 16 per page
    python bench/orders.py --small

Four graphs with shuffled ids: three of `gids generate` (4,000 classes with 90 and 70 % of the edges within a
class, and the default of 16 classes), and R-MAT. Each is converted in every order in a fresh process, with
the source out of the page cache, and compared with the source. Minibatches of 128 seeds, fanouts 10, 10; the
trace for the trace order has other random draws. Baseline: the source's order, with the same minibatches.
Counts the pages that lookahead (W = 16) misses with a cache of 5 % of the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from convert import gids
from harness import make_parser, write_json
from traces import rmat

from gids import FeatureStore
from gids.cli import main as gids_here
from gids.convert.synthetic import GraphSpec, write_graph
from gids.io import drop_page_cache

DIM = 64
SAMPLING = ["--fanouts", "10,10", "--policies", "lookahead", "--windows", "16", "--cache", "5%", "--quiet"]


def write_rmat(folder: Path, log2_nodes: int) -> Path:
    rng = np.random.default_rng(0)
    indptr, indices = rmat(log2_nodes, 16, rng)
    nodes = 1 << log2_nodes
    folder.mkdir()
    np.save(folder / "indptr.npy", indptr)
    np.save(folder / "indices.npy", indices)
    np.save(folder / "train_idx.npy", np.sort(rng.permutation(nodes)[: nodes // 10]))
    np.save(folder / "feat.npy", rng.standard_normal((nodes, DIM), np.float32))
    return folder


def write_clustered(folder: Path, log2_nodes: int, classes: int, homophily: float) -> Path:
    nodes = 1 << log2_nodes
    spec = GraphSpec(nodes, dim=DIM, classes=classes, homophily=homophily, train_count=nodes // 10)
    return write_graph(folder, spec)


def convert(source: Path, path: Path, order: str) -> float:
    """Seconds of a cold conversion whose rows are right."""
    for file in source.iterdir():
        drop_page_cache(file)
    begun = time.perf_counter()
    gids("convert", source, path, "--quiet", "--order", order, "--page-bytes", "4096")
    seconds = time.perf_counter() - begun
    ids = np.random.default_rng(1).integers(0, np.load(source / "feat.npy", mmap_mode="r").shape[0], 2000)
    rows = FeatureStore(path).table("feat").read_rows(ids).numpy()
    assert np.array_equal(rows, np.load(source / "feat.npy", mmap_mode="r")[ids]), order
    return seconds


def pages_of_an_epoch(path: Path, sampling: list[str], report: Path) -> float:
    assert gids_here(["bench", "hit-ratio", str(path), *sampling, "--json", str(report)]) == 0
    (figure,) = (
        f for f in json.loads(report.read_text())["figures"] if f["setting"]["policy"] == "lookahead"
    )
    return float(figure["metrics"]["epoch_pages_read"]["median"])


def measure(name: str, source: Path, args: argparse.Namespace) -> dict[str, float]:
    folder = source.parent
    sampling = [*SAMPLING, "--batch-size", str(16 if args.small else 128), "--batches", str(args.batches)]
    trace, report = folder / "rows.trace", folder / "report.json"
    figures: dict[str, float] = {}
    first: tuple[float, float] | None = None
    for order in ("original", "degree", "community", f"trace:{trace}"):
        path = folder / "out.gids"
        seconds = convert(source, path, order)
        pages = pages_of_an_epoch(path, sampling, report)
        if first is None:
            first = pages, seconds
            recorded = [*sampling, "--rows", "--record", str(trace), "--seed", "7"]
            pages_of_an_epoch(path, recorded, report)
        short = order.partition(":")[0]
        print(
            f"{name}, {short}: {pages:,.0f} pages an epoch, {first[0] / pages:.2f} x fewer; "
            f"converted in {seconds:.1f} s, {seconds / first[1]:.2f} x",
            flush=True,
        )
        figures |= {f"{name} {short} pages": pages, f"{name} {short} convert_s": seconds}
        shutil.rmtree(path)
    return figures


def main() -> None:
    parser = make_parser(__doc__, "dir", "json")
    parser.add_argument("--graphs", nargs="+", metavar="NAME", help="run only these graphs")
    parser.add_argument("--batches", type=int, help="minibatches (default: 300)")
    args = parser.parse_args()
    args.batches = args.batches or (40 if args.small else 300)
    log2_nodes = 13 if args.small else 19
    graphs = {
        "4,000 classes, 90 %": lambda folder: write_clustered(folder, log2_nodes, 4000, 0.9),
        "4,000 classes, 70 %": lambda folder: write_clustered(folder, log2_nodes, 4000, 0.7),
        "16 classes": lambda folder: write_clustered(folder, log2_nodes, 16, 0.7),
        "R-MAT": lambda folder: write_rmat(folder, log2_nodes),
    }
    figures: dict[str, float] = {}
    for name, write in graphs.items():
        if name not in (args.graphs or (["R-MAT"] if args.small else graphs)):
            continue
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            figures |= measure(name, write(Path(folder) / "source"), args)
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
