"""What benchmarks share: alternating repeats, the device's own speed, JSON files.

Fresh processes, a cold page cache and memory limits are in gids.measure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

import gids.io
from gids.measure.machine import this_machine, versions

T = TypeVar("T")


def alternate(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every side once a round, in the other order every other round, so that drift falls on all alike."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(sides[name]())
    return results


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return median(a / b for a, b in zip(above, below, strict=True))


def random_pages_per_s(shard: Path, *, page_bytes: int, pages: int, depth: int = 256, seed: int = 0) -> float:
    """How many distinct random pages the device delivers in a second, cold, to the default engine alone.

    Pages are asked for in sorted batches, as minibatches do.
    """
    rng = np.random.default_rng(seed)
    total = shard.stat().st_size // page_bytes
    chosen = rng.permutation(total)[:pages]
    batch = 8192
    gids.io.drop_page_cache(shard)
    with gids.io.open_engine([shard], depth=depth, max_read_bytes=page_bytes) as engine:
        out = np.empty((batch, page_bytes), np.uint8)
        out[:] = 0
        begun = time.perf_counter()
        for first in range(0, len(chosen), batch):
            offsets = np.sort(chosen[first : first + batch]) * page_bytes
            errors = engine.read(np.zeros(len(offsets), np.uint32), offsets, page_bytes, out[: len(offsets)])
            assert not errors.any()
        return len(chosen) / (time.perf_counter() - begun)


@contextmanager
def read_ahead(path: Path, size_bytes: int) -> Iterator[None]:
    """Let the kernel read so much around a missing page of mapped files on path's disk; for root only.

    Without permission everything stays as it is: gids.measure.isolation.read_ahead_bytes tells.
    """
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        before = setting.read_text()
        setting.write_text(str(size_bytes >> 10))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        setting.write_text(before)


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write result, with the machine and the versions, to path if one is given."""
    if path:
        path.write_text(
            json.dumps({"machine": this_machine().as_json(), "versions": versions(), **result}, indent=2)
            + "\n"
        )
