"""What a loader is doing, told to profilers and, once an epoch, to the log. Called by FeatureLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.profiler import record_function

Stage = Callable[[str], AbstractContextManager[object]]


def stage(name: str) -> AbstractContextManager[object]:
    """A range gids.NAME in torch.profiler, and where it is told to emit NVTX, in Nsight Systems."""
    return record_function(f"gids.{name}")


def nvtx_stage(name: str) -> AbstractContextManager[object]:
    """The same range, and always one in Nsight Systems, which needs a CUDA build of torch."""
    both = ExitStack()
    both.enter_context(stage(name))
    both.enter_context(torch.cuda.nvtx.range(f"gids.{name}"))
    return both


def stage_for(device: torch.device) -> Stage:
    """What tells profilers of a loader on this device."""
    return nvtx_stage if device.type == "cuda" and torch.version.cuda is not None else stage


def epoch_summary(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> str | None:
    """One line about the time between two results of FeatureLoader.stats(); None when nothing happened."""

    def steps(stats: Mapping[str, Any]) -> int:
        return max((t["steps"] for t in stats["tables"].values()), default=0)

    def grown(key: str) -> Any:
        return after[key] - before[key]

    if not (minibatches := steps(after) - steps(before)):
        return None
    stages = ", ".join(f"{name} {after['seconds'][name] - before['seconds'][name]:.2f} s" for name in _STAGES)
    pages = grown("pages")
    ratio = f"{100 * grown('hits') / pages:.1f} % of {pages} pages hit" if pages else "no pages"
    read = f"{grown('bytes_read') / 1e6:.1f} MB read"
    return f"{minibatches} minibatches in {seconds:.2f} s: {ratio}, {read}; {stages}"


_STAGES = ("sample", "plan", "wait", "gather")
