"""The options of gids.open(): Tuning, which users make, and all of them together, checked.

Also the errors for names of arguments that a function does not have. They say where an option belongs.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, ParamSpec, SupportsIndex, TypeVar, get_args

import torch

from gids import _core
from gids.cache import POLICIES
from gids.io.disks import MOST_DEPTH
from gids.sizes import parse_bytes
from gids.store.names import HEAT_ROLES

P = ParamSpec("P")
R = TypeVar("R")

MAX_PLANNED = 8

Reads = Literal["auto", "random", "pack"]
_KNOWN = {
    "policy": POLICIES,
    "heat": ("auto", *HEAT_ROLES, "none"),
    "engine": ("auto", "uring", "threads", "mmap"),
    "reads": get_args(Reads),
    "host_policy": ("lookahead", "static"),
}
_MOST = {
    "planned": MAX_PLANNED,
    "queue_depth": MOST_DEPTH,
    "io_threads": _core.IO_THREADS_MAX,
}
_WHOLE = {*_MOST, "window", "threads"}


Size = int | float | str
"""Bytes, or text such as "16GB" (16e9) or "16GiB" (16 * 2^30)."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options of gids.open() that rarely need another value: ``gids.open(path, tuning=gids.Tuning(…))``.

    Args:
        policy: how the cache chooses the pages that it keeps: ``"lookahead"`` (default), ``"window-pin"``,
            ``"random"``, ``"static"``, and, not on CUDA, ``"lru"`` and ``"pinned"``.
        planned: minibatches that are being read, 1 to 8. Default: starts with 2 (on CUDA 3) and becomes,
            every 16 minibatches (on CUDA between epochs), the least number whose missing pages keep the disks
            at 98 % of their rate, by their measured speed, if memory allows. window + planned is at most 24.
        cache: limit of the memory for cache lines (on CUDA: for those on the device). 0: no cache.
        engine: ``"auto"`` (default), ``"uring"``, ``"threads"`` or ``"mmap"``.
        queue_depth: requests in flight, 1 to 16384. Default: 256 per SSD, and 64 per further core. Fewer if
            their buffers would take more than an eighth of the memory.
        io_threads: threads of the engine, 1 to 1024. Default: with io_uring, one ring per SSD, and one more
            while all are busy, reads wait, a core is free, and it helps; with ``"threads"``, one per request
            of queue_depth; with ``"mmap"``, one per core.
        direct: read past the page cache with O_DIRECT (default True).
        host_policy: on CUDA, how lines in host memory are chosen: ``"lookahead"`` (default) replaces them
            like the lines on the device; ``"static"`` keeps the hottest pages that are not on the device.
        staging: on CUDA, pinned host memory through which pages travel (default ``"256MiB"``). Half as much
            device memory takes them, less with more than two tables.

    Raises ValueError for a value out of its range, TypeError for a number that is not whole.
    """

    policy: str = "lookahead"
    planned: int | None = None
    cache: Size | None = None
    engine: str = "auto"
    queue_depth: int | None = None
    io_threads: int | None = None
    direct: bool = True
    host_policy: Literal["lookahead", "static"] = "lookahead"
    staging: Size = "256MiB"

    def __post_init__(self) -> None:
        for name in ("cache", "staging"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_bytes(size, name))
        for field in fields(self):
            value, known = getattr(self, field.name), _KNOWN.get(field.name)
            if field.name in _WHOLE and value is not None:
                object.__setattr__(self, field.name, whole_number(field.name, value))
            if known is not None and value not in known:
                raise ValueError(f"{field.name} must be one of {', '.join(known)} (got {value!r})")
        for name, most in _MOST.items():
            if (count := getattr(self, name)) is not None and not 1 <= count <= most:
                raise ValueError(f"{name} must be 1 to {most} (got {count})")


@dataclass(frozen=True, kw_only=True)
class Options(Tuning):
    """How the loaders of a source read: the arguments of gids.open() and of Tuning. Sizes are bytes."""

    memory: int | None
    device_memory: int | None
    window: int
    heat: str
    check_crc: bool
    reads: Reads
    scratch: tuple[str, ...] | None
    scratch_bytes: int | None
    threads: int | None
    cache: int | None
    staging: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scratch is not None:
            object.__setattr__(self, "scratch", _directories(self.scratch))
        if self.window < 0:
            raise ValueError(f"window must be 0 or more (got {self.window}); 0 turns lookahead off")
        live, most = self.window + (self.planned or 1), _core.USE_BITS
        if live > most and self.planned is None:
            raise ValueError(f"window must be at most {most - 1} (got {self.window})")
        if live > most:
            raise ValueError(
                f"window + planned must be at most {most} (got {self.window} + {self.planned}): lower "
                "one of them"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be 1 or more (got {self.threads})")


TUNING = tuple(f.name for f in fields(Tuning))
OPTIONS = (*(f.name for f in fields(Options) if f.name not in TUNING), "allow_dirs", "tuning")
"""Keyword arguments of gids.open(); those of gids.Tuning apart."""


def check_names(caller: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a given name that is not known. caller: as the user writes it."""
    known = list(known)
    homes = dict.fromkeys(TUNING, "gids.Tuning()") | dict.fromkeys(OPTIONS, "gids.open()")
    for name in names:
        if name in known:
            continue
        wrong = f"{caller} has no argument {name!r}"
        if name in homes:
            written = f"tuning=gids.Tuning({name}=...)" if name in TUNING else f"{name}=..."
            raise TypeError(f"{wrong}: it is an option of {homes[name]}. Give gids.open(PATH, {written})")
        if close := difflib.get_close_matches(name, [*known, *homes], n=1):
            home = "" if close[0] in known else f" of {homes[close[0]]}"
            raise TypeError(f"{wrong}; did you mean {close[0]!r}{home}?")
        raise TypeError(f"{wrong} (it has {', '.join(known)})")


WITHOUT_EFFECT = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
    "pin_memory_device",
    "in_order",
)
"""Arguments of torch's DataLoader about workers, which loaders take and ignore."""


def without_ignored(caller: str, arguments: Mapping[str, Any], *, above: int = 3) -> dict[str, Any]:
    """The arguments but those of WITHOUT_EFFECT, which a warning names if they are not the default.

    above: frames from here to the user's call.
    """
    changed = {**arguments, "in_order": not arguments.get("in_order", True)}  # its default is True
    if ignored := [name for name in WITHOUT_EFFECT if changed.get(name)]:
        names = " and ".join(f"{name}=" for name in ignored)
        warnings.warn(
            f"{caller}: {names} {'have' if len(ignored) > 1 else 'has'} no effect: threads sample and read "
            "ahead, without worker processes",
            stacklevel=above,
        )
    return {name: value for name, value in arguments.items() if name not in WITHOUT_EFFECT}


def explain_names(caller: str, *, of_torch: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: check_names for a function's keyword arguments. The typed signature stays as it is.

    of_torch: also take the arguments of WITHOUT_EFFECT, and ignore them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            named: Any = without_ignored(caller, kwargs) if of_torch else kwargs
            check_names(caller, named, known)
            return function(*args, **named)

        return checked

    return decorate


Tuning.__init__ = explain_names("gids.Tuning")(Tuning.__init__)  # type: ignore[method-assign]  # a dataclass made it


def whole_number(name: str, value: object) -> int:
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
    if is_bool or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}={value!r}: give a whole number")
    return operator.index(value)


def _directories(scratch: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    names = [scratch] if isinstance(scratch, str | os.PathLike) else scratch
    directories = tuple(os.path.abspath(os.fspath(name)) for name in names)
    if not directories:
        raise ValueError("scratch is an empty list: give a directory, or several on different disks")
    return directories
