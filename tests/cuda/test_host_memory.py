"""Host memory for a device, also in a forked child, and on the NUMA node of a GPU.

The machine with several nodes is described by files; the mappings are real.
"""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from children import ended

from gids.cuda.host_memory import host_memory, numa_node, open_shared, prefer_node, share_memory


@pytest.mark.parametrize("nbytes", [0, 5000])
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


def test_shared_memory_is_that_of_another_process() -> None:
    nbytes = 5000
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


@pytest.mark.parametrize(("node", "found"), [("1", 1), ("-1", None), ("", None)])  # -1: not known
def test_the_node_of_a_gpu_is_read_from_sysfs(tmp_path: Path, node: str, found: int | None) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node + "\n")
    assert numa_node("0000:3B:00.0", tmp_path) == found
    assert numa_node("0000:00:00.0", tmp_path) is None


def policy(address: int) -> str:
    """The policy of the mapping of this process that an address is in, by the kernel."""
    with open("/proc/self/maps") as file:
        spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in file]
    (start,) = [span[0] for span in spans if span[0] <= address < span[1]]
    with open("/proc/self/numa_maps") as file:
        (found,) = [line.split()[1] for line in file if int(line.split()[0], 16) == start]
    return found


@pytest.fixture
def memory() -> np.ndarray:
    """A mapping on which the kernel takes policies; skips where it does not."""
    array = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    if not Path("/proc/self/numa_maps").exists() or not prefer_node(array.ctypes.data, 4096, 0):
        pytest.skip("the kernel has no NUMA policies")
    return np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)


def test_the_kernel_prefers_the_node(memory: np.ndarray) -> None:
    assert not prefer_node(memory.ctypes.data, memory.nbytes, None)
    assert policy(memory.ctypes.data) == "default"
    assert prefer_node(memory.ctypes.data, memory.nbytes, 0)
    assert policy(memory.ctypes.data) == "prefer:0"
    shared, file = share_memory(1 << 20, 0)
    assert policy(np.frombuffer(shared, np.uint8).ctypes.data) == "prefer:0"
    os.close(file.descriptor)
