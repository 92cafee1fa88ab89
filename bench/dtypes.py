"""How much do tables with fewer bits save, and how much accuracy do they cost?

    python bench/dtypes.py training   accuracy, and bytes read per epoch, by storage type
    python bench/dtypes.py gather     rows per second from the cache, compared with rows stored as float32

Baseline: the same features stored as float32. Training: GraphSAGE on the graph of `gids generate`. Every
storage type has the same minibatches, model and initial weights; repeats with other random numbers show the
noise. Gather: all pages are in the cache; the output is float32 and is compared with Table.read_rows.
The tests use `--small`; docs/performance-conversion.md has the default sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import make_parser
from sage import GraphSage

import gids
from gids import FeatureLoader, FeatureStore, NodeLoader
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.write import DatasetWriter

KINDS: dict[str, list[str]] = {
    "float32": [],
    "float16": ["--dtype", "float16"],
    "bfloat16": ["--dtype", "bfloat16"],
    "int8 per row": ["--dtype", "int8"],
    "int8 per column": ["--dtype", "int8", "--scale", "column"],
}
TABLE = "_N.feat"


def training(args: argparse.Namespace) -> dict[str, float]:
    if args.small:
        torch.set_num_threads(1)  # layers this small take longer by several
    nodes, dim, epochs, starts = (2000, 32, 1, 2) if args.small else (40_000, 256, 2, 3)
    spec = GraphSpec(nodes, dim=dim, classes=8, train_count=nodes // 5, val_count=nodes // 10)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        source = write_graph(Path(directory) / "graph", spec)
        wide: list[float] = []
        for kind, options in KINDS.items():
            path = Path(directory) / "graph.gids"
            convert = ["convert", str(source), str(path), "--overwrite", "--quiet", *options]
            convert += ["--page-bytes", "4096"]  # the same pages for all types
            verify = ["verify", str(path), "--against", str(source), "--quiet"]
            if gids_command(convert) or gids_command(verify):
                raise SystemExit("the conversion failed")
            store = FeatureStore(path)
            runs = [train(store, epochs=epochs, seed=seed) for seed in range(starts)]
            accuracies = [accuracy for accuracy, _ in runs]
            wide = wide or accuracies
            read = runs[0][1]
            apart = 100 * mean(a - w for a, w in zip(accuracies, wide, strict=True))
            print(
                f"{kind:<16} {store.table(TABLE).row_bytes:>5} B rows: "
                f"accuracy {100 * mean(accuracies):.2f} % +- {100 * stdev(accuracies):.2f}, "
                f"{apart:+.2f} from float32; {read / 1e6:.1f} MB read in the first epoch",
                flush=True,
            )
            figures[f"{kind}, points of accuracy above float32"] = apart
            figures[f"{kind}, MB read in an epoch"] = read / 1e6
        figures["float32, spread of starts, points"] = 100 * stdev(wide)
    return figures


def train(store: FeatureStore, *, epochs: int, seed: int) -> tuple[float, int]:
    """(accuracy on the validation nodes, bytes read in the first epoch)."""
    torch.manual_seed(seed)
    table = store.table(TABLE)
    splits = store.splits["_N"]
    model = GraphSage([table.shape[0], 64, 8])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    # A twentieth of the features as float32, whatever they are stored as.
    cache_bytes = table.row_count * table.shape[0] * 4 // 20
    source = gids.open(store, memory=1 << 30, tuning=gids.Tuning(cache=cache_bytes))
    options = {"seed": seed, "dtype": torch.float32}
    first = 0
    with NodeLoader(source, splits["train"], [10, 5], batch_size=256, shuffle=True, **options) as loader:
        for _ in range(epochs):
            for minibatch in loader:
                optimizer.zero_grad()
                out = model(minibatch.blocks, minibatch.features[TABLE])
                torch.nn.functional.cross_entropy(out, minibatch.labels).backward()
                optimizer.step()
            first = first or loader.stats()["bytes_read"]
    right = 0
    with NodeLoader(source, splits["val"], [10, 5], batch_size=512, **options) as loader, torch.no_grad():
        for minibatch in loader:
            out = model(minibatch.blocks, minibatch.features[TABLE])
            right += int((out.argmax(1) == minibatch.labels).sum())
    return right / len(splits["val"]), first


def gather(args: argparse.Namespace) -> dict[str, float]:
    figures = {}
    threads = torch.get_num_threads()
    for dim in (128, 1024):
        count = (2 << 20 if args.small else 256 << 20) // (4 * dim)
        batch = count // 8
        source = torch.randn(count, dim, generator=torch.Generator().manual_seed(0))
        batches = [torch.randperm(count)[:batch] for _ in range(4)]
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            loaders = {}
            for kind, options in KINDS.items():
                path = Path(directory) / f"{len(loaders)}.gids"
                dtype = getattr(torch, options[1]) if options else None
                scale = None if dtype != torch.int8 else "column" if "column" in options else "row"
                with DatasetWriter(path) as writer:
                    writer.write_table("node", "_N", "feat", source, dtype=dtype, scale=scale)
                loaders[kind] = FeatureLoader(
                    gids.open(path, memory=4 << 30, window=2, threads=threads),
                    [TABLE],
                    dtype=torch.float32,
                )
                fill(loaders[kind], torch.arange(count).split(batch))
            for _ in range(args.repeat):
                for kind, loader in loaders.items():  # in turns
                    seconds[kind].append(gather_seconds(loader, batches))
            for loader in loaders.values():
                loader.close()
        wide = seconds["float32"]
        for kind, times in seconds.items():
            rate = len(batches) * batch / median(times) / 1e6
            ratio = median(w / t for w, t in zip(wide, times, strict=True))
            print(f"{dim} values, {kind:<16} {rate:6.2f} M rows/s, {ratio:.2f} of float32", flush=True)
            figures[f"{dim} values, {kind}: gather over that of float32"] = ratio
    return figures


def fill(loader: FeatureLoader, everything: Sequence[torch.Tensor]) -> None:
    """Read every page into the cache, and compare the rows."""
    table = loader.tables[0]
    for ids, features in loader.attach(everything, lambda ids: {TABLE: ids}):
        assert torch.equal(features[TABLE], table.read_rows(ids).float()), "rows differ from the stored ones"


def gather_seconds(loader: FeatureLoader, batches: Sequence[torch.Tensor]) -> float:
    before = loader.stats()
    for _, features in loader.attach(batches, lambda ids: {TABLE: ids}):
        del features
    stats = loader.stats()
    assert stats["misses"] == before["misses"], "all were hits"
    return float(stats["seconds"]["gather"] - before["seconds"]["gather"])


def main() -> None:
    parser = make_parser(__doc__, "dir", "repeat")
    parser.add_argument("question", choices=["training", "gather"])
    args = parser.parse_args()
    begun = time.perf_counter()
    for name, value in {"training": training, "gather": gather}[args.question](args).items():
        print(f"{name}: {value:.3f}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
