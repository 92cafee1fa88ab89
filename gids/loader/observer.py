"""Observer: the methods that a FeatureLoader calls while it works, to record or time it; stages of its work.

Called by EpochStream. gids.trace has two observers: record() and Timeline.

Also arithmetic with FeatureLoader.stats(): what happened between two of them, and sums over loaders. Choices
in words. Numbers that count are subtracted and added. Sizes and names are those of the later stats().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

if TYPE_CHECKING:
    from gids.loader.readers import Cache, Ids

Stage = Callable[[str], AbstractContextManager[object]]


def stage(name: str) -> AbstractContextManager[object]:
    """A range gids.NAME in torch.profiler; also in Nsight Systems under torch.autograd.profiler.emit_nvtx."""
    return record_function(f"gids.{name}")


def nvtx_stage(name: str) -> AbstractContextManager[object]:
    """The same range, always also in Nsight Systems. Needs a CUDA build of torch."""
    both = ExitStack()
    both.enter_context(stage(name))
    both.enter_context(torch.cuda.nvtx.range(f"gids.{name}"))
    return both


def stage_for(device: torch.device) -> Stage:
    """The function that marks stages of a loader on this device."""
    return nvtx_stage if device.type == "cuda" and torch.version.cuda is not None else stage


def epoch_summary(
    before: Mapping[str, Any], after: Mapping[str, Any], minibatches: int, seconds: float
) -> str | None:
    """One line about the time between two FeatureLoader.stats(); None without minibatches."""
    if not minibatches:
        return None
    epoch = between(before, after)
    packs, pages = epoch["packs"], epoch["pages"]
    stages = ", ".join(f"{name} {epoch['seconds'][name]:.2f} s" for name in _STAGES)
    ratio = f"{100 * epoch['hits'] / pages:.1f} % of {pages} pages hit" if pages else "no pages"
    read = f"{epoch['bytes_read'] / 1e6:.1f} MB read"
    if packs["minibatches"]:
        read += f", {packs['bytes_written'] / 1e6:.1f} MB written"
        ratio = describe_choices(packs["choices"])
    return f"{minibatches} minibatches in {seconds:.2f} s: {ratio}, {read}; {stages}"


_STAGES = ("sample", "plan", "wait", "gather")


class Observer:
    """Base class: override the methods you need, the others do nothing.

    All are called in the consumer's thread. step counts minibatches from 0, across epochs, however their rows
    are read. Streams that read through the cache (a validation in mid-epoch) call no method but cache_opened.
    An exception in a method reaches the training loop.
    """

    of_cache = False
    """Whether it observes the cache: then reads="auto" reads at random. Other observers do not change how
    rows are read."""

    def cache_opened(self, cache: Cache) -> None:
        """The cache was built, with the first minibatch that is read through it."""

    def entered(self, step: int, ids: Ids) -> None:
        """A sampled minibatch entered the window. ids: {table: int64[n]}, as the stream received them."""

    def planned(self, step: int) -> None:
        """The reads of the minibatch were planned and submitted."""

    def gathered(self, step: int) -> None:
        """The features of the minibatch are ready."""

    def retired(self, step: int) -> None:
        """Nothing marks the pages of the minibatch any more: after its gather, or as its stream closed."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to run a stage in: "sample", "enter", "plan", "sweep" or "gather"."""
        return nullcontext()


class Observers:
    """The observers of one loader, called in the order in which they were added. Numbers the steps.

    profile: marks each stage for profilers. Attributes: ready: number of minibatches whose features were.
    """

    def __init__(self, first: Observer | None = None, profile: Stage = stage) -> None:
        self._all: list[Observer] = [] if first is None else [first]
        self._profile = profile
        self._entered = self._planned = self._gathered = self._retired = 0  # steps
        self._enter_again = self._plan_again = 0  # steps of which another reader was told
        self.ready = 0

    @contextmanager
    def added(self, observer: Observer) -> Iterator[None]:
        """Include observer while the block runs."""
        self._all.append(observer)
        try:
            yield
        finally:
            self._all.remove(observer)

    @property
    def any(self) -> bool:
        """Whether there is an observer."""
        return bool(self._all)

    @property
    def of_cache(self) -> bool:
        """Whether one observes the cache."""
        return any(observer.of_cache for observer in self._all)

    def cache_opened(self, cache: Cache) -> None:
        for observer in self._all:
            observer.cache_opened(cache)

    def entered(self, ids: Ids) -> None:
        if self._enter_again:
            self._enter_again -= 1
            return
        self._entered += 1
        for observer in self._all:
            observer.entered(self._entered - 1, ids)

    def planned(self) -> None:
        if self._plan_again:
            self._plan_again -= 1
            return
        self._planned += 1
        for observer in self._all:
            observer.planned(self._planned - 1)

    def gathered(self) -> None:
        self._gathered += 1
        self.ready += 1
        for observer in self._all:
            observer.gathered(self._gathered - 1)

    def retired(self) -> None:
        self._retired += 1
        for observer in self._all:
            observer.retired(self._retired - 1)

    def begin_again(self) -> None:
        """Another reader gets the steps that were not gathered. Observers heard of these steps already."""
        self._enter_again, self._plan_again = self._entered - self._gathered, self._planned - self._gathered

    def end(self) -> None:
        """The stream ended: nothing of the steps that entered is left."""
        while self._retired < self._entered:
            try:
                self.retired()
            except Exception:  # of one observer: the others hear of all steps
                self.end()
                raise
        self._planned = self._gathered = self._entered
        self._enter_again = self._plan_again = 0

    def stage(self, name: str) -> AbstractContextManager[object]:
        return self._stages(name) if self._all else self._profile(name)

    @contextmanager
    def _stages(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._profile(name))
            for observer in self._all:
                stack.enter_context(observer.stage(name))
            yield


Stats = Mapping[str, Any]
PRESENT = ("memory", "window", "planned", "policy", "heat", "engine", "scratch")
"""Entries that say how things are, and count nothing of one loader."""


def is_size(key: str) -> bool:
    """Whether a counter of a table is a present size, and not a number of events."""
    return key in ("lines", "host_lines") or key.endswith("_bytes")


def between(before: Stats, after: Stats) -> dict[str, Any]:
    """What happened from one stats() to the next of the same FeatureLoader."""
    return _combined(before, after, -1)


def added(first: Stats, second: Stats) -> dict[str, Any]:
    """The sum of two stats()."""
    return _combined(first, second, 1)


def epoch_figures(before: Stats, after: Stats) -> dict[str, float]:
    """The figures of the time between two stats(), for a logger: {"hit_ratio", "pages_read", "bytes_read",
    "seconds/sample", "seconds/plan", "seconds/wait", "seconds/gather", "seconds/read"}. {} without tables.
    """
    if "seconds" not in after:
        return {}
    epoch = between(before, after)
    figures = {name: float(epoch[name]) for name in ("hit_ratio", "pages_read", "bytes_read")}
    return figures | {f"seconds/{stage}": float(seconds) for stage, seconds in epoch["seconds"].items()}


def describe_choices(choices: Sequence[Stats]) -> str:
    """stats()["packs"]["choices"] in words: minibatches, seconds and predicted seconds, by way of reading.

    Empty without choices: then the loader considered random reads only.
    """
    return "; ".join(
        _describe(way, [choice for choice in choices if choice["way"] == way])
        for way in dict.fromkeys(choice["way"] for choice in choices)
    )


def _describe(way: str, choices: Sequence[Stats]) -> str:
    def total(key: str) -> Any:
        return sum(choice[key] for choice in choices)

    said = f"{total('minibatches'):,} minibatches by {way} reads"
    if packs := total("packs"):
        superbatches = total("superbatches")
        said += f" in {packs:,} pack{'s' * (packs != 1)} of {superbatches:,} superbatch"
        said += "es" * (superbatches != 1)
    said += f", took {total('actual_s'):.1f} s"
    ways = set[str].intersection(*(set(choice["predicted_s"]) for choice in choices))
    seconds = {name: sum(float(choice["predicted_s"][name]) for choice in choices) for name in ways}
    predicted = [f"{name} {s:.1f} s" for name, s in sorted(seconds.items(), key=lambda item: item[1])]
    return f"{said} (predicted: {', '.join(predicted)})" if predicted else said


def _combined(first: Stats, second: Stats, sign: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in second.items():
        before = first.get(key)
        if before is None or key in PRESENT or is_size(key):
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _combined(before, value, sign)
        elif isinstance(value, list):  # of choices, in their order
            result[key] = value[len(before) :] if sign < 0 else before + value
        else:
            result[key] = value + sign * before
    result |= {key: value for key, value in first.items() if key not in second}
    if "hit_ratio" in result:
        result["hit_ratio"] = result["hits"] / result["pages"] if result["pages"] else 0.0
    return result
