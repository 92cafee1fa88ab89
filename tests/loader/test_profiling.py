"""Stages are ranges of PyTorch's profiler, which exist while a profiler runs only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import random_in_edges

import gids
from gids import profiling
from gids.write import DatasetWriter


def test_a_profiler_shows_the_stages_of_an_epoch(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "g.gids") as writer:
        for name in ("feat", "text"):
            writer.write_table("node", "_N", name, torch.randn(500, 8))
        writer.write_graph(("_N", "_E", "_N"), *random_in_edges(500, 500, 1), num_src=500)
    loader = gids.NodeLoader(tmp_path / "g.gids", torch.arange(60), [3], batch_size=20, seed=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 3
    events = [event for event in profile.events() if event.name.startswith("gids::")]
    counts = Counter(event.name for event in events)
    assert counts == {
        "gids::sample": 4,  # the last one finds the end
        "gids::enter": 3,
        "gids::plan": 3,
        "gids::gather": 3,
        "gids::wait": 6,  # one per table
    }
    assert {event.cpu_parent.name for event in events if event.name == "gids::wait"} == {"gids::gather"}


def test_no_range_is_made_while_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiling.stage("plan") is profiling.stage("gather")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert isinstance(profiling.stage("plan"), torch.profiler.record_function)
    if torch.profiler.itt.is_available():  # as emit_nvtx() on a GPU
        with torch.autograd.profiler.emit_itt():
            assert isinstance(profiling.stage("plan"), torch.profiler.record_function)
