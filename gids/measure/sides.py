"""One side of a comparison: what it is asked, what it measured, and how it is run.

``run_side`` runs epoch.py in a fresh process with a cold page cache and bounded memory. Called by the
quickstart and by benchmarks. Imports neither torch nor DGL, so that the caller stays small.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gids.io import drop_page_cache
from gids.measure.isolation import (
    FreshProcessError,
    FreshProcessOutOfMemory,
    FreshProcessTimeout,
    run_fresh,
)
from gids.measure.memory_group import MemoryGroup
from gids.sizes import format_bytes

_MODULE = "gids.measure.epoch"
_SPARE_BYTES = 256 << 20  # more headroom, where the measured one did not suffice


@dataclass(frozen=True)
class EpochConfig:
    """What one side does. Plain values only: it travels as JSON.

    side: "gids" or "stock". source: the directory of .npy files. dataset: what ``gids convert`` made of it.
    batches: minibatches to train on in each epoch. val_nodes: nodes of the split to validate on, over full
    neighbourhoods, from the dataset on both sides. memory_bytes: what both may use for features, page cache
    included; 0: any amount. headroom_bytes: what they may use besides, from the moment when features are
    opened, in addition to what they use already; 0: as much as a trial of training was measured to need.
    spare_bytes: to be added to either. gids_memory_bytes, window: the gids loader's. random_access: tell the
    kernel not to read ahead in stock's map (MADV_RANDOM). threads: OpenMP threads of the training process; 0:
    DGL's and torch's defaults. most_seconds: stop after the minibatch in which they have passed; 0: never.
    timeline: a file to write the training's Timeline to, or "".
    allow_dirs: where shards may lie outside the dataset. shards: which do. feature_key: the features' name in
    it. feature_file, feature_shape, feature_dtype: a file of plain rows for the source's feat.npy, such as
    the one shard of a table. plain_rows: whether there is one or the other; else only gids can run,
    and its rows are compared with those that the table gives.
    """

    side: str
    source: str
    dataset: str
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int
    batches: int
    val_nodes: int = 0
    epochs: int = 1
    workers: int = 0
    threads: int = 0
    seed: int = 0
    memory_bytes: int = 0
    headroom_bytes: int = 0
    spare_bytes: int = 0
    gids_memory_bytes: int | None = None
    window: int = 16
    random_access: bool = True
    most_seconds: float = 0
    learning_rate: float = 0.01
    timeline: str = ""
    allow_dirs: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    feature_key: str = "feat"
    feature_file: str = ""
    feature_shape: tuple[int, ...] = ()
    feature_dtype: str = "float32"
    plain_rows: bool = True


@dataclass
class EpochResult:
    """What one side measured. Seconds are of the wall clock unless named otherwise.

    stages: "sampling", "reading" (waiting for features; for stock, copying them too), "gather" (copying),
    "planning", "training". rows: feature rows handed to the model. read_bytes: from the device; None where
    the kernel does not tell. hit_ratio: of pages, in gids' cache or for stock in the page cache; None where
    nothing tells. train_accuracy: over the second half of the minibatches; None if it was stopped early.
    base_rss_bytes: before features were opened. peak_rss_bytes: the greatest after.
    memory_limit_bytes: of the whole process, of which headroom_bytes were for training itself. compared_rows,
    wrong_rows: rows compared with the source, and those of them that differ. cached_before: the share of
    the features in the page cache at the start. loader: the statistics of gids.
    """

    side: str
    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    batches: int
    rows: int
    read_bytes: int | None
    hit_ratio: float | None
    train_accuracy: float | None
    val_accuracy: float | None
    base_rss_bytes: int
    peak_rss_bytes: int
    memory_limit_bytes: int | None
    headroom_bytes: int | None
    compared_rows: int
    wrong_rows: int
    cached_before: float
    loader: dict[str, Any] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def run_side(
    config: EpochConfig,
    *,
    limited: bool = True,
    timeout_s: float = 3600,
    progress: Callable[[float], None] | None = None,
) -> EpochResult:
    """Run one side in a fresh process, its files not in the page cache, its memory bounded as config says.

    limited: False leaves memory unbounded, for where ``why_no_limit`` says that it cannot be bounded.
    progress(share done) is called as training goes. Blocks. Raises FreshProcessError, FreshProcessTimeout
    (after timeout_s), OSError. Where the page cache may not be emptied, cached_before tells.
    """
    for path in (config.source, config.dataset, *config.shards):
        with suppress(OSError):  # EpochResult.cached_before tells what stays
            drop_page_cache(path)
    values = asdict(config)
    if not limited:
        values["memory_bytes"] = 0
        return EpochResult(**run_fresh(_MODULE, values, timeout_s=timeout_s, progress=progress))
    with MemoryGroup("gids-quickstart") as group:
        return EpochResult(**run_fresh(_MODULE, values, group=group, timeout_s=timeout_s, progress=progress))


def run_gids(config: EpochConfig, *, say: Callable[[str], None], **options: Any) -> EpochResult:
    """run_side for the side of gids. Where memory does not suffice, once more with more headroom.

    say(sentence) is called then. options: those of run_side. The result's headroom_bytes is what the other
    sides should have, too. Raises FreshProcessError with what to do.
    """
    try:
        try:
            return run_side(config, **options)
        except FreshProcessOutOfMemory as error:
            say(f"gids {error.reason}; it runs again with {format_bytes(_SPARE_BYTES)} more")
            return run_side(replace(config, spare_bytes=config.spare_bytes + _SPARE_BYTES), **options)
    except FreshProcessOutOfMemory as error:
        cure = "give it more memory, smaller minibatches or fewer workers"
        raise FreshProcessError(f"gids {error.reason}: {cure}", error.reason) from error
    except FreshProcessTimeout as error:
        cure = "the disk may be very slow or busy; try fewer minibatches, or another disk"
        raise FreshProcessError(f"gids {error.reason}: {cure}", error.reason) from error


def run_other(name: str, config: EpochConfig, **options: Any) -> EpochResult | str:
    """run_side for a side that gids is compared with. A failure is no error, but returned as a sentence.

    options: those of run_side.
    """
    try:
        return run_side(config, **options)
    except FreshProcessError as error:
        return f"{name} {error.reason}"
    except OSError as error:  # no memory control group
        return f"{name} could not be started: {error.strerror or error}"


def why_no_limit() -> str:
    """Why ``run_side`` cannot bound memory here; empty when it can."""
    try:
        with MemoryGroup("gids-quickstart") as group:
            joined = subprocess.run(group.command(["true"]), capture_output=True).returncode == 0
            return "" if joined else "no right to join a memory control group"
    except OSError as error:
        return f"no memory control group: {error.strerror or error}"
