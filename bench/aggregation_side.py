"""One side of bench/aggregation.py, in its own process: gathers random cold rows for some seconds."""

from __future__ import annotations

import mmap
import sys
import time
from typing import Any

import numpy as np
import torch

import gids
from gids.measure.counters import resident_bytes
from gids.measure.isolation import serve
from gids.measure.memory_group import limit_own_memory

SMALLEST_BYTES = 256 << 20


def gids_side(config: dict[str, Any], minibatches: list[torch.Tensor]) -> dict[str, float]:
    with gids.FeatureLoader(
        gids.open(config["dataset"], heat="none", threads=config["threads"], tuning=gids.Tuning(cache=0)),
        ["_N.feat"],
    ) as loader:
        stream = loader.attach(minibatches, lambda ids: {"_N.feat": ids})
        return measure(((ids, features["_N.feat"]) for ids, features in stream), config["seconds"])


def mapped_side(config: dict[str, Any], minibatches: list[torch.Tensor]) -> dict[str, float]:
    with open(config["shard"], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    if config["advised"]:
        mapped.madvise(mmap.MADV_RANDOM)
    features = torch.from_numpy(np.frombuffer(mapped, np.float32).reshape(-1, config["dim"]))
    return measure(((ids, features[ids]) for ids in minibatches), config["seconds"])


def measure(stream: Any, seconds: float) -> dict[str, float]:
    """Return rows per second and CPU seconds per row. Every row is checked, outside the measured time."""
    rows = checking = checking_cpu = 0.0
    begun, cpu_begun = time.perf_counter(), time.process_time()
    for ids, features in stream:
        paused, cpu_paused = time.perf_counter(), time.process_time()
        check(ids, features)
        rows += len(ids)
        checking += time.perf_counter() - paused
        checking_cpu += time.process_time() - cpu_paused
        if time.perf_counter() - begun - checking > seconds:
            break
    elapsed = time.perf_counter() - begun - checking
    cpu = time.process_time() - cpu_begun - checking_cpu
    return {"rows_per_s": rows / elapsed, "cpu_s_per_row": cpu / rows}


def check(ids: torch.Tensor, features: torch.Tensor) -> None:
    """Row i must hold i everywhere."""
    if not torch.equal(features, ids[:, None].float().expand_as(features)):
        raise AssertionError("a row differs from the source")


def work(config: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(config["threads"])
    if config["limited"]:
        file_bytes = config["rows"] * config["dim"] * 4
        limit_own_memory(resident_bytes("VmRSS") + max(SMALLEST_BYTES, file_bytes // 4))
    order = np.random.default_rng(config["seed"]).permutation(config["rows"])  # each row once: all are cold
    minibatches = list(torch.from_numpy(order).split(config["batch"]))
    return (gids_side if config["side"] == "gids" else mapped_side)(config, minibatches)


if __name__ == "__main__":
    sys.exit(serve(work))
