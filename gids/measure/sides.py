"""The sides of a comparison: the configuration and result of one, how to run it, and a Comparison of several.

``run_side`` runs epoch.py in a fresh process with a cold page cache and bounded memory. Called by `gids
bench epoch` and the scripts in bench/. Imports neither torch nor DGL, so that the caller needs little memory.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gids.io import drop_page_cache
from gids.measure.isolation import (
    FreshProcessError,
    FreshProcessOutOfMemory,
    FreshProcessTimeout,
    MemoryGroup,
    run_fresh,
)
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.loader.options import Reads

_MODULE = "gids.measure.epoch"
_CURES: dict[type[FreshProcessError], str] = {
    FreshProcessOutOfMemory: "give it more memory, or smaller minibatches",
    FreshProcessTimeout: "the disk may be very slow or busy; try fewer minibatches, or another disk",
}
_SPARE_BYTES = 256 << 20  # added to the headroom if the measured one is too small


@dataclass(frozen=True)
class EpochConfig:
    """The configuration of one side. It is sent as JSON, so it has plain values only.

    side: "gids" or "stock". dataset: with labels and a train split of target, by default the first node type.
    tables: names of the tables of features, one for each node type at most; stock maps each. batches:
    minibatches to train on. memory_bytes: memory for features, page cache included; 0: no limit.
    headroom_bytes: memory for everything else from the opening of the features on, besides what is in use
    then; 0: as much as a trial training needs. spare_bytes: added to the headroom. gids_memory_bytes, window,
    reads, scratch: for gids.open(); (): its default. random_access: map stock's
    features with MADV_RANDOM, without read-ahead. most_seconds: stop after the minibatch in which they have
    passed; 0: no limit. allow_dirs, shards: the allowed directories and the shards outside the dataset.
    """

    side: str
    dataset: str
    tables: tuple[str, ...]
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int
    batches: int
    target: str = ""
    seed: int = 0
    memory_bytes: int = 0
    headroom_bytes: int = 0
    spare_bytes: int = 0
    gids_memory_bytes: int | None = None
    window: int = 16
    reads: Reads = "auto"
    scratch: tuple[str, ...] = ()
    random_access: bool = True
    most_seconds: float = 0
    allow_dirs: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()


@dataclass
class EpochResult:
    """The result of one side. Seconds are wall-clock time, except cpu_seconds.

    stages: seconds of "sampling", "reading" (waiting for features; for stock also copying them), "gather"
    (copying), "planning", "training". rows: feature rows that the model got. read_bytes: from the device;
    None if the kernel does not report it. hit_ratio: of pages, in gids' cache, or in the page cache for
    stock; None if unknown.
    base_rss_bytes: before the features were opened. peak_rss_bytes: the peak after that. memory_limit_bytes:
    of the process, including headroom_bytes. compared_rows, wrong_rows: rows compared with the dataset, and
    rows that differ. cached_before: the share of the features in the page cache at the start. loader:
    FeatureLoader.stats() of gids.
    """

    side: str
    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    batches: int
    rows: int
    read_bytes: int | None
    hit_ratio: float | None
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

    @property
    def written_bytes(self) -> int | None:
        """Bytes that gids wrote to scratch; None for the other sides."""
        return self.loader["packs"]["bytes_written"] if self.loader else None

    @property
    def choices(self) -> list[dict[str, Any]]:
        """stats()["packs"]["choices"] of gids; empty if only random reads were considered."""
        return list(self.loader["packs"]["choices"]) if self.loader else []


def run_side(
    config: EpochConfig,
    *,
    limited: bool = True,
    timeout_s: float = 3600,
) -> EpochResult:
    """Run one side in a fresh process, with its files dropped from the page cache and with bounded memory.

    limited: False does not limit memory, for systems where ``why_no_limit`` returns a reason. Blocks. Raises
    FreshProcessError, FreshProcessTimeout (after timeout_s), OSError. cached_before shows if the page cache
    could not be emptied.
    """
    for path in (config.dataset, *config.shards):
        with suppress(OSError):  # EpochResult.cached_before shows the rest
            drop_page_cache(path)
    values = asdict(config if limited else replace(config, memory_bytes=0))
    with MemoryGroup("gids-bench") if limited else nullcontext() as group:
        return EpochResult(**run_fresh(_MODULE, values, group=group, timeout_s=timeout_s))


class Comparison:
    """Runs sides one after the other, all with the headroom that the first one measured.

    Only gids must succeed. limited: whether memory is limited. say(sentence) is called if gids runs again
    with more headroom, and with the failure of another side.
    """

    def __init__(self, *, limited: bool, say: Callable[[str], None]) -> None:
        self.headroom_bytes = 0
        self._limited, self._say = limited, say

    def run(self, name: str, config: EpochConfig, *, timeout_s: float = 3600) -> EpochResult | None:
        """Run a side; gids that runs out of memory, twice. Returns None if another side failed. Blocks.

        Raises FreshProcessError with advice if gids fails.
        """
        config = replace(config, headroom_bytes=self.headroom_bytes)
        ours, run = config.side == "gids", partial(run_side, limited=self._limited, timeout_s=timeout_s)
        try:
            try:
                result = run(config)
            except FreshProcessOutOfMemory as error:
                if not ours:
                    raise
                self._say(f"gids {error.reason}; it runs again with {format_bytes(_SPARE_BYTES)} more")
                result = run(replace(config, spare_bytes=config.spare_bytes + _SPARE_BYTES))
        except FreshProcessError as error:
            if not ours:
                self._say(f"`{name}` {error.reason}")
                return None
            if cure := _CURES.get(type(error)):
                raise FreshProcessError(f"gids {error.reason}: {cure}", error.reason) from error
            raise
        except OSError as error:  # no memory control group
            if ours:
                raise
            self._say(f"`{name}` could not be started: {error.strerror or error}")
            return None
        self.headroom_bytes = self.headroom_bytes or result.headroom_bytes or 0
        return result


def why_no_limit() -> str:
    """Why ``run_side`` cannot limit memory here; "" if it can."""
    try:
        with MemoryGroup("gids-bench") as group:
            joined = subprocess.run(group.command(["true"]), capture_output=True).returncode == 0
            return "" if joined else "no permission to join a memory control group"
    except OSError as error:
        return f"no memory control group: {error.strerror or error}"
