"""Ends of a packed epoch: closed, dropped, interrupted, killed. No thread and no scratch file is left."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import interrupted
from packs_example import (
    WAYS,
    background_threads,
    cut_small,
    open_loader,
    open_source,
    scratch_files,
    wait_until_all_has_ended,
)

import gids
from gids.packs import Superbatch, memory
from gids.write import DatasetWriter

CUTS: list[dict[str, Any]] = [{}, {"minibatches": 5}, {"packs": 2}, {"minibatches": 7, "packs": 1}]
PROGRAM = Path(__file__).with_name("ending_program.py")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 MB of rows of 512 bytes."""
    path = tmp_path_factory.mktemp("large") / "large.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.ones(250_000, 128))
    return path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_an_epoch_that_is_left_at_any_minibatch(
    path: Path, tmp_path: Path, way: str, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch, pack_bytes=2_000_000, **cut)
    with open_source(path, way, scratch=tmp_path) as source:
        loader = open_loader(source)
        for stop in (0, 1, 4, 6, 13, 21):
            for end in ("close", "drop", "fail"):
                epoch = iter(loader)
                for _ in range(stop):
                    next(epoch)
                if end == "close":
                    epoch.close()
                elif end == "drop":
                    del epoch
                    gc.collect()
                else:

                    def train(epoch: Any) -> None:
                        for _ in epoch:
                            raise RuntimeError("the model failed")

                    if stop < len(loader):
                        with pytest.raises(RuntimeError, match="the model failed"):
                            train(epoch)
                    del epoch
                    gc.collect()
                wait_until_all_has_ended(tmp_path)
        assert len(list(loader)) == len(loader)
        wait_until_all_has_ended(tmp_path)


def test_closing_the_source_ends_all(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch, minibatches=5)
    source = open_source(path, "pack", scratch=tmp_path)
    epoch = iter(open_loader(source))
    for _ in range(7):
        next(epoch)
    assert scratch_files(tmp_path)
    source.close()
    wait_until_all_has_ended(tmp_path)


def test_an_error_in_mid_sweep_ends_it_while_its_traceback_is_there(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = memory.PackBudget.share
    monkeypatch.setattr(memory.PackBudget, "share", lambda *args: replace(share(*args), piece_bytes=4096))

    def fail_when_it_sweeps(*_: Any) -> None:
        wanted = {"gids-sweep", "gids-write"}
        end = time.monotonic() + 10
        while not wanted <= set(background_threads()):
            assert time.monotonic() < end
        raise KeyboardInterrupt

    monkeypatch.setattr(Superbatch, "begin", fail_when_it_sweeps)
    with open_source(large, "pack", 64 << 20, scratch=tmp_path) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        batches = [{"paper.feat": torch.randint(250_000, (4000,))} for _ in range(20)]
        stream = loader.attach(batches, lambda ids: ids, count=20)
        with pytest.raises(KeyboardInterrupt) as caught:
            next(stream)
        wait_until_all_has_ended(tmp_path)
        assert caught.value.__traceback__ is not None


def child(large: Path, scratch: Path, when: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(large), str(scratch), when]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("when", ["sweeping", "training"])
def test_ctrl_c(large: Path, tmp_path: Path, when: str) -> None:
    status, output, errors = interrupted(child(large, tmp_path, when))
    assert status == 0, errors
    assert output.splitlines()[-1] == "ended"


@pytest.mark.parametrize("when", ["sweeping", "training"])
def test_a_killed_process_leaves_no_file(large: Path, tmp_path: Path, when: str) -> None:
    process = child(large, tmp_path, when)
    with process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "go\n":
            pass
        descriptors = Path(f"/proc/{process.pid}/fd")
        assert any(str(fd.readlink()).startswith(str(tmp_path)) for fd in descriptors.iterdir())
        process.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -9, errors
    assert list(tmp_path.iterdir()) == []
