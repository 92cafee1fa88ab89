"""Stages of a loader, for profilers, and a summary of each epoch for the log. Called by FeatureLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.profiler import record_function

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


def epoch_summary(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> str | None:
    """One line about the time between two FeatureLoader.stats(); None without minibatches."""

    def steps(stats: Mapping[str, Any]) -> int:
        return max((t["steps"] for t in stats["tables"].values()), default=0)

    def grown(key: str) -> Any:
        return after[key] - before[key]

    packed = after["packs"]["minibatches"] - before["packs"]["minibatches"]
    if not (minibatches := steps(after) - steps(before) + packed):
        return None
    stages = ", ".join(f"{name} {after['seconds'][name] - before['seconds'][name]:.2f} s" for name in _STAGES)
    pages = grown("pages")
    ratio = f"{100 * grown('hits') / pages:.1f} % of {pages} pages hit" if pages else "no pages"
    read = f"{grown('bytes_read') / 1e6:.1f} MB read"
    if packed:
        read += (
            f", {(after['packs']['bytes_written'] - before['packs']['bytes_written']) / 1e6:.1f} MB written"
        )
        ratio = _ways_line(after["packs"]["choices"][len(before["packs"]["choices"]) :])
    return f"{minibatches} minibatches in {seconds:.2f} s: {ratio}, {read}; {stages}"


def _ways_line(choices: Sequence[Mapping[str, Any]]) -> str:
    """What was chosen, with predicted and actual seconds, summed by way."""
    said = []
    for way in dict.fromkeys(choice["way"] for choice in choices):
        of = [choice for choice in choices if choice["way"] == way]
        superbatches, packs = (sum(choice[key] for choice in of) for key in ("superbatches", "packs"))
        predicted = sum(choice["predicted_s"].get(way, 0.0) for choice in of)
        actual = sum(choice["actual_s"] for choice in of)
        parts = f" in {superbatches} superbatches of {packs} packs" if packs else ""
        said.append(f"{way} reads{parts}, predicted {predicted:.1f} s, took {actual:.1f} s")
    return "; ".join(said)


_STAGES = ("sample", "plan", "wait", "gather")
