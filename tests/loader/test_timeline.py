"""Timelines: the JSON is what Perfetto reads, slices nest, the number of events is bounded."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from open_options import feature_loader

from gids.trace.timeline import Timeline
from gids.write import DatasetWriter

BATCHES = 12


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "rows.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(2000, 1024))
    return tmp_path / "rows.gids"


def train(dataset: Path, timeline: Timeline) -> None:
    """Two epochs, of which the second is after the block."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(2000, (300,), generator=generator) for _ in range(BATCHES)]
    options: dict[str, Any] = {"memory": 64 << 20, "cache": 1 << 20, "window": 4}
    with feature_loader(dataset, ["_N.feat"], **options) as loader:
        with timeline.follow(loader):
            for _ in loader.attach(batches, lambda ids: {"_N.feat": ids}):
                begun = time.perf_counter_ns()
                timeline.add("training", begun, time.perf_counter_ns())
        for _ in loader.attach(batches, lambda ids: {"_N.feat": ids}):
            pass


def written(timeline: Timeline, path: Path) -> dict[str, Any]:
    timeline.write(path)
    assert not path.with_name(path.name + ".part").exists()
    return dict(json.loads(path.read_text()))


def test_events_are_what_perfetto_reads(dataset: Path, tmp_path: Path) -> None:
    timeline = Timeline()
    train(dataset, timeline)
    found = written(timeline, tmp_path / "t.json")
    assert found["otherData"] == {"events_left_out": 0}
    events = found["traceEvents"]
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event)
        assert event["ts"] >= 0
        assert ("dur" in event) == (event["ph"] == "X")
        assert ("args" in event) == (event["ph"] in "CM")
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    names = [e["name"] for e in events if e["ph"] == "X"]
    for name in ("enter", "plan", "gather", "wait", "training"):
        assert names.count(name) == BATCHES
    assert names.count("sample") == BATCHES + 1  # the last finds the end
    in_flight = [e["args"]["value"] for e in events if e["name"] == "requests in flight"]
    assert len(in_flight) == 2 * (4 * BATCHES + 1)
    assert min(in_flight) >= 0
    assert max(in_flight) <= 256
    rates = [e["args"]["value"] for e in events if e["name"] == "MB/s read"]
    assert len(rates) == BATCHES
    assert max(rates) > 0
    open_until: list[float] = []
    inside = {}
    for event in events:  # slices nest, or follow one another
        if event["ph"] != "X":
            continue
        begin, end = round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        inside[event["name"]] = len(open_until)
        open_until.append(end)
    assert inside == {"sample": 0, "enter": 0, "plan": 0, "gather": 0, "wait": 1, "training": 0}


def test_a_bounded_timeline_keeps_the_first_events(dataset: Path, tmp_path: Path) -> None:
    timeline = Timeline(most_events=20)
    train(dataset, timeline)
    found = written(timeline, tmp_path / "t.json")
    assert len(found["traceEvents"]) == 20 + 2
    assert found["otherData"]["events_left_out"] > 100


def test_a_timeline_goes_to_a_pipe_without_replacing_it(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(path.read_text)
        Timeline().write(path)
        assert json.loads(text.result())["traceEvents"]
    assert path.is_fifo()
