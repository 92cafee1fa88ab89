"""Publishing: after a kill, an error or a race, the old dataset or the new one is there; then a cleanup.

test_kills.py kills every command at many calls; these are the named cases.
"""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
from functools import partial

import numpy as np
import pytest
import torch
from children import killed
from datasets import damage, read_source, write_dataset
from full_disk import fuse, overlay, small_disk

from gids import FeatureStore, FormatError, StorageError
from gids.convert import Options, convert
from gids.heat import write_heat
from gids.store import verify
from gids.store.part import part_paths
from gids.write import DatasetWriter, publish, workplace
from gids.write.journal import Journal
from gids.write.partition import partition
from gids.write.publish import changing


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "feat.npy", np.arange(4000, dtype=np.float32).reshape(500, 8))
    return tmp_path / "feat.npy"


def converted(source, path, said=None, stripe=(), **options):
    convert(
        [source],
        lambda scratch: read_source(source, scratch),
        path,
        Options(workers=1, memory_bytes=1 << 20, stripe=tuple(map(str, stripe)), **options),
        say=(said if said is not None else []).append,
    )


def killed_when_published(source, path, disks=(), **options):
    target, name = (publish, "_exchange") if path.exists() else (workplace, "put_in_place")
    work = lambda: converted(source, path, stripe=disks, **options)  # noqa: E731
    killed(work, target, name, after=True)


def check_rows(path, disks, expected=None):
    assert list(verify(path, allow_dirs=disks)) == []
    rows = FeatureStore(path, allow_dirs=disks).read_rows(torch.arange(500))
    assert torch.equal(rows, torch.arange(4000.0).reshape(500, 8) if expected is None else expected)


def folders(disks):
    return sorted(folder for disk in disks for folder in disk.iterdir())


@pytest.mark.parametrize("replaces", [False, True])
def test_same_command_after_a_kill_keeps_the_published_dataset_and_its_shards(
    tmp_path, disks, source, replaces
):
    path, said, options = tmp_path / "a.gids", [], {"stripe": disks, "overwrite": replaces}
    if replaces:
        converted(source, path, stripe=disks, page_bytes=512)
    killed_when_published(source, path, disks, overwrite=replaces)
    check_rows(path, disks)
    converted(source, path, said, **options)
    check_rows(path, disks)
    assert said == ["the dataset is complete; removed the temporary files of an earlier run that was killed"]
    assert len(folders(disks)) == 3, "the shards of the replaced dataset are gone"
    assert not (tmp_path / "a.gids.partial").exists()
    with pytest.raises(FileExistsError, match=r"a\.gids already exists: choose another name, or replace it"):
        converted(source, path, stripe=disks)


def test_other_command_after_a_kill_keeps_the_published_dataset_until_it_is_done(tmp_path, disks, source):
    path = tmp_path / "a.gids"
    converted(source, path, stripe=disks, page_bytes=512)
    killed_when_published(source, path, disks, overwrite=True)
    with pytest.raises(FileExistsError, match=r"a\.gids already exists"):
        DatasetWriter(path, resume_key={"other": 1})
    check_rows(path, disks)
    writer = DatasetWriter(path, resume_key={"other": 1}, overwrite=True)
    check_rows(path, disks)
    assert not writer.resumed
    assert writer.restart_reason == ""
    assert len(folders(disks)) == 3
    writer.close(discard=True)
    check_rows(path, disks)


def test_a_writer_with_the_same_key_does_not_resume_what_it_replaced(tmp_path):
    """Between the rename and the removal of what was replaced, dataset/ has the old data."""
    path = write_dataset(tmp_path / "a.gids")

    def work():
        with DatasetWriter(path, overwrite=True, resume_key={"k": 1}) as writer:
            writer.write_labels("n", torch.arange(7))
            assert not writer.resumed

    killed(work, publish, "_exchange", after=True)
    assert FeatureStore(path).node_types == ["n"], "it was published"
    work()
    assert list(verify(path)) == []
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("of_parts", [False, True])
def test_a_damaged_dataset_that_was_replaced_by_an_equal_one_does_not_come_back(tmp_path, source, of_parts):
    """The same conversion again gives an equal manifest: it does not tell which of the two was published."""
    path, whole = tmp_path / "a.gids", tmp_path / "whole.gids"
    converted(source, whole)

    def work():
        if of_parts:
            partition(whole, path, 2, overwrite=True, memory_bytes=1 << 20)
        else:
            converted(source, path, overwrite=True)

    work()
    damage(next(path.rglob("shard-00.bin")), b"damage")
    assert path_faults(path)
    killed(work, publish, "_exchange", after=True)
    assert path_faults(path) == []
    work()
    assert path_faults(path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gids", "feat.npy", "whole.gids"]


@pytest.mark.parametrize("is_exchanged", [True, False])
@pytest.mark.parametrize("change", ["heat", "copy"])
def test_nor_if_the_new_one_got_heat_or_both_were_copied(tmp_path, source, is_exchanged, change):
    path, copy = tmp_path / "a.gids", tmp_path / "copy"
    converted(source, path)
    damage(next(path.rglob("shard-00.bin")), b"damage")
    killed(lambda: converted(source, path, overwrite=True), publish, "_exchange", after=is_exchanged)
    if change == "heat":
        write_heat(path, "sampled", {FeatureStore(path).node_types[0]: np.ones(500)})
    else:
        for name in ("a.gids", "a.gids.partial"):
            shutil.copytree(tmp_path / name, copy)
            shutil.rmtree(tmp_path / name)
            copy.rename(tmp_path / name)
    converted(source, path, overwrite=True)
    check_rows(path, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gids", "feat.npy"]


def test_a_manifest_that_is_half_written_when_a_publication_resumes_is_not_taken_for_the_old_one(
    tmp_path, source, monkeypatch
):
    path, said = tmp_path / "a.gids", []
    converted(source, path)
    damage(next(path.rglob("shard-00.bin")), b"damage")
    work = lambda: converted(source, path, said, overwrite=True)  # noqa: E731
    killed(work, publish, "_exchange")
    with monkeypatch.context() as patch:
        patch.setattr(workplace, "write_synced", lambda file, _: file.write_bytes(b""))
        killed(work, workplace, "faults")
    work()
    assert said == ["resuming an unfinished conversion"]
    check_rows(path, [])


def path_faults(path):
    return [fault for root in part_paths(path) or [path] for fault in verify(root)]


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_published_dataset_that_was_moved_or_removed_is_made_again(tmp_path, disks, source, is_moved):
    path, moved = tmp_path / "a.gids", tmp_path / "b.gids"
    killed_when_published(source, path, disks)
    if is_moved:
        path.rename(moved)
    else:
        shutil.rmtree(path)
    converted(source, path, stripe=disks)
    converted(source, path, stripe=disks, page_bytes=512, overwrite=True)
    for dataset in (path, moved)[: 1 + is_moved]:
        check_rows(dataset, disks)


def test_replacing_a_copy_keeps_the_shards_of_the_original_dataset(tmp_path, disks, source):
    converted(source, tmp_path / "a.gids", stripe=disks)
    shutil.copytree(tmp_path / "a.gids", tmp_path / "b.gids")
    converted(source, tmp_path / "b.gids", overwrite=True)
    check_rows(tmp_path / "a.gids", disks)
    converted(source, tmp_path / "a.gids", overwrite=True)
    assert folders(disks) == []


@pytest.mark.parametrize("same_command", [True, False])
def test_kill_between_two_renames_is_repaired(tmp_path, disks, source, monkeypatch, same_command):
    path = tmp_path / "a.gids"
    converted(source, path, stripe=disks, page_bytes=512)
    monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    renames = []
    rename = os.rename

    def rename_once(a, b):
        if len(renames) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        renames.append(rename(a, b))

    def work():
        monkeypatch.setattr(publish.os, "rename", rename_once)
        converted(source, path, stripe=disks, page_bytes=4096, overwrite=True)

    killed(work, publish, "clean_up", after=False)
    with pytest.raises(
        FileNotFoundError, match=r"no dataset at .*a\.gids: a conversion .* Run the same command"
    ):
        FeatureStore(path)
    if same_command:
        converted(source, path, stripe=disks, page_bytes=4096, overwrite=True)
        assert FeatureStore(path, allow_dirs=disks).table("feat").page_bytes == 4096
        assert not (tmp_path / "a.gids.partial").exists()
    else:
        with pytest.raises(FileExistsError, match=r"a\.gids already exists"):
            DatasetWriter(path, resume_key={"other": 1})
        assert FeatureStore(path, allow_dirs=disks).table("feat").page_bytes == 512
    check_rows(path, disks)


@pytest.mark.parametrize("resumable", [False, True])
def test_an_interrupt_between_two_renames_keeps_the_old_dataset(tmp_path, monkeypatch, source, resumable):
    path, rename = write_dataset(tmp_path / "a.gids"), os.rename

    def interrupted(old, new):
        rename(old, new)
        monkeypatch.setattr(os, "rename", rename)
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", interrupted)
    write = partial(converted, source) if resumable else write_dataset
    with pytest.raises(KeyboardInterrupt):
        write(path, overwrite=True)
    assert (tmp_path / "a.gids.partial").exists() == resumable
    assert list(verify(path)) == []


def test_a_dataset_in_the_lower_layer_of_an_overlay_is_replaced_after_the_advice_was_followed(
    tmp_path, source
):
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    lower.mkdir()
    upper.mkdir()
    write_dataset(lower / "a.gids")
    with overlay(lower, upper) as place:
        path = place / "a.gids"
        with pytest.raises(StorageError, match="lower layer of an overlay file system") as caught:
            converted(source, path, overwrite=True)
        assert caught.value.errno == errno.EXDEV
        assert list(verify(path)) == []
        [advice] = re.findall(r"upper layer \((mv .*)\), then", str(caught.value))
        subprocess.run(advice, shell=True, check=True)
        said = []
        converted(source, path, said, overwrite=True)
        assert "resuming an unfinished conversion" in said
        assert list(FeatureStore(path).tables) == ["_N.feat"]
        assert os.listdir(place) == ["a.gids"]


def test_nothing_but_the_dataset_is_left_in_fuse(tmp_path):
    """It keeps a file that was removed beside the others until it is closed."""
    with fuse(tmp_path) as place:
        write_dataset(place / "a.gids")
        assert os.listdir(place) == ["a.gids"]
        with pytest.raises(KeyError), DatasetWriter(place / "b.gids"):
            raise KeyError
        assert os.listdir(place) == ["a.gids"]


def test_a_mount_point_is_refused_before_the_conversion(tmp_path):
    with small_disk("1m") as place:
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match="is a mount point, which cannot be replaced"):
                DatasetWriter(place, overwrite=overwrite)
        shutil.copytree(write_dataset(tmp_path / "a.gids"), place, dirs_exist_ok=True)
        with pytest.raises(FileExistsError, match="or mount the directory that it is in"):
            DatasetWriter(place, overwrite=True)
        assert not place.with_name(f"{place.name}.partial").exists()


def test_a_dataset_below_a_link_to_another_disk_is_replaced(tmp_path):
    with small_disk("4m") as disk:
        (tmp_path / "link").symlink_to(disk)
        for overwrite in (False, True):
            path = write_dataset(tmp_path / "link/a.gids", overwrite=overwrite)
        assert list(verify(path)) == []


def test_a_subvolume_of_btrfs_is_no_mount_point(tmp_path, source, monkeypatch):
    path = tmp_path / "a.gids"
    converted(source, path)
    monkeypatch.setattr(os.path, "ismount", lambda _: True)  # as for a subvolume
    converted(source, path, overwrite=True)
    assert list(verify(path)) == []


def test_directory_that_took_the_name_between_two_renames_is_kept(tmp_path, source):
    path = tmp_path / "a.gids"
    converted(source, path)
    (tmp_path / "a.gids.partial").mkdir()
    journal = Journal(tmp_path / "a.gids.partial/journal", {"k": 1})
    journal.restart({"k": 1}, [])
    new = tmp_path / "a.gids.partial/dataset"
    write_dataset(new)
    journal.record(publication=publish.publication(new.parent, path))
    journal.close()
    path.rename(tmp_path / "a.gids.partial/replaced")
    path.mkdir()
    for overwrite in (False, True):
        with pytest.raises(
            FileExistsError, match=r"a\.gids exists, so the dataset that had this name and is now .* cannot"
        ):
            DatasetWriter(path, resume_key={"k": 1}, overwrite=overwrite)
    path.rmdir()
    with pytest.raises(FileExistsError, match=r"a\.gids already exists"):
        DatasetWriter(path, resume_key={"k": 1})
    check_rows(path, [])


def test_an_error_after_publishing_does_not_remove_the_new_shards(tmp_path, disks, source, monkeypatch):
    path = tmp_path / "a.gids"
    converted(source, path, stripe=disks, page_bytes=512)
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise PermissionError(13, "Permission denied")

        patch.setattr(workplace, "clean_up", fail)
        match = r"the dataset is published, but Permission denied .*; the next command .*a\.gids\.partial"
        with pytest.raises(StorageError, match=match):
            with DatasetWriter(path, stripe=disks, overwrite=True) as writer:
                writer.write_table("node", "_N", "feat", torch.arange(4000.0).reshape(500, 8))
        check_rows(path, disks)
    with DatasetWriter(path, stripe=disks, overwrite=True) as writer:
        writer.write_table("node", "_N", "feat", -torch.arange(4000.0).reshape(500, 8))
    check_rows(path, disks, -torch.arange(4000.0).reshape(500, 8))
    assert len(folders(disks)) == 3
    assert not (tmp_path / "a.gids.partial").exists()


@pytest.mark.parametrize("other_key", [False, True])
def test_work_that_is_being_removed_is_not_resumed(tmp_path, monkeypatch, other_key):
    """Killed while it throws work away, because the source is no good or because another command begins."""
    path = tmp_path / "a.gids"
    writer = DatasetWriter(path, resume_key={"k": 1})
    writer.write_table("node", "n", "k", torch.ones(5))
    writer.close(discard=False)
    rmtree = shutil.rmtree

    def die(place, *arguments, **options):
        if os.path.basename(place) == "dataset":
            rmtree(os.path.join(place, "tables"))
            os.kill(os.getpid(), signal.SIGKILL)
        rmtree(place, *arguments, **options)

    def work():
        monkeypatch.setattr(shutil, "rmtree", die)
        if other_key:
            DatasetWriter(path, resume_key={"k": 2})
        DatasetWriter(path, resume_key={"k": 1}).close(discard=True)

    killed(work, os, "_exit", after=False)
    with DatasetWriter(path, resume_key={"k": 1}) as writer:
        assert not writer.resumed
        writer.write_table("node", "n", "k", torch.ones(5))
    assert list(verify(path)) == []


def test_missing_finished_file_is_found_before_publishing(tmp_path):
    path = write_dataset(tmp_path / "a.gids")
    writer = DatasetWriter(path, resume_key={"k": 1}, overwrite=True)
    writer.write_table("node", "n", "k", torch.ones(5))
    writer.close(discard=False)
    (tmp_path / "a.gids.partial/dataset/tables/n.k/shard-00.bin").unlink()
    writer = DatasetWriter(path, resume_key={"k": 1}, overwrite=True)
    writer.write_table("node", "n", "k", torch.ones(5))
    with pytest.raises(FormatError, match=r"n\.k/shard-00\.bin is missing"):
        writer.commit()
    writer.close(discard=True)
    assert list(verify(path)) == []
    assert list(tmp_path.iterdir()) == [path]


def test_name_taken_by_another_writer_is_not_replaced_and_no_work_is_lost(tmp_path, source):
    path = tmp_path / "a.gids"
    taken = []

    def take(_):
        if not taken:
            taken.append(write_dataset(tmp_path / "other.gids").rename(path))

    def run(**options):
        open_source = lambda scratch: read_source(source, scratch)  # noqa: E731
        convert([source], open_source, path, Options(**options), on_bytes=take)

    with pytest.raises(FileExistsError, match=r"a\.gids already exists: choose another name, or replace it"):
        run()
    assert list(verify(path)) == []
    assert "paper.feat" in FeatureStore(path).tables
    run(overwrite=True)
    check_rows(path, [])


def test_a_symbolic_link_is_followed(tmp_path, source):
    (tmp_path / "disk").mkdir()
    converted(source, tmp_path / "disk/a.gids", page_bytes=512)
    link = tmp_path / "a.gids"
    link.symlink_to("disk/a.gids")
    converted(source, link, page_bytes=4096, overwrite=True)
    assert link.is_symlink()
    assert FeatureStore(link).table("feat").page_bytes == 4096
    check_rows(tmp_path / "disk/a.gids", [])
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["a.gids"]


def test_a_dataset_is_not_replaced_while_another_writer_changes_it(tmp_path, source, monkeypatch):
    path = tmp_path / "a.gids"
    converted(source, path)
    waiting = threading.Event()
    flock = fcntl.flock

    def noted(fd, operation):
        if threading.current_thread() is thread and operation == fcntl.LOCK_EX:
            waiting.set()
        flock(fd, operation)

    def replace():
        with DatasetWriter(path, overwrite=True) as writer:
            writer.write_table("node", "n", "k", torch.ones(5))

    thread = threading.Thread(target=replace)
    with changing(path, "the change"):
        monkeypatch.setattr(fcntl, "flock", noted)
        thread.start()
        assert waiting.wait(60)
        check_rows(path, [])
    thread.join()
    assert list(FeatureStore(path).tables) == ["n.k"]


def test_waiting_writer_changes_the_new_dataset(tmp_path, source, monkeypatch):
    path, flock = tmp_path / "a.gids", fcntl.flock
    converted(source, path)

    def replace_first(fd, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.rename(tmp_path / "b.gids")
        write_dataset(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with changing(path, "the change"):
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


def test_journal_removed_by_its_writer_is_not_used(tmp_path, monkeypatch):
    path, flock = tmp_path / "a.gids.partial/journal", fcntl.flock

    def remove_first(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        path.parent.rmdir()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    journal = Journal(path, None)
    journal.restart(None, [])
    assert path.stat().st_size > 0
    with pytest.raises(BlockingIOError):
        Journal(path, None)
    journal.close()


def test_failed_record_leaves_the_journal_unchanged(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "a.gids.partial/journal", {"k": 1})
    journal.restart({"k": 1}, [])
    size = os.path.getsize(tmp_path / "a.gids.partial/journal")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.record(item="table x", done=7)
    assert os.path.getsize(tmp_path / "a.gids.partial/journal") == size
    journal.close()


def test_work_of_another_version_is_removed_without_other_data(tmp_path, source):
    """A version that recorded other things may have left the dataset that it replaced in dataset/."""
    path, partial = tmp_path / "a.gids", tmp_path / "a.gids.partial"
    converted(source, path)
    write_dataset(tmp_path / "old.gids")
    partial.mkdir()
    (tmp_path / "old.gids").rename(partial / "dataset")
    (partial / "journal").write_text(
        '{"journal": "gids journal 1", "id": "0", "key": {"k": 1}, "folders": []}\n'
    )
    writer = DatasetWriter(path, resume_key={"k": 1}, overwrite=True)
    assert not writer.resumed
    assert writer.restart_reason == "it was begun by another version of gids"
    writer.close(discard=True)
    check_rows(path, [])
    assert not partial.exists()


def test_folder_without_a_mark_is_kept(tmp_path):
    folder = tmp_path / "a.gids.shards-00000000"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    publish.remove_shard_folder(folder, tmp_path / "a.gids")
    assert (folder / "thesis.tex").exists()
    (folder / "thesis.tex").unlink()
    publish.remove_shard_folder(folder, tmp_path / "a.gids")  # a writer was killed before it could mark it
    assert not folder.exists()


def test_folder_is_kept_if_a_dataset_that_may_use_it_cannot_be_read(tmp_path, disks, source):
    path = tmp_path / "a.gids"
    converted(source, path, stripe=disks)
    data = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(data.replace(b'"version": 1', b'"version": 9'))
    for folder in folders(disks):
        publish.remove_shard_folder(folder, tmp_path / "b.gids")
    (path / "manifest.json").write_bytes(data)
    check_rows(path, disks)
