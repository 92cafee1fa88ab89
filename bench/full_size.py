"""An epoch at full size on a small machine: 111 million nodes, 1.6 billion edges, 28 GB of features.

    python bench/full_size.py --dir DIR                        # two hours, 60 GB of disk
    python bench/full_size.py --dir DIR --steps generate       # one step
    python bench/full_size.py --dir DIR --dtype float32        # 57 GB of features
    python bench/full_size.py --dir DIR --typed                # papers and authors, five relations, 37 GB
    python bench/full_size.py --dir DIR --small

The shape is that of ogbn-papers100M; with --typed, that of MAG240M at a tenth. DIR keeps the dataset and the
result of each step: a step whose result is there is not repeated, unless an option of it changed. Each step
is a fresh process with a cold page cache.

* generate: write the dataset, as `gids generate` does.
* random, pack: 100 minibatches by reads="random", and by reads="pack". The first opens the dataset.
* epoch: by reads="auto": whole, if by the other steps it should take less than --epoch-minutes; else 300
  minibatches, and seconds are those of 300, times the share. --hidden trains GraphSAGE.
* torch: the mapped features with MADV_RANDOM, indexed by the minibatches of gids' sampler. dgl: DGL's loader
  and sampler with the mapped features, and the graph in memory. Both stop after --peer-seconds, and are
  limited to the memory of gids, 2 GB for sampling and outputs, and the mapped topology.

1 row in 1,000 of all minibatches is compared with the formula from which it was written. Memory is that of
the process without mapped files, which is where the topology is, beyond what it was before the features were
opened. The limit of any loader is the greater of the time that the disk needs for the reads and writes of the
epoch, and the CPU time divided by the cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import full_size_side
from harness import Figures, Script, device_seconds, run_limited

from gids.bench.isolation import FreshProcessError
from gids.convert.synthetic import GraphSpec
from gids.loader.stats import describe_choices
from gids.store import FeatureStore

SIZES = {  # by --typed
    False: {"nodes": 111_000_000, "edges": 1_600_000_000, "dim": 128, "seeds": 1_200_000},
    True: {"nodes": 16_000_000, "edges": 346_000_000, "dim": 768, "seeds": 111_000},
}
SMALL = {"nodes": 3000, "edges": 20_000, "dim": 256, "seeds": 100}
PEERS = {"torch": "torch on a map, MADV_RANDOM", "dgl": "DGL on a map, MADV_RANDOM"}
STEPS = ["generate", "random", "pack", "epoch", *PEERS]
FEW, PART = 100, 300  # minibatches: of a step, and of an epoch that would be too long
ALLOWANCE_MB = 300  # what a process may take beyond what stats()["memory"] lists
_START_S = 1800  # a peer may take so long beside its minibatches: DGL's graph
_LOADING = ("fanouts", "batch_size", "memory", "scratch_bytes")


class Steps:
    """Takes the steps that args ask for. results: by name; a file keeps them for later runs."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self._path, self._asked, self._small = path, args.steps, args.small
        self._kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    @property
    def results(self) -> dict[str, Any]:
        return {name: kept["result"] for name, kept in self._kept.items()}

    def take(self, config: Mapping[str, Any]) -> None:
        """Take the step, if it was asked for and has no result with this configuration."""
        name = config["side"]
        if name not in self._asked or self._kept.get(name, {}).get("config") == config:
            return
        print(f"{name} …", flush=True)
        try:
            if self._small:  # a fresh process takes seconds to start
                result = full_size_side.run({**config, "limited": False})
            else:
                timeout_s = 2 * config["most_seconds"] + _START_S if config["most_seconds"] else None
                result = run_limited("full_size_side", config, timeout_s=timeout_s)
        except FreshProcessError as error:
            print(f"{name} {error.reason}", flush=True)
            return
        self._kept[name] = json.loads(json.dumps({"config": config, "result": result}))
        self._path.write_text(json.dumps(self._kept))


def report_epoch(args: argparse.Namespace, figures: Figures, run: Mapping[str, Any], folder: Path) -> None:
    batches, whole, store = run["batches"], batches_of(args), FeatureStore(folder / "graph.gids")
    note = (
        "measured" if batches == whole else f"{run['seconds']:,.0f} s for {batches} of {whole:,} minibatches"
    )
    figures.add("epoch", run["seconds"] * whole / batches, "s", note=note)
    print(f"gids read {describe_choices(run['loader']['packs']['choices']) or 'at random'}")
    note = f"{run['loader']['bytes_read'] / 1e9:,.1f} of features"
    figures.add(f"read in {batches:,} minibatches", (run["read_bytes"] or 0) / 1e9, "GB", note=note)
    figures.add(f"written in {batches:,} minibatches", run["written_bytes"] / 1e9, "GB")
    table = max(store.tables.values(), key=lambda t: t.row_count * t.row_bytes)
    device_s = device_seconds(table, run["loader"], 0.2 if args.small else 5)
    cpu_s = run["cpu_s"] / (os.cpu_count() or 1)
    note = f"device {device_s:,.1f} s, CPU {cpu_s:,.1f} s"
    ratio = run["seconds"] / max(device_s, cpu_s)
    figures.add("epoch over max(device time, CPU time / cores)", ratio, "x", most=1.4, note=note)


def report(args: argparse.Namespace, figures: Figures, results: dict[str, Any], folder: Path) -> int:
    """Add the figures of the steps that were taken. Returns the number of wrong rows."""
    if made := results.pop("generate", None):
        size, edges = made["feature_bytes"], made["edges"]
        figures.add("generation", made["seconds"], "s", note=f"{size / 1e9:,.1f} GB, {edges:,} edges")
        figures.add("features written", size / made["features_s"] / 1e9, "GB/s", bar=0.5)
        figures.add("edges written", edges / made["edges_s"] / 1e6, "million/s", bar=4)
        figures.add("peak memory of the generation", made["peak_bytes"] / 1e9, "GB", most=4)
    for name, run in results.items():
        rate, note = run["rows"] / run["seconds"], f"{run['batches']:,} minibatches"
        figures.add(f"{PEERS.get(name, name)}: rows", rate, "rows/s", note=note)
        if name in PEERS:
            ours = "pack" if args.hidden else "epoch"  # which does not train either
            if ours in results:
                ratio = results[ours]["rows"] / results[ours]["seconds"] / rate
                figures.add(f"{ours} over {PEERS[name]}", ratio, "x")
            continue
        figures.add(f"{name}: {run['batches']:,} minibatches", run["seconds"], "s")
        figures.add(f"{name}: opening", run["open_s"], "s")
        figures.add(f"{name}: first minibatch", run["first_s"], "s")
        beyond = max(0, run["grown"] - run["listed"]) / 1e6
        note = f"grew by {run['grown'] / 1e6:,.0f} MB, {run['listed'] / 1e6:,.0f} MB are listed"
        name = f"{name}: memory beyond stats()['memory']"
        figures.add(name, beyond, "MB", most=ALLOWANCE_MB, note=note)
    if "epoch" in results:
        report_epoch(args, figures, results["epoch"], folder)
    wrong, compared = (sum(run[key] for run in results.values()) for key in ("wrong", "compared"))
    figures.add("rows that differ from the formula", wrong, "", most=0, note=f"{compared:,} compared")
    cached = max((run["cached"] for run in results.values()), default=0.0)
    print(f"features in the page cache at a start: {cached:.2%} at most")
    return int(wrong)


def batches_of(args: argparse.Namespace) -> int:
    """Of the epoch."""
    return -(-args.seeds // args.batch_size)


def full_size(args: argparse.Namespace, figures: Figures) -> int:
    for name, value in (SMALL if args.small else SIZES[args.typed]).items():
        setattr(args, name, getattr(args, name) or value)
    if args.typed and args.hidden:
        raise SystemExit("--hidden trains on one node type: leave --typed out")
    degree, numbers = args.edges / args.nodes, {"train_count": args.seeds, "seed": args.seed}
    spec = GraphSpec(args.nodes, degree, args.dim, dtype=args.dtype, **numbers)
    folder = args.dir / f"gids-full-size-{'typed-' * args.typed}{args.dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    steps, whole = Steps(folder / "steps.json", args), batches_of(args)
    dataset = {"dataset": str(folder / "graph.gids"), "typed": args.typed, "spec": asdict(spec)}
    loading = {**dataset, **{name: getattr(args, name) for name in _LOADING}, "hidden": 0, "most_seconds": 0}
    try:
        steps.take({**dataset, "side": "generate", "most_seconds": 0})
        for way in ("random", "pack"):
            steps.take({**loading, "side": way, "reads": way, "batches": min(FEW, whole)})
        tried = [steps.results[way] for way in ("random", "pack") if way in steps.results]
        least_s = min((whole * run["seconds"] / run["batches"] for run in tried), default=math.inf)
        batches = whole if least_s < 60 * args.epoch_minutes else min(PART, whole)
        epoch = {"side": "epoch", "reads": "auto", "batches": batches, "hidden": args.hidden}
        steps.take({**loading, **epoch})
        for peer in PEERS:
            steps.take({**loading, "side": peer, "batches": whole, "most_seconds": args.peer_seconds})
        return int(report(args, figures, steps.results, folder) > 0)
    finally:
        if args.small:
            shutil.rmtree(folder)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "seed")
    option = script.option
    option("steps", STEPS, choices=STEPS)
    option("typed", text="two node types and five relations", action="store_true")
    option("dtype", "float16", choices=["float16", "float32"])
    for name, value in SIZES[False].items():
        option(name, text=f"(default: {value}; --typed: {SIZES[True][name]})", type=int)
    option("batch-size", 1024, small=16)
    option("fanouts", [15, 10, 5], small=[4, 3])
    option("memory", "8GB", "of gids, and of the peers", small="64MB")
    option("scratch-bytes", "20GB", "of packs")
    option("hidden", 0, "hidden units of GraphSAGE in the epoch (default: 0, no training)")
    option("epoch-minutes", 40, "a longer epoch is not taken whole")
    option("peer-seconds", 300, "of a peer", small=1)
    script.run(full_size)
