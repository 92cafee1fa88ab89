"""Direct writes and writes through the page cache give the same bytes."""

import fcntl
import mmap
import os

import numpy as np
import pytest

from gids.write.files import aligned_zeros, write_directly, write_exactly

DATA = np.random.default_rng(0).integers(0, 256, 16 * 4096, np.uint8)


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def written(fd):
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def is_direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_aligned_pages_are_written_without_a_copy(fd):
    pages = aligned_zeros(16, 4096)
    assert not pages.any()
    pages.reshape(-1)[:] = DATA
    assert pages.ctypes.data % mmap.PAGESIZE == 0
    write_directly(fd)
    before = is_direct(fd)
    write_exactly(fd, pages.reshape(-1), 8192)
    assert is_direct(fd) == before
    write_exactly(fd, np.empty(0, np.uint8), 0)
    assert written(fd)[8192:] == DATA.tobytes()


@pytest.mark.parametrize(("start", "size", "offset"), [(1, 4096, 0), (0, 1000, 0), (0, 4096, 7)])
def test_write_falls_back_to_the_page_cache(fd, start, size, offset):
    memory = aligned_zeros(2, 4096).reshape(-1)
    memory[:] = DATA[:8192]
    write_directly(fd)
    write_exactly(fd, memory[start : start + size], offset)
    assert written(fd)[offset:] == DATA[start : start + size].tobytes()


def test_other_errors_are_raised(tmp_path):
    (tmp_path / "f").touch()
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    write_directly(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_exactly(fd, DATA, 0)
    os.close(fd)
