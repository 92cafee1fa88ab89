"""Scratch that is full or fails: the epoch goes on by random reads, once told, and every row is right."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packs_example import assert_same, cut_small, open_loader, open_source, scratch_files

from gids.packs import ScratchFull, Superbatch


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, turn: int) -> None:
    """The method of Superbatch finds the disk full, from the turn-th call on."""
    original: Callable[..., Any] = getattr(Superbatch, name)
    calls = 0

    def method(self: Superbatch, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= turn:
            raise ScratchFull(errno.ENOSPC, "no room", "somewhere")
        return original(self, *args)

    monkeypatch.setattr(Superbatch, name, method)


@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.parametrize("method", ["prepare", "begin"])
@pytest.mark.parametrize("cut", [{"minibatches": 5}, {"packs": 2}, {"minibatches": 7, "packs": 1}])
def test_a_disk_that_fills_up_loses_and_repeats_no_minibatch(
    path: Path,
    method: str,
    turn: int,
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_source(path, "random") as source:
        expected = list(open_loader(source))
    cut_small(monkeypatch, pack_bytes=2_000_000, **cut)
    fail_at(monkeypatch, method, turn)
    with open_source(path, "pack") as source:
        loader = open_loader(source)
        for a, b in zip(expected, loader, strict=True):
            assert_same(a, b)
        stats = loader.stats()["packs"]
        assert stats["superbatches"] == turn - 1
        assert 0 < stats["minibatches"] < len(expected) or turn == 1
        assert len(warnings_of(caplog)) == 1
        assert loader.stats()["memory"].keys() & {"lines"}  # the memory is the cache's now
        assert len(list(loader)) == len(expected)  # which does not try again
        assert len(warnings_of(caplog)) == 1
    assert not scratch_files(path)
