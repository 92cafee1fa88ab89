"""Host memory for a device, also in a forked child."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from children import ended

from gids.cuda import host_memory as module
from gids.cuda.host_memory import SharedFile, host_memory, open_shared, share_memory


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 3 << 20])
def test_host_memory_is_zeroed_page_aligned_and_freed_with_the_last_array(nbytes: int) -> None:
    memory = host_memory(nbytes)
    array, gone = np.frombuffer(memory, np.uint8), weakref.ref(memory)
    del memory
    assert len(array) == max(1, nbytes)
    assert not array.any()
    assert array.ctypes.data % mmap.PAGESIZE == 0
    del array
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child_never_unmaps_it(shared: bool) -> None:
    if shared:
        memory, file = share_memory(1 << 16)
        os.close(file.descriptor)
    else:
        memory = host_memory(1 << 16)
    alive = weakref.ref(memory)

    def drop() -> None:
        nonlocal memory
        del memory
        assert alive() is not None
        assert inodes_mapped() == set()

    ended(drop)
    del memory
    assert alive() is None


def inodes_mapped() -> set[int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in maps if "memfd:gids" in line}


@pytest.mark.few(1)
@pytest.mark.parametrize("nbytes", [1, 5000, 3 << 20])
@pytest.mark.parametrize("kernel", ["new", "old"])
def test_shared_memory_is_that_of_another_process(
    nbytes: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "old":
        monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 12345)  # as before Linux 5.14: unknown
    memory, file = share_memory(nbytes)
    array = np.frombuffer(memory, np.uint8)
    assert len(array) == nbytes
    assert not array.any()
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert os.fstat(file.descriptor).st_blocks * 512 >= nbytes, "all of it is allocated"
    array[:] = 7

    def write() -> None:
        other = np.frombuffer(open_shared(file, nbytes), np.uint8)
        assert (other == 7).all()
        other[-1] = 9

    ended(write)
    assert array[-1] == 9
    os.close(file.descriptor)
    assert inodes_mapped() == {file.inode}
    array[-1] = 1  # without the file
    del memory, array
    gc.collect()
    assert inodes_mapped() == set()


def test_only_the_shared_memory_itself_is_opened(tmp_path: Path) -> None:
    memory, file = share_memory(5000)
    same = open_shared(file, 5000)
    same[17] = 5
    assert memory[17] == 5
    with open(tmp_path / "other", "wb") as other:
        other.truncate(5000)
        for wrong in (file._replace(inode=file.inode + 1), file._replace(descriptor=other.fileno())):
            with pytest.raises(FileNotFoundError, match="is not the shared memory of 5000 bytes"):
                open_shared(wrong, 5000)
    with pytest.raises(FileNotFoundError, match="is not the shared memory of 5001 bytes"):
        open_shared(file, 5001)
    os.close(file.descriptor)
    with pytest.raises(FileNotFoundError):
        open_shared(file, 5000)
    assert isinstance(file, SharedFile)


def test_shared_memory_that_the_machine_does_not_have_is_an_error_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        share_memory(1 << 46)
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 12345)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        share_memory(5000)
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert inodes_mapped() == set()
