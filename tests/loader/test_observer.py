"""Observers: which methods a loader calls, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from open_options import feature_loader

from gids.loader import Observer
from gids.write import DatasetWriter


class Notes(Observer):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.stages: list[str] = []
        self.ids: list[list[int]] = []
        self.lines: list[int] = []

    def cache_opened(self, cache: Any) -> None:
        self.lines.append(cache.stats()["_N.feat"]["lines"])

    def entered(self, step: int, ids: Any) -> None:
        self.events.append(("entered", step))
        self.ids.append(ids["_N.feat"].tolist())

    def planned(self, step: int) -> None:
        self.events.append(("planned", step))

    def gathered(self, step: int) -> None:
        self.events.append(("gathered", step))

    def retired(self, step: int) -> None:
        self.events.append(("retired", step))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.stages.append(name)
        yield
        self.stages.append(f"end of {name}")

    def steps(self, event: str) -> list[int]:
        return [step for name, step in self.events if name == event]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "rows.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(500, 8))
    return tmp_path / "rows.gids"


BATCHES = [torch.arange(start, start + 10) for start in range(0, 80, 10)]
OPTIONS: dict[str, Any] = {"memory": 64 << 20, "window": 3, "planned": 2}


def by_table(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"_N.feat": ids}


def test_every_step_enters_is_planned_gathered_and_retired_in_this_order(dataset: Path) -> None:
    notes = Notes()
    with feature_loader(dataset, ["_N.feat"], observer=notes, **OPTIONS) as loader:
        for _ in range(2):
            assert len(list(loader.attach(BATCHES, by_table))) == 8
    order = ["entered", "planned", "gathered", "retired"]
    for event in order:
        assert notes.steps(event) == list(range(16))
    for step in range(16):
        assert [name for name, s in notes.events if s == step] == order
    assert notes.ids == 2 * [ids.tolist() for ids in BATCHES]
    assert len(notes.lines) == 1
    assert notes.lines[0] > 0


def test_closing_a_stream_retires_what_entered(dataset: Path) -> None:
    notes = Notes()
    with feature_loader(dataset, ["_N.feat"], observer=notes, **OPTIONS) as loader:
        stream = loader.attach(BATCHES, by_table)
        next(stream)
        next(stream)
        assert len(notes.steps("entered")) > len(notes.steps("retired")) == 2
        stream.close()
    assert notes.steps("retired") == notes.steps("entered")


def test_an_observer_is_called_while_its_block_runs(dataset: Path) -> None:
    first, later = Notes(), Notes()
    with feature_loader(dataset, ["_N.feat"], observer=first, **OPTIONS) as loader:
        with loader.observe(later):
            list(loader.attach(BATCHES, by_table))
        assert later.events == first.events
        list(loader.attach(BATCHES, by_table))
    assert len(first.events) == 2 * len(later.events) == 64


def test_stages_run_in_the_observers_context(dataset: Path) -> None:
    notes = Notes()
    with feature_loader(dataset, ["_N.feat"], observer=notes, **OPTIONS) as loader:
        list(loader.attach(BATCHES, by_table))
    begun = [name for name in notes.stages if not name.startswith("end of ")]
    assert {name: begun.count(name) for name in begun} == {"sample": 9, "enter": 8, "plan": 8, "gather": 8}
    assert notes.stages[:4] == ["sample", "end of sample", "enter", "end of enter"]


def test_an_exception_of_an_observer_reaches_the_training_loop(dataset: Path) -> None:
    class Failing(Observer):
        def planned(self, step: int) -> None:
            raise OSError("no space")

    with (
        feature_loader(dataset, ["_N.feat"], observer=Failing(), **OPTIONS) as loader,
        pytest.raises(OSError, match="no space"),
    ):
        list(loader.attach(BATCHES, by_table))
