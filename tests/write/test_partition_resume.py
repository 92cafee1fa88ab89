"""A stopped partition resumes with the same bytes, and an error leaves nothing."""

import contextlib
import os

import numpy as np
import pytest
from datasets import contents
from partition_example import write_rich_dataset

from gids import StorageError
from gids.heat import write_heat
from gids.store import verify
from gids.write import DatasetWriter
from gids.write.partition import partition


@pytest.mark.parametrize("kind", ["rows that end within a page", "a graph of several types"])
def test_a_stopped_partition_resumes_with_the_same_bytes(tmp_path, kind):
    """Stops again and again, each time some bytes later. test_kills.py kills it at its calls."""
    options = {"method": "hash", "memory_bytes": 1 << 20, "sync_bytes": 200_000}
    if kind.startswith("rows"):
        with DatasetWriter(tmp_path / "a.gids", page_bytes=512) as writer:
            rng = np.random.default_rng(0)
            writer.write_table("node", "_N", "feat", rng.integers(0, 99, (20_000, 60)).astype(np.uint8))
    else:
        write_rich_dataset(tmp_path / "a.gids")
        options |= {"sync_bytes": 20_000}
    totals, said, progress = [], [], []
    partition(tmp_path / "a.gids", tmp_path / "undisturbed", 3, on_total=totals.append, **options)
    stops = 0

    def stop(size):
        progress.append(size)
        if sum(progress) > totals[0] * (stops + 1) / 5:
            raise KeyboardInterrupt

    while not (tmp_path / "parts").exists():
        progress.clear()
        said.clear()
        with contextlib.suppress(KeyboardInterrupt):
            partition(tmp_path / "a.gids", tmp_path / "parts", 3, say=said.append, on_bytes=stop, **options)
        stops += 1
    assert stops == 5
    assert said[0] == "resuming an unfinished partition"
    assert sum(progress) == totals[0]
    assert contents(tmp_path / "parts") == contents(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gids", "parts", "undisturbed"]


def test_a_changed_dataset_or_option_starts_again(dataset, tmp_path):
    sizes = []

    def interrupt(size):
        sizes.append(size)
        if len(sizes) % 2 == 0:  # one step is done
            raise KeyboardInterrupt

    def interrupted(**options):
        with pytest.raises(KeyboardInterrupt):
            partition(dataset, tmp_path / "parts", 2, on_bytes=interrupt, **options)
        assert (tmp_path / "parts.partial").is_dir()

    interrupted()
    said = []
    partition(dataset, tmp_path / "parts", 3, method="range", say=said.append)
    assert said == ["found an unfinished partition, but --parts, --by changed: starting again"]
    interrupted(overwrite=True)
    write_heat(dataset, "sampled", {"paper": np.ones(20)})
    said.clear()
    partition(dataset, tmp_path / "parts", 2, overwrite=True, say=said.append)
    assert said == ["found an unfinished partition, but the dataset changed: starting again"]
    assert list(verify(tmp_path / "parts")) == []


def test_a_run_that_was_killed_after_publishing_is_complete(dataset, tmp_path, monkeypatch):
    from gids.write import workplace

    monkeypatch.setattr(workplace, "clean_up", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        partition(dataset, tmp_path / "parts", 2)
    assert list(verify(tmp_path / "parts")) == []
    monkeypatch.undo()
    said = []
    assert partition(dataset, tmp_path / "parts", 2, say=said.append) is None
    assert said == ["the parts are complete; removed the temporary files of an earlier run that was killed"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mag.gids", "parts"]


def test_too_little_space_is_found_before_anything_is_written(dataset, tmp_path, monkeypatch):
    real = os.statvfs

    def full(path):
        found = real(path)
        return os.statvfs_result((found.f_bsize, found.f_frsize, found.f_blocks, 1, 1, *tuple(found)[5:10]))

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(StorageError, match="not enough room, and nothing more was written"):
        partition(dataset, tmp_path / "parts", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["mag.gids"]
