"""Host memory for a device, also in a forked child."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref

import numpy as np
import pytest

from gids.cuda.host_memory import host_memory


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


FORKED = """
import os, weakref
from gids.cuda.host_memory import host_memory

memory = host_memory(1 << 16)
start = weakref.ref(memory)
child = os.fork()
del memory
if child == 0:
    os._exit(7 if start() is not None else 1)
assert start() is None
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_child_never_unmaps_it() -> None:
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", FORKED], check=True, timeout=60)
