"""kvikio: what the probe finds, and that kvikio reads the bytes of the files.

Most tests run the reader on a module that stands in for kvikio. One test runs kvikio itself, on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice

from gids.cuda import Device
from gids.errors import StorageError
from gids.io.device import kvikio_reader
from gids.io.device.kvikio_reader import KvikioReader, open_kvikio_reader, why_no_gds

has_kvikio = pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")


class FakeKvikio(ModuleType):
    """kvikio, which reads files into arrays. fails_at: number of the read that fails, 0 for opening. error:
    of that read. at_once: it fails in pread() itself. running: reads that were not waited for."""

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.CompatMode = SimpleNamespace(OFF="OFF", ON="ON")
        self.fails_at, self.reads, self.closed = -1, 0, 0
        self.error: Exception = RuntimeError("posix.cc:12\nInput/output error")
        self.at_once, self.running = False, 0
        self.options = {"gds_threshold": 16384, "num_threads": 1, "compat_mode": "ON"}
        self.defaults: Any = ModuleType("kvikio.defaults")
        self.defaults.get, self.defaults.set = self.options.get, self._set

    def _set(self, changes: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        before = {name: self.options[name] for name in changes}
        self.options.update(changes)
        stack = contextlib.ExitStack()
        stack.callback(self.options.update, before)
        return stack  # type: ignore[return-value]

    def CuFile(self, path: str, flags: str) -> Any:
        assert self.options["compat_mode"] == "OFF"
        if self.fails_at == 0:
            raise RuntimeError("cufile.cc:7\nno GDS on this file system")
        fd = os.open(path, os.O_RDONLY)
        return SimpleNamespace(pread=partial(self._pread, fd), close=partial(self._close, fd))

    def _close(self, fd: int) -> None:
        self.closed += 1
        os.close(fd)

    def _pread(self, fd: int, array: np.ndarray, nbytes: int, offset: int) -> Any:
        assert self.options["compat_mode"] == "ON", "the mode is process-wide, and this reader's only"
        self.reads += 1
        number = self.reads
        if number == self.fails_at and self.at_once:
            raise self.error
        self.running += 1

        def get() -> int:
            self.running -= 1
            if number == self.fails_at:
                raise self.error
            return os.preadv(fd, [array[:nbytes]], offset)

        return SimpleNamespace(get=get)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> FakeKvikio:
    made = FakeKvikio()
    monkeypatch.setitem(sys.modules, "kvikio", made)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", made.defaults)
    monkeypatch.setattr(kvikio_reader, "why_no_gds", lambda *_, **__: "")
    return made


def test_runs_are_read_by_kvikio_in_its_own_mode(
    kvikio: FakeKvikio, shards: list[Path], contents: list[np.ndarray]
) -> None:
    environment = os.environ.get("KVIKIO_COMPAT_MODE")
    reader = open_kvikio_reader(EmulatedDevice(), shards[:2])
    assert reader is not None
    assert reader.threshold == 16384
    assert os.environ.get("KVIKIO_COMPAT_MODE") == environment
    rng = np.random.default_rng(1)
    for _ in range(2):
        lengths = rng.choice([100, 5000, 16384, 60_000], 90)
        files, offsets = rng.integers(0, 2, 90).astype(np.uint32), rng.integers(0, 100 * 4096, 90)
        out_offsets = np.cumsum(lengths) - lengths
        out = torch.full((int(lengths.sum()),), 170, dtype=torch.uint8)
        reader.read(files, offsets, lengths, out, out_offsets)
        expected = [contents[f][o : o + n] for f, o, n in zip(files, offsets, lengths, strict=True)]
        assert np.array_equal(out.numpy(), np.concatenate(expected))
    end, one = np.array([len(contents[0]) - 60]), np.zeros(1, np.int64)
    with pytest.raises(StorageError, match=r"cannot read 100 bytes: .*read 60") as caught:
        reader.read(one.astype(np.uint32), end, one + 100, out, one)
    assert (caught.value.filename, caught.value.offset) == (str(shards[0]), end[0])
    reader.close()
    reader.close()
    assert kvikio.closed == 2
    with pytest.raises(RuntimeError, match="closed"):
        reader.read(files, offsets, lengths, out, out_offsets)


@pytest.mark.parametrize(
    ("at_once", "error"), [(True, RuntimeError("a.cc:1\nno context")), (False, MemoryError())], ids=repr
)
def test_whatever_kvikio_raises_is_a_storage_error_once_no_read_runs_any_more(
    kvikio: FakeKvikio, shards: list[Path], at_once: bool, error: Exception
) -> None:
    """A read that still runs would go on writing to the memory."""
    kvikio.fails_at, kvikio.at_once, kvikio.error = 3, at_once, error
    out, offsets = torch.zeros(5 * 16384, dtype=torch.uint8), np.arange(5) * 16384
    with open_kvikio_reader(EmulatedDevice(), shards[:1]) as reader:
        with pytest.raises(
            StorageError, match=r"cannot read 16384 bytes: .*(no context|MemoryError)"
        ) as caught:
            reader.read(np.zeros(5, np.uint32), offsets, np.full(5, 16384), out, offsets)
    assert (caught.value.filename, caught.value.offset) == (str(shards[0]), 2 * 16384)
    assert kvikio.reads == (3 if at_once else 5)
    assert kvikio.running == 0
    assert kvikio.closed == 1


def test_without_gds_there_is_no_reader_and_the_log_says_why_once(
    kvikio: FakeKvikio, shards: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gids")
    kvikio.fails_at = 0
    for _ in range(2):
        assert open_kvikio_reader(EmulatedDevice(), shards) is None
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("hot pages are read through host memory: ")
    assert "kvikio cannot open it (no GDS on this file system)" in said


@pytest.mark.gpu
@has_kvikio
def test_kvikio_reads_the_bytes_of_the_file_into_a_device(device: Device, shards: list[Path]) -> None:
    """By GPUDirect Storage if the machine has it, else in compatibility mode."""
    if device.torch_device.type != "cuda":
        pytest.skip("kvikio needs a CUDA device")
    no_gds = why_no_gds(shards[0], device.torch_device.index or 0)
    print(no_gds)
    offsets = np.random.default_rng(2).permutation(150) * 4096 + 7
    out, out_offsets = device.zeros(150 * 4096, torch.uint8), np.arange(150) * 4096
    with KvikioReader(device, shards[:2], gds=not no_gds) as reader:
        reader.read(np.zeros(150, np.uint32), offsets, np.full(150, 4001), out, out_offsets)
    read, contents = out.cpu().numpy(), np.fromfile(shards[0], np.uint8)
    for offset, at in zip(offsets, out_offsets, strict=True):
        assert np.array_equal(read[at : at + 4001], contents[offset : offset + 4001])


@pytest.fixture
def fake_kvikio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The __init__.py of a package kvikio, empty, for children, which cuFile is told to try."""
    package = tmp_path / "packages" / "kvikio"
    package.mkdir(parents=True)
    init = package / "__init__.py"
    init.touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", "true")
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "none"))
    return init


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(os.urandom(2 << 20))
    return path


def probe(file: Path, **options: Any) -> str:
    """A try, of a device that was not tried before."""
    return why_no_gds(file, next(INDICES), **options)


INDICES = itertools.count(1000)
ANSWERS = """
import json, os, sys
assert os.environ["KVIKIO_COMPAT_MODE"] == "OFF"
assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false", "cuFile may go through host memory"
print("noise")
print(json.dumps({says!r}), flush=True)
sys.exit()
"""


@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        (ANSWERS.format(says=""), {}, ""),
        (ANSWERS.format(says="cuFile error"), {}, "GPUDirect Storage does not work: cuFile error"),
        ("import a_missing_library", {}, "does not work: ModuleNotFoundError: No module named 'a_missing"),
        ("import time\ntime.sleep(3600)", {}, "GPUDirect Storage does not work: no answer within 0.2 s"),
        ("", {"KVIKIO_COMPAT_MODE": "on"}, "KVIKIO_COMPAT_MODE=on forbids GPUDirect Storage"),
        ("", {"CUFILE_USE_PCIP2PDMA": "0"}, "GPUDirect Storage needs nvidia-fs (not loaded)"),
    ],
    ids=["answers", "refuses", "fails", "hangs", "forbidden", "no way to the device"],
)
def test_the_probe_tells_in_words_what_is_missing(
    fake_kvikio: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    settings: dict[str, str],
    expected: str,
) -> None:
    """It begins no try that cannot work: one may hang, and took ten seconds on a machine without GDS."""
    if "not loaded" in expected and Path("/proc/driver/nvidia-fs/version").exists():
        pytest.skip("nvidia-fs is loaded")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    fake_kvikio.write_text(source)
    found = probe(file, timeout_s=0.2 if "sleep" in source else 30)
    assert expected in found
    assert bool(expected) == bool(found)


DRIVER_OF_HOST_MEMORY = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuGetErrorString(int status, const char** text) { *text = "failed"; return 0; }
int cuMemAlloc_v2(void** memory, size_t n) { *memory = malloc(n); return 0; }
int cuMemsetD8_v2(void* memory, unsigned char value, size_t n) { memset(memory, value, n); return 0; }
int cuMemcpyHtoD_v2(void* to, const void* from, size_t n) { memcpy(to, from, n); return 0; }
int cuMemcpyDtoH_v2(void* to, const void* from, size_t n) { memcpy(to, from, n); return 0; }
"""
KVIKIO_THAT_READS = """
import ctypes
__version__ = "1"
class CuFile:
    def __init__(self, path, flags):
        self.file = open(path, "rb")
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def pread(self, buffer, nbytes, offset):
        self.done = nbytes
        address = buffer.__cuda_array_interface__["data"][0]
        {does}
        return self
    def get(self):
        return self.done
"""


def test_kvikio_is_used_only_if_it_reads_what_the_file_has(
    fake_kvikio: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a libcuda whose device memory is host memory."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "stub.c").write_text(DRIVER_OF_HOST_MEMORY)
    subprocess.run(["cc", "-shared", "-fPIC", "stub.c", "-o", "libcuda.so.1"], check=True, cwd=tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    for does, wrong in (
        ("ctypes.memmove(address, self.file.read(nbytes), nbytes)", ""),
        ("ctypes.memset(address, 0, nbytes)", "it read wrong bytes"),
        ("ctypes.memmove(address, self.file.read(nbytes - 1), nbytes - 1)", "it read wrong bytes"),
    ):
        fake_kvikio.write_text(KVIKIO_THAT_READS.replace("{does}", does))
        assert probe(file).endswith(wrong) if wrong else probe(file) == ""
    file.write_bytes(bytes(5000))
    assert "all bytes of the file are equal" in probe(file)
