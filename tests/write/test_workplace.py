"""Unfinished work: a kill leaves no dataset or a whole one, and the same command keeps what was finished.

test_kills.py kills every command at many calls; these are the named cases.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import status
from datasets import write_dataset

from gids import FeatureStore, FormatError
from gids.store import GeneratedRows, verify
from gids.write import DatasetWriter, workplace

ROWS = torch.arange(4000.0).reshape(500, 8)


def killed(work: Callable[[], object], target: Any, name: str, *, after: bool = False) -> None:
    """Run work() in a fork of this process that is killed before, or after, it calls target.name."""
    called = getattr(target, name)

    def die(*arguments: Any, **options: Any) -> None:
        if after:
            called(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    def work_until_then() -> None:
        setattr(target, name, die)
        work()

    assert os.WTERMSIG(status(work_until_then)) == signal.SIGKILL


def write(path, disks=(), key=None, sign=1):
    with DatasetWriter(path, stripe=list(disks) or 1, resume_key=key) as writer:
        writer.write_table("node", "n", "k", sign * ROWS)
        writer.write_labels("n", torch.arange(500))


def check(path, disks=(), sign=1):
    assert list(verify(path, allow_dirs=disks)) == []
    assert torch.equal(FeatureStore(path, allow_dirs=disks).read_rows(range(500), "k"), sign * ROWS)


def folders(disks):
    return [folder for disk in disks for folder in disk.iterdir()]


@pytest.fixture
def disks(tmp_path):
    """Directories for shards."""
    directories = [tmp_path / f"ssd{i}" for i in range(2)]
    for directory in directories:
        directory.mkdir()
    return directories


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.gids"


@pytest.fixture
def partial(tmp_path):
    return tmp_path / "a.gids.partial"


def stopped(path, disks=(), key=None):
    """A table is finished, and labels are not."""
    writer = DatasetWriter(path, stripe=list(disks) or 1, resume_key=key or {"source": 1})
    writer.write_table("node", "n", "k", ROWS)
    writer.close(discard=False)


@pytest.mark.parametrize("is_moved", [True, False])
def test_what_was_published_before_a_kill_stays_wherever_it_is(tmp_path, path, partial, disks, is_moved):
    key = {"source": 1}
    killed(lambda: write(path, disks, key), os, "rename", after=False)
    assert not path.exists()
    killed(lambda: write(path, disks, key), workplace, "sync_tree")
    killed(lambda: write(path, disks, key), workplace.Workplace, "_remove")
    check(path, disks)
    if is_moved:  # then the name is free
        path.rename(tmp_path / "b.gids")
        write(path, disks, key, sign=-1)
        check(tmp_path / "b.gids", disks)
        check(path, disks, sign=-1)
    else:
        with pytest.raises(FileExistsError, match=r"a\.gids already exists, and a dataset never changes"):
            write(path, disks, key)
        check(path, disks)
    assert not partial.exists()
    assert len(folders(disks)) == len(disks) * (1 + is_moved)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_kill_while_a_dataset_is_replaced_leaves_the_old_or_the_new_one(path, partial, call):
    """Killed before the old one moves away, between the two renames, and after the second."""
    write(path)
    (path / "tables/mark").touch()

    def overwrite():
        with DatasetWriter(path, resume_key={"source": 1}, overwrite=True) as writer:
            writer.write_table("node", "n", "k", -ROWS)
            writer.write_labels("n", torch.arange(500))

    def work():
        rename, moves = os.rename, []

        def die(old, new):
            if path in (Path(old), Path(new)):
                moves.append(new)
                if len(moves) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
            rename(old, new)

        os.rename = die
        overwrite()

    killed(work, workplace.Workplace, "_remove")
    assert (path / "tables/mark").exists() == (call == 1)
    assert path.exists() == (call != 2)
    with pytest.raises(FileExistsError, match="already exists"):  # which puts the old one back
        DatasetWriter(path)
    check(path, sign=1 if call < 3 else -1)
    overwrite()
    check(path, sign=-1)
    assert not (path / "tables/mark").exists()
    assert not partial.exists()


def test_only_a_dataset_is_replaced(tmp_path, path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("all of it")
    write(path)
    (tmp_path / "link.gids").symlink_to(path)
    write(tmp_path / "with notes.gids")
    (tmp_path / "with notes.gids/notes.txt").write_text("mine")
    for taken in ("home", "link.gids", "with notes.gids"):
        with pytest.raises(
            FileExistsError, match="or contains other files, and is not replaced: move it away"
        ):
            DatasetWriter(tmp_path / taken, overwrite=True)
    check(path)


def test_finished_tables_are_not_read_again(path, disks):
    stopped(path, disks)

    def never(start, out):
        raise AssertionError("what is finished is not read again")

    writer = DatasetWriter(path, stripe=disks, resume_key={"source": 1})
    assert writer.resumed
    writer.write_table("node", "n", "k", GeneratedRows(ROWS.shape, ROWS.dtype, never))
    writer.close(discard=False)
    write(path, disks, {"source": 1})
    check(path, disks)
    assert len(folders(disks)) == len(disks)


def test_another_command_starts_again_and_gives_the_reason(path, partial, disks):
    stopped(path, disks, {"source": 1, "--page-bytes": 512})
    writer = DatasetWriter(path, stripe=disks, resume_key={"source": 1, "--page-bytes": 4096})
    assert not writer.resumed
    assert writer.restart_reason == "--page-bytes changed"
    writer.close(discard=True)
    assert not partial.exists()
    assert folders(disks) == []
    stopped(path, disks)
    write(path, sign=-1)  # without a key
    check(path, sign=-1)
    assert folders(disks) == []


@pytest.mark.parametrize("content", [b"\0" * 90, b'{"version": "gids progress 0", "key": {"source": 1}}'])
def test_progress_that_cannot_be_read_starts_again(path, partial, content):
    stopped(path)
    (partial / "progress.json").write_bytes(content)
    writer = DatasetWriter(path, resume_key={"source": 1})
    assert (writer.resumed, writer.restart_reason) == (False, "")
    writer.close(discard=True)
    assert not partial.exists()


def test_work_that_is_being_removed_is_not_resumed(path, monkeypatch):
    """Killed while it throws work away, because another command begins."""
    stopped(path)
    rmtree = shutil.rmtree

    def die(place, *arguments, **options):
        if os.path.basename(place) == "dataset":
            rmtree(os.path.join(place, "tables"))
            os.kill(os.getpid(), signal.SIGKILL)
        rmtree(place, *arguments, **options)

    def work():
        monkeypatch.setattr(shutil, "rmtree", die)
        DatasetWriter(path, resume_key={"source": 2})

    killed(work, os, "_exit", after=False)
    writer = DatasetWriter(path, resume_key={"source": 1})
    assert not writer.resumed
    writer.close(discard=True)


def test_missing_finished_file_is_found_before_publishing(path, partial):
    stopped(path)
    (partial / "dataset/tables/n.k/shard-00.bin").unlink()
    with pytest.raises(FormatError, match=r"n\.k/shard-00\.bin is missing"):
        write(path, key={"source": 1})
    assert not path.exists()


def test_a_name_that_is_taken_meanwhile_is_not_replaced_and_no_work_is_lost(tmp_path, path):
    writer = DatasetWriter(path, resume_key={"source": 1})
    writer.write_table("node", "n", "k", ROWS)
    write_dataset(tmp_path / "other.gids").rename(path)
    with pytest.raises(FileExistsError, match=r"a\.gids already exists"):
        writer.commit()
    writer.close(discard=False)
    assert "paper.feat" in FeatureStore(path).tables
    path.rename(tmp_path / "other.gids")
    writer = DatasetWriter(path, resume_key={"source": 1})
    assert writer.resumed
    writer.close(discard=True)
