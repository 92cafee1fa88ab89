"""Stages are ranges of PyTorch's profiler."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import random_in_edges

import gids
from gids.profiling import stage
from gids.write import DatasetWriter


def test_a_profiler_shows_the_stages_of_an_epoch(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "g.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(500, 8))
        writer.write_graph(("_N", "_E", "_N"), *random_in_edges(500, 500, 1), num_src=500)
    loader = gids.NodeLoader(tmp_path / "g.gids", torch.arange(60), [3], batch_size=20, seed=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 3
    events = [event for event in profile.events() if event.name.startswith("gids::")]
    assert {event.name for event in events} == {
        f"gids::{stage}" for stage in ("sample", "enter", "plan", "gather", "wait")
    }
    assert {event.cpu_parent.name for event in events if event.name == "gids::wait"} == {"gids::gather"}


def test_a_profiler_of_the_system_gets_ranges_too() -> None:
    """emit_nvtx(), which needs a GPU, and emit_itt() set the flag that stage() asks for."""
    with torch.autograd.profiler.emit_itt():
        assert isinstance(stage("plan"), torch.profiler.record_function)
    assert stage("plan") is stage("gather")
