"""The options of gids.open(), checked. Only gids.open makes them, and it has the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gids import _core
from gids.cache import POLICIES
from gids.store.names import HEAT_ROLES

MAX_PLANNED = 8
_MAX_DEPTH = 1 << 14

Reads = Literal["auto", "random", "pack"]
_KNOWN = {
    "policy": POLICIES,
    "heat": ("auto", *HEAT_ROLES, "none"),
    "engine": ("auto", "uring", "threads", "mmap"),
    "reads": get_args(Reads),
    "host_policy": ("lookahead", "static"),
    "wait": ("stream", "warp"),
    "transfer": ("kernel", "copy"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the loaders of a source read. The fields are the arguments of gids.open(); sizes are bytes."""

    memory: int | None
    device_memory: int | None
    cache: int | None
    window: int
    planned: int | None
    policy: str
    heat: str
    engine: str
    queue_depth: int
    io_threads: int | None
    reads_per_s: float | None
    direct: bool
    check_crc: bool
    reads: Reads
    scratch: str | None
    scratch_bytes: int | None
    threads: int | None
    host_policy: Literal["lookahead", "static"]
    wait: Literal["stream", "warp"]
    transfer: Literal["kernel", "copy"]
    staging: int
    rounds: int
    pairs: int

    def __post_init__(self) -> None:
        if self.planned is not None and not 1 <= self.planned <= MAX_PLANNED:
            raise ValueError(f"planned must be 1 to {MAX_PLANNED} (got {self.planned})")
        if self.window < 0:
            raise ValueError(f"window must be 0 or more (got {self.window}); 0 turns lookahead off")
        live, most = self.window + (self.planned or 1), _core.USE_BITS
        if live > most:
            raise ValueError(
                f"window + planned must be at most {most} (got {self.window} + {self.planned or 1}): lower "
                "one of them"
            )
        for name, known in _KNOWN.items():
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)} (got {given!r})")
        if not 1 <= self.queue_depth <= _MAX_DEPTH:
            raise ValueError(f"queue_depth must be 1 to {_MAX_DEPTH} (got {self.queue_depth})")
        if self.io_threads is not None and not 1 <= self.io_threads <= _core.IO_THREADS_MAX:
            raise ValueError(f"io_threads must be 1 to {_core.IO_THREADS_MAX} (got {self.io_threads})")
        if self.reads_per_s is not None and not 0 < self.reads_per_s < math.inf:
            raise ValueError(f"reads_per_s must be greater than 0 (got {self.reads_per_s})")
        if not 1 <= self.pairs <= _core.QUEUE_PAIRS_MAX:
            raise ValueError(f"pairs must be 1 to {_core.QUEUE_PAIRS_MAX} (got {self.pairs})")
        most_rounds = _core.QUEUE_DOORBELLS * self.pairs
        if not 1 <= self.rounds <= most_rounds:
            raise ValueError(f"rounds must be 1 to {most_rounds} with pairs={self.pairs} (got {self.rounds})")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be 1 or more (got {self.threads})")
