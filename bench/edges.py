"""How much memory and time does sorting a graph's edges need, and what would 10^9 edges need?

    python bench/edges.py              # 5, 10, 20 and 50 million edges, 256 MB
    python bench/edges.py --small

Each size is converted in a fresh process from an edge_index.npy with power-law degrees, with the source out
of the page cache, and is verified. --options are options of `gids convert`. Prints time, CPU time and peak
memory per size. The last line extrapolates the time linearly from the largest size; memory is bounded.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from convert import gids
from harness import make_parser, write_json

from gids.io import drop_page_cache

PIECE = 1 << 20
DEGREE = 16


def write_source(folder: Path, edge_count: int) -> None:
    """edge_index.npy, int64[2, edge_count], and num_nodes.npy; written in pieces."""
    folder.mkdir()
    node_count = max(1, edge_count // DEGREE)
    np.save(folder / "num_nodes.npy", np.array(node_count))
    edges = np.lib.format.open_memmap(folder / "edge_index.npy", "w+", np.int64, (2, edge_count))
    rng = np.random.default_rng(0)
    for row, power in ((0, 3), (1, 2)):
        for first in range(0, edge_count, PIECE):
            count = min(PIECE, edge_count - first)
            edges[row, first : first + count] = rng.random(count) ** power * node_count
    edges.flush()


def main() -> None:
    parser = make_parser(__doc__, "dir", "json")
    parser.add_argument("--edges", type=float, nargs="+", default=[5e6, 1e7, 2e7, 5e7])
    parser.add_argument("--memory", default="256MB")
    parser.add_argument("--workers", default="2")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="OPTION",
        help="options of gids convert without dashes, such as dedup",
    )
    args = parser.parse_args()
    found = []
    for edge_count in [2e5, 4e5] if args.small else args.edges:
        count = int(edge_count)
        with tempfile.TemporaryDirectory(dir=args.dir) as name:
            source, dataset = Path(name) / "source", Path(name) / "out.gids"
            write_source(source, count)
            drop_page_cache(source / "edge_index.npy")
            begun = time.perf_counter()
            options = ["--memory", args.memory, "--workers", args.workers, *(f"--{o}" for o in args.options)]
            peak_bytes, _ = gids("convert", source, dataset, "--quiet", *options)
            seconds = time.perf_counter() - begun
            gids("verify", dataset, "--quiet")
            shutil.rmtree(dataset)
        found.append({"edges": count, "seconds": seconds, "peak_bytes": peak_bytes})
        rate = count / seconds / 1e6
        print(f"{count:>12,} edges  {seconds:6.1f} s  {rate:5.1f} M edges/s  peak {peak_bytes / 1e6:.0f} MB")
    last = found[-1]
    minutes = last["seconds"] / last["edges"] * 1e9 / 60
    print(
        f"10^9 edges, extrapolated: {minutes:.0f} minutes with --memory {args.memory}, the same peak; "
        "beside the source's 16 GB, 16 GB of dataset (8 without edge ids) and 25 GB of scratch files"
    )
    write_json(args.json, {"runs": found, "memory": args.memory, "options": args.options})


if __name__ == "__main__":
    main()
