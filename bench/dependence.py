"""How many reads do dependent minibatches and locality-aware sampling save, at what cost in accuracy?

    python bench/dependence.py           # 300,000 nodes with a page of 512 B each; half an hour
    python bench/dependence.py --small   # seconds; only shows that it works

The graph is made by `gids generate`: a single row is not enough to predict the class, a neighborhood is.
GraphSAGE with two layers is trained with each sampler, several times with other seeds. Reads are those of a
gids.NodeLoader with a cache of a twentieth of the features, in the last epoch. Accuracy is measured on test
nodes with the same sampling for all. Some rows are compared with the source.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from harness import make_parser
from sage import GraphSage

import gids
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.heat import hottest_nodes
from gids.sampler import Labor, LocalityBias, Minibatch, Neighbor, Sampler
from gids.store import FeatureStore

FANOUTS = [10, 10]


@dataclass(frozen=True)
class Run:
    """accuracy: on the test nodes. missed: pages read in the last epoch. pages: asked for in it."""

    accuracy: float
    missed: int
    pages: int


def make_dataset(folder: Path, spec: GraphSpec) -> FeatureStore:
    write_graph(folder / "g", spec)
    gids_command(["convert", str(folder / "g"), str(folder / "g.gids"), "--page-bytes", "512", "--quiet"])
    return FeatureStore(folder / "g.gids")


def train(
    store: FeatureStore,
    sampler: Sampler,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    cache_bytes: int,
    policy: str = "lookahead",
    hidden: int = 32,
) -> Run:
    """Train a new model with minibatches of this sampler, and test it."""
    (table,), (splits,), (labels,) = store.tables, store.splits.values(), store.labels.values()
    torch.manual_seed(seed)
    model = GraphSage([store.table(table).shape[0], hidden, int(labels.max()) + 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "seed": seed}
    source = gids.open(store, memory=2 << 30, tuning=gids.Tuning(cache=cache_bytes, policy=policy))

    def logits(minibatch: Minibatch) -> Tensor:
        return model(minibatch.blocks, minibatch.features[table])  # type: ignore[no-any-return, arg-type]

    with gids.NodeLoader(source, splits["train"], sampler, **options) as loader:
        for _ in range(epochs):
            before = loader.stats()
            for minibatch in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits(minibatch), minibatch.labels).backward()  # type: ignore[arg-type]
                optimizer.step()
            after = loader.stats()
        few = minibatch.input_nodes[:64]  # type: ignore[index]
        assert torch.equal(minibatch.features[table][:64], store.read_rows(few, table))
    right = []
    with (
        torch.no_grad(),
        gids.NodeLoader(source, splits["test"], Neighbor(FANOUTS), batch_size=256, seed=seed) as test,
    ):
        for minibatch in test:
            right.append(logits(minibatch).argmax(1) == minibatch.labels)
    misses, pages = (after.get(k, 0) - before.get(k, 0) for k in ("misses", "pages"))
    return Run(float(torch.cat(right).float().mean()), misses, pages)


def samplers(store: FeatureStore, cache_bytes: int, threads: int | None) -> dict[str, Callable[[], Sampler]]:
    """Name in the table -> factory."""
    (table,) = store.tables
    held = hottest_nodes(store, table, cache_bytes)
    made: dict[str, Callable[[], Sampler]] = {}
    for name, kind in (("Neighbor", Neighbor), ("Labor", Labor)):
        made[name] = lambda kind=kind: kind(FANOUTS, threads=threads)
        for kappa in (16, 256):
            for nested in (False, True):
                label = f"{name}, κ = {kappa}{', nested' if nested else ''}"
                made[label] = lambda kind=kind, kappa=kappa, nested=nested: kind(
                    FANOUTS, batch_dependency=kappa, nested=nested, threads=threads
                )
    for factor in (2, 4, 16):
        made[f"Neighbor, locality {factor}"] = lambda factor=factor: Neighbor(
            FANOUTS, locality=LocalityBias(held, factor), threads=threads
        )
    return made


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--policy", default="lookahead")
    parser.add_argument("--cache", type=float, default=0.05, help="share of the features (default: 0.05)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only samplers whose name contains TEXT"
    )
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.small:
        args.nodes, args.seeds, args.epochs, args.runs = 2000, 64, 1, 1
    spec = GraphSpec(
        args.nodes,
        dim=args.dim,
        classes=16,
        train_count=args.seeds,
        val_count=0,
        test_count=args.seeds // 2,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = make_dataset(Path(folder), spec)
        cache_bytes = int(spec.feature_bytes * args.cache)
        print(f"{'sampler':28} {'accuracy':>16} {'pages read':>12} {'of Neighbor':>12} {'hits':>7}")
        least = 0.0
        for name, make in samplers(store, cache_bytes, args.threads).items():
            if args.only not in name:
                continue
            runs = [
                train(
                    store,
                    make(),
                    epochs=args.epochs,
                    batch_size=args.batch_size,
                    seed=seed,
                    cache_bytes=cache_bytes,
                    policy=args.policy,
                )
                for seed in range(args.runs)
            ]
            accuracies = [run.accuracy for run in runs]
            spread = stdev(accuracies) if len(runs) > 1 else math.nan
            missed = mean(run.missed for run in runs)
            least = least or missed
            hits = 1 - missed / mean(run.pages for run in runs)
            print(
                f"{name:28} {mean(accuracies):8.4f} ± {spread:.4f} {missed:12.0f} {missed / least:12.3f} "
                f"{hits:7.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
