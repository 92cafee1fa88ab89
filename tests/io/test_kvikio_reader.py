"""kvikio: what the probe finds, and that kvikio reads the same bytes as the pinned reader.

Most tests run the reader on a module that stands in for kvikio. One test runs kvikio itself, on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
from gids.io import Engine, open_engine
from gids.io.device import kvikio_reader
from gids.io.device.extents import PinnedExtentReader
from gids.io.device.kvikio_reader import open_extent_reader, why_no_gds

has_kvikio = pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")


class FakeKvikio(ModuleType):
    """kvikio, which reads files into arrays. fails_at: number of the read that fails, 0 for opening. error:
    of that read. at_once: it fails in pread() itself. running: reads that were not waited for."""

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.CompatMode = SimpleNamespace(OFF="OFF", ON="ON")
        self.fails_at, self.reads, self.calls = -1, 0, list[tuple[str, int]]()
        self.error: Exception = RuntimeError("posix.cc:12\nInput/output error")
        self.at_once, self.running = False, 0
        self.options = {"gds_threshold": 16384, "num_threads": 1, "compat_mode": "ON"}
        self.defaults: Any = ModuleType("kvikio.defaults")
        self.defaults.get, self.defaults.set = self.options.get, self._set
        self.memory_register = lambda array: self.calls.append(("register", array.ctypes.data))
        self.memory_deregister = lambda array: self.calls.append(("deregister", array.ctypes.data))

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
        return SimpleNamespace(
            pread=partial(self._pread, fd), close=lambda: (self.calls.append(("close", 0)), os.close(fd))
        )

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
    monkeypatch.setattr(kvikio_reader, "_logged", set())
    monkeypatch.setattr(kvikio_reader, "why_no_gds", lambda *_, **__: "")
    return made


@pytest.fixture
def engine(shards: list[Path]) -> Iterator[Engine]:
    with open_engine(shards) as opened:
        yield opened


@pytest.mark.parametrize("fails_at", [-1, 1, 30])
def test_long_extents_are_read_by_kvikio_and_after_its_error_none(
    kvikio: FakeKvikio,
    engine: Engine,
    shards: list[Path],
    contents: list[np.ndarray],
    caplog: pytest.LogCaptureFixture,
    fails_at: int,
) -> None:
    caplog.set_level("INFO", "gids")
    kvikio.fails_at, environment = fails_at, os.environ.get("KVIKIO_COMPAT_MODE")
    reader = open_extent_reader(EmulatedDevice(), engine, shards[:2])
    assert os.environ.get("KVIKIO_COMPAT_MODE") == environment
    rng = np.random.default_rng(fails_at + 1)
    outs = []
    for _ in range(2):
        lengths = rng.choice([100, 5000, 16384, 60_000], 90)
        files, offsets = rng.integers(0, 2, 90).astype(np.uint32), rng.integers(0, 100 * 4096, 90)
        out_offsets = np.cumsum(lengths) - lengths
        outs.append(out := torch.full((int(lengths.sum()),), 170, dtype=torch.uint8))
        reader.read(files, offsets, lengths, out, out_offsets)
        expected = [contents[f][o : o + n] for f, o, n in zip(files, offsets, lengths, strict=True)]
        assert np.array_equal(out.numpy(), np.concatenate(expected))
    failed = [r for r in caplog.records if "shard-" in r.getMessage() and "Input/output" in r.getMessage()]
    assert len(failed) == (fails_at > 0)
    assert (kvikio.reads >= 90) == (fails_at < 0)
    reader.close()
    reader.close()
    at = outs[0].data_ptr()
    assert kvikio.calls == [("register", at), ("deregister", at), ("close", 0), ("close", 0)]
    with pytest.raises(RuntimeError, match="closed"):
        reader.read(files, offsets, lengths, out, out_offsets)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("a.cc:1\nno context"), MemoryError()], ids=repr)
def test_pinned_memory_takes_over_after_whatever_kvikio_raises(
    kvikio: FakeKvikio, engine: Engine, shards: list[Path], at_once: bool, error: Exception
) -> None:
    """Once no read of kvikio's runs any more, which would go on writing to the memory."""
    kvikio.fails_at, kvikio.at_once, kvikio.error = 3, at_once, error
    out, offsets = torch.zeros(5 * 16384, dtype=torch.uint8), np.arange(5) * 16384
    with open_extent_reader(EmulatedDevice(), engine, shards[:1]) as reader:
        apart = np.array([1, 3, 0, 4, 2]) * 16384  # so that no two are joined
        reader.read(np.zeros(5, np.uint32), offsets, np.full(5, 16384), out, apart)
    assert kvikio.reads == (3 if at_once else 5)
    assert kvikio.running == 0
    expected = np.frombuffer(shards[0].read_bytes()[: 5 * 16384], np.uint8).reshape(5, -1)
    assert np.array_equal(out.numpy().reshape(5, -1)[[1, 3, 0, 4, 2]], expected)


def test_an_error_without_a_pinned_reader_names_file_and_offset(kvikio: FakeKvikio, tmp_path: Path) -> None:
    (tmp_path / "cut.bin").write_bytes(bytes(100_000))
    reader = kvikio_reader.KvikioReader(EmulatedDevice(), [tmp_path / "cut.bin"], gds=True)
    out, one = torch.zeros(200_000, dtype=torch.uint8), np.zeros(1, np.int64)
    for kvikio.fails_at, offset, said in ((1, 5000, "Input/output error"), (-1, 50_000, "read 50000")):
        with pytest.raises(StorageError, match=rf"cannot read 60000 bytes: .*{said}") as caught:
            reader.read(one.astype(np.uint32), one + offset, one + 60_000, out, one)
        assert (caught.value.filename, caught.value.offset) == (str(tmp_path / "cut.bin"), offset)
    reader.close()


@pytest.mark.parametrize(
    ("obstacle", "why"),
    [
        ("kvikio is not installed", "kvikio is not installed"),
        ("", "kvikio cannot open it (no GDS on this file system)"),
    ],
)
def test_without_gds_extents_go_through_pinned_memory(
    kvikio: FakeKvikio,
    engine: Engine,
    shards: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obstacle: str,
    why: str,
) -> None:
    caplog.set_level("INFO", "gids")
    monkeypatch.setattr(kvikio_reader, "why_no_gds", lambda *_, **__: obstacle)
    kvikio.fails_at = 0
    for _ in range(2):
        reader = open_extent_reader(EmulatedDevice(), engine, shards)
        assert type(reader) is PinnedExtentReader
        reader.close()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("reading extents through pinned memory: ")
    assert why in said


@pytest.mark.gpu
@has_kvikio
def test_kvikio_on_a_device_reads_what_the_pinned_reader_reads(device: Device, shards: list[Path]) -> None:
    """By GPUDirect Storage if the machine has it, else in compatibility mode."""
    if device.torch_device.type != "cuda":
        pytest.skip("kvikio needs a CUDA device")
    no_gds = why_no_gds(shards[0], device.torch_device.index or 0)
    print(no_gds)
    rows = np.random.default_rng(2).permutation(150)
    files, offsets = np.zeros(150, np.uint32), rows * 4096 + 7
    lengths, out_offsets = np.full(150, 4001), np.arange(150) * 4096
    outs = [device.zeros(150 * 4096, torch.uint8) for _ in range(2)]
    with open_engine(shards) as engine:
        pinned = PinnedExtentReader(device, engine, shards)
        kvikio = kvikio_reader.KvikioReader(device, shards, gds=not no_gds, pinned=pinned)
        for reader, out in ((kvikio, outs[0]), (pinned, outs[1])):
            reader.read(files, offsets, lengths, out, out_offsets)
        kvikio.close()
    assert np.array_equal(outs[0].cpu().numpy(), outs[1].cpu().numpy())


@pytest.fixture
def fake_kvikio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The __init__.py of a package kvikio, empty, for children. Forgets earlier probes."""
    package = tmp_path / "packages" / "kvikio"
    package.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    monkeypatch.setattr(kvikio_reader, "_faults", {})
    monkeypatch.setattr(kvikio_reader.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kvikio_reader, "_NVIDIA_FS", package)
    return package / "__init__.py"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(b"contents")
    return path


def test_a_hanging_kvikio_is_killed_after_the_timeout(fake_kvikio: Path, file: Path) -> None:
    fake_kvikio.write_text("import time\ntime.sleep(3600)\n")
    fault = why_no_gds(file, timeout_s=0.5)
    assert fault == "GPUDirect Storage does not work: no answer within 0.5 s"
    fake_kvikio.write_text("import sys\nprint('\"\"', flush=True)\nsys.exit()\n")
    assert why_no_gds(file) == fault, "tried once per process"


@pytest.mark.parametrize(
    ("said", "environment", "expected"),
    [
        ("", "AUTO", ""),
        ("cuFile error", "", "GPUDirect Storage does not work: cuFile error"),
        (None, "true", "KVIKIO_COMPAT_MODE=true forbids GPUDirect Storage"),
    ],
)
def test_faults_are_told_in_words(
    fake_kvikio: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    environment: str,
    expected: str,
) -> None:
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", environment)
    fake_kvikio.write_text(
        "import json, os, sys\n"
        "assert os.environ['KVIKIO_COMPAT_MODE'] == 'OFF'\n"
        "assert os.environ['CUFILE_ALLOW_COMPAT_MODE'] == 'false', 'cuFile may go through host memory'\n"
        f"print('noise')\nprint(json.dumps({said!r}), flush=True)\nsys.exit()\n"
    )
    assert why_no_gds(file) == expected


@pytest.mark.parametrize(
    ("json", "variable", "tried"),
    [
        ('{"properties": {"use_pci_p2pdma": false}, "block": {"nvme": {}}}', "", False),
        ('{"properties": {\n  // "use_pci_p2pdma": true,\n  "use_poll_mode": true}}', "0", False),
        ('{"block": {"nvme": {"use_pci_p2pdma" : true}}}', "", True),
        (None, "true", True),
    ],
)
def test_without_nvidia_fs_gds_is_tried_only_if_cufile_is_told_to_use_p2pdma(
    fake_kvikio: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    json: str | None,
    variable: str,
    tried: bool,
) -> None:
    """A try may hang, and took ten seconds on a machine that has neither."""
    monkeypatch.setattr(kvikio_reader, "_NVIDIA_FS", tmp_path / "none")
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "cufile.json"))
    monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", variable)
    if json is not None:
        (tmp_path / "cufile.json").write_text(json)
    fake_kvikio.write_text("import sys\nprint('\"tried\"', flush=True)\nsys.exit()\n")
    expected = "does not work: tried" if tried else "needs nvidia-fs (not loaded) or use_pci_p2pdma"
    assert why_no_gds(file).startswith(f"GPUDirect Storage {expected}")


def test_a_crash_of_kvikio_and_a_missing_kvikio_or_file_are_reported(
    fake_kvikio: Path, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "No such file" in why_no_gds(tmp_path / "none")
    fake_kvikio.write_text("import a_library_that_is_not_there\n")
    assert "No module named 'a_library_that_is_not_there'" in why_no_gds(file)
    monkeypatch.setattr(kvikio_reader, "_faults", {})
    monkeypatch.setattr(kvikio_reader.importlib.util, "find_spec", lambda name: None)
    assert why_no_gds(file) == "kvikio is not installed"


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


@pytest.fixture
def host_driver(fake_kvikio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcuda for children, whose device memory is host memory."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "stub.c").write_text(DRIVER_OF_HOST_MEMORY)
    command = ["cc", "-shared", "-fPIC", "stub.c", "-o", "libcuda.so.1"]
    subprocess.run(command, check=True, cwd=tmp_path / "driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "driver"))


@pytest.mark.parametrize(
    ("does", "works"),
    [
        ("ctypes.memmove(address, self.file.read(nbytes), nbytes)", True),
        ("ctypes.memset(address, 0, nbytes)", False),
        ("pass", False),
        ("ctypes.memmove(address, self.file.read(nbytes - 1), nbytes - 1)", False),
    ],
    ids=["reads", "zeros", "nothing", "all but a byte"],
)
def test_kvikio_is_used_only_if_it_reads_what_the_file_has(
    fake_kvikio: Path, host_driver: None, file: Path, does: str, works: bool
) -> None:
    fake_kvikio.write_text(KVIKIO_THAT_READS.replace("{does}", does))
    file.write_bytes(os.urandom(2 << 20))
    assert why_no_gds(file) == "" if works else "it read wrong bytes" in why_no_gds(file)


@pytest.mark.parametrize("contents", [bytes(5000), b"7" * 5000])
def test_a_file_of_one_value_does_not_show_that_kvikio_reads(
    fake_kvikio: Path, host_driver: None, file: Path, contents: bytes
) -> None:
    file.write_bytes(contents)
    fake_kvikio.write_text(
        KVIKIO_THAT_READS.replace("{does}", f"ctypes.memset(address, {contents[0]}, nbytes)")
    )
    assert "all bytes of the file are equal" in why_no_gds(file)
    assert file.read_bytes() == contents
