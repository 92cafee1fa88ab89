"""The sides of a comparison: the configuration and result of one, and a Comparison that runs them.

Each side trains in a fresh process (training.py). Called by `gids bench epoch` and the scripts in bench/.
Imports neither torch nor a framework, so that the caller needs little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from gids.bench.isolation import MemoryGroup, run_fresh

OURS, ADVISED, PLAIN = "gids", "stock, MADV_RANDOM", "stock"
"""gids, and the framework's own loader on memory-mapped features without and with the kernel's read-ahead."""
FRAMEWORKS = {"dgl": "dgl", "pyg": "torch_geometric", "torch": "torch"}
"""The frameworks that sides train with, in modules named NAME_side, and the package that each needs."""

_SPARE_BYTES = 64 << 20  # for stock: rows that are kept to be compared, and fragmented memory
_START_S = 300  # a process may take so long beside its training: imports, topology, comparing rows


@dataclass(frozen=True)
class EpochConfig:
    """The configuration of one side. It is sent as JSON, so it has plain values only.

    tables: names of the tables of features, which stock maps; the nodes of the first one have labels and a
    train split. fanouts: the last one applies to the seeds. hidden: width of the hidden layers; 0: load the
    minibatches and do not train. batches: minibatches to train on. source: options of gids.open(), beside
    memory=; for stock PyG, its num_workers.
    memory_bytes: for features, page cache included; for stock 0: no limit. most_seconds: stop after the
    minibatch in which they have passed; 0: no limit.
    """

    side: str
    dataset: str
    tables: tuple[str, ...]
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int
    batches: int
    seed: int = 0
    source: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    most_seconds: float = 0
    allow_dirs: tuple[str, ...] = ()


@dataclass
class EpochResult:
    """The result of one side. Seconds are wall-clock time, except cpu_seconds.

    stages: seconds of "loading" (waiting for the loader), "training", and of gids "reading" (the part of
    loading in which it waits for the disk). rows: feature rows that the model got. read_bytes: from the
    device; None if the kernel does not report it. hit_ratio: of pages, in gids' cache, or in the page cache
    for stock; None if unknown. base_rss_bytes: before the features were opened; peak_rss_bytes: after that.
    compared_rows, wrong_rows: rows compared with the dataset, and rows that differ. cached_before: the share
    of the features in the page cache at the start. loader: FeatureLoader.stats() of gids.
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


def installed_framework() -> str:
    """The first of FRAMEWORKS that is installed; torch always is."""
    return next(name for name, package in FRAMEWORKS.items() if find_spec(package))


class Comparison:
    """Runs sides one after the other, gids first. Stock gets the memory that gids had.

    That is memory_bytes, or what the process of gids grew by while it trained, if that is more. gids keeps to
    its option memory=; a memory control group limits stock, if `limited`. say(sentence) is called with the
    failure of a side of stock. module: it trains.
    """

    def __init__(self, *, limited: bool, say: Callable[[str], None], module: str) -> None:
        self._limited, self._say, self._module = limited, say, module
        self._grown_bytes = 0

    def run(self, config: EpochConfig, module: str = "") -> EpochResult | None:
        """Run a side. Blocks. Returns None if stock failed. Raises FreshProcessError if gids did.

        module: trains, in place of the comparison's.
        """
        ours = config.side == OURS
        if not ours:
            most = max(config.memory_bytes, self._grown_bytes) + _SPARE_BYTES
            config = replace(config, memory_bytes=most if self._limited else 0)
        timeout_s = 2 * config.most_seconds + _START_S if config.most_seconds else None
        try:
            with nullcontext() if ours or not self._limited else MemoryGroup() as group:
                answer = run_fresh(module or self._module, asdict(config), group=group, timeout_s=timeout_s)
        except OSError as error:  # a FreshProcessError, or no memory control group
            if ours:
                raise
            self._say(f"`{config.side}` {getattr(error, 'reason', error)}")
            return None
        result = EpochResult(**answer)
        if ours:
            self._grown_bytes = max(self._grown_bytes, result.peak_rss_bytes - result.base_rss_bytes)
        return result
