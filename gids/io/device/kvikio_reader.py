"""Reads runs of pages into device memory with kvikio, by GPUDirect Storage, where the machine has it.

The cache preloads long runs of hot pages with it (gids/cache/device/reads.py), and reads the others with the
engine: kvikio calls CUDA, has no batches, and reads short runs through host memory in the calling thread. So
it never serves the request queue.

why_no_gds finds out whether kvikio reads a file by GPUDirect Storage (GDS). For the reader and
`gids info --system`. Importing kvikio is harmless. But without a driver, opening a file hangs unless
compatibility mode is on, and mode AUTO only looks for a library and a directory. So a child process, which
may hang, tries it on the file itself, into device memory from libcuda. The child imports neither torch nor
cupy.

cuFile reaches device memory by the module nvidia-fs, or by the kernel's PCI P2PDMA (Linux 6.2), if its option
use_pci_p2pdma is set. For the try it may not go through host memory instead: its error says what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gids.closing import Closing
from gids.errors import StorageError
from gids.stored_file import AnyFile, opened

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device

_TIMEOUT_S = 30.0
_NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
_CUFILE_JSON = "/etc/cufile.json"

# Reads the head of argv[1] into memory of device argv[2] and compares. The last line of stdout is its answer.
# Before, no byte there is that of the file. Files whose bytes are all equal do not show that GDS reads them:
# a disk may return zeros.
_CHILD = r"""
import ctypes, json, sys
def answer(fault):
    print(json.dumps(fault), flush=True)
    sys.exit()
import kvikio
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    answer("no NVIDIA driver (libcuda.so.1 not found)")
def check(status):
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        answer("CUDA: " + (text.value or str(status).encode()).decode())
with open(sys.argv[1], "rb") as file:
    expected = file.read(1 << 20)
if not expected:
    answer("the file is empty")
if len(set(expected)) == 1:
    answer("cannot be tested here, as all bytes of the file are equal")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[2])))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
others = expected.translate(bytes(range(255, -1, -1)))
check(cuda.cuMemcpyHtoD_v2(memory, others, ctypes.c_size_t(len(others))))
class Buffer:
    __cuda_array_interface__ = {
        "shape": (len(expected),), "typestr": "|u1", "data": (memory.value, False), "version": 3,
    }
try:
    with kvikio.CuFile(sys.argv[1], "r") as file:
        done = file.pread(Buffer(), len(expected), 0).get()
except Exception as error:
    answer(str(error).strip().splitlines()[-1])
back = ctypes.create_string_buffer(len(expected))
check(cuda.cuMemcpyDtoH_v2(back, memory, ctypes.c_size_t(len(expected))))
if done != len(expected) or back.raw != expected:
    answer("it read wrong bytes")
answer("")
"""

_faults: dict[tuple[int, int], str] = {}


def why_no_gds(path: str | os.PathLike[str], device_index: int = 0, *, timeout_s: float = _TIMEOUT_S) -> str:
    """Why kvikio does not read a file by GPUDirect Storage into memory of a device; "" if it does.

    What the machine lacks is found at once. Else kvikio reads the first MiB, once per process, file system
    and device, for at most timeout_s.
    """
    try:
        key = (os.stat(path).st_dev, device_index)
    except OSError as error:
        return f"{os.fspath(path)}: {error.strerror}"
    if lacking := _what_is_missing():
        return lacking
    if key not in _faults:
        fault = _try(os.fspath(path), device_index, timeout_s)
        _faults[key] = f"GPUDirect Storage does not work: {fault}" if fault else ""
    return _faults[key]


def _what_is_missing() -> str:
    """Why it cannot work, as far as is known without a try; or ""."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    if _is_set("KVIKIO_COMPAT_MODE", "on"):
        return f"KVIKIO_COMPAT_MODE={os.environ['KVIKIO_COMPAT_MODE']} forbids GPUDirect Storage"
    if not _NVIDIA_FS.exists() and not _asks_for_p2pdma():
        return "GPUDirect Storage needs nvidia-fs (not loaded) or use_pci_p2pdma in cufile.json (not set)"
    return ""


def _asks_for_p2pdma() -> bool:
    """Whether a setting of cuFile switches PCI P2PDMA on. It is off by default."""
    try:
        text = Path(os.environ.get("CUFILE_ENV_PATH_JSON") or _CUFILE_JSON).read_text(errors="replace")
    except OSError:
        text = ""
    text = re.sub(r"//.*", "", text)  # cuFile's JSON has comments
    return _is_set("CUFILE_USE_PCIP2PDMA") or re.search(r'"use_pci_p2pdma"\s*:\s*true', text) is not None


def _is_set(variable: str, *others: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("true", "yes", "1", *others)


def _try(path: str, device_index: int, timeout_s: float) -> str:
    """One try: what is wrong, or "" if the bytes came."""
    environment = {
        **os.environ,
        "KVIKIO_COMPAT_MODE": "OFF",
        "CUFILE_ALLOW_COMPAT_MODE": "false",  # of cuFile itself, which mode "OFF" of kvikio uses
        "KVIKIO_GDS_THRESHOLD": "1",
        "KVIKIO_NTHREADS": "1",
    }
    command = [sys.executable, "-P", "-c", _CHILD, path, str(device_index)]
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only the parent, which kills the child
    )
    try:
        said, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    finally:
        _end(child)
    lines = said.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        return str(json.loads(lines[-1]))
    return (errors.strip().splitlines() or [f"exit status {child.returncode}"])[-1]


def _end(child: subprocess.Popen[str]) -> None:
    """Kill and wait for a child. One that the kernel does not end within 5 s is left behind."""
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5.0)


_log = logging.getLogger("gids")
_logged: set[str] = set()
_THREADS = 16


class KvikioReader(Closing):
    """Reads runs of bytes of files into device memory. One thread at a time.

    gds: use GPUDirect Storage (kvikio's mode OFF; probe it first, as it can hang) or read through host memory
    (mode ON). Raises StorageError if a file cannot be opened.
    """

    def __init__(self, device: Device, paths: Sequence[AnyFile], *, gds: bool) -> None:
        self._device, self._paths = device, list(paths)
        self._files: list[Any] = []
        mode = "OFF" if gds else "ON"
        kvikio = _import_kvikio(mode)
        self.threshold = int(kvikio.defaults.get("gds_threshold"))
        """Bytes from which kvikio reads a run by GPUDirect Storage (KVIKIO_GDS_THRESHOLD, default 16 KiB)."""
        with kvikio.defaults.set({"compat_mode": getattr(kvikio.CompatMode, mode)}):  # process-wide
            for path in self._paths:
                self._files.append(self._open(kvikio, path))

    def read(
        self,
        files: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: torch.Tensor,
        out_offsets: npt.NDArray[np.int64],
    ) -> None:
        """Read ``lengths[i]`` bytes at ``offsets[i]`` of file ``files[i]`` to ``out[out_offsets[i]:]``.

        files: uint32[n], indices of the paths that the reader was opened with. offsets, lengths, out_offsets:
        int64[n]. out: uint8[m], contiguous, on the reader's device. Waits for work on the current stream,
        then blocks until the bytes are on the device.

        Raises StorageError with file and offset if a run fails; the contents of out are then undefined.
        Raises RuntimeError if the reader is closed.
        """
        if not self._files:
            raise RuntimeError("this reader is closed")
        assert out.device == self._device.torch_device
        assert (out_offsets + lengths <= out.nbytes).all()
        self._device.current_stream().synchronize()  # kvikio's threads ignore torch's streams
        columns = (column.tolist() for column in (files, offsets, lengths, out_offsets))
        begun: list[tuple[Any, int, int, int]] = []
        failed: StorageError | None = None
        for file, offset, length, out_offset in zip(*columns, strict=True):
            target = _buffer(out[out_offset : out_offset + length])
            try:
                future = self._files[file].pread(target, length, offset)
            except Exception as error:  # what kvikio checks before it reads
                failed = self._failure(file, offset, length, _last_line(error))
                break
            begun.append((future, file, offset, length))
        for future, file, offset, length in begun:  # also after a failure, as the others still write to out
            late = self._wait(future, file, offset, length)
            failed = failed or late
        if failed:
            raise failed

    def _wait(self, future: Any, file: int, offset: int, length: int) -> StorageError | None:
        """Wait for a read; return its error, if any. kvikio reports errors and short reads as text only."""
        try:
            done = future.get()
            return None if done == length else self._failure(file, offset, length, f"read {done}")
        except Exception as error:
            return self._failure(file, offset, length, _last_line(error))

    def _failure(self, file: int, offset: int, length: int, detail: str) -> StorageError:
        reason = f"cannot read {length} bytes: {os.strerror(errno.EIO)} ({detail})"
        return StorageError(errno.EIO, reason, self._paths[file], offset)

    def _open(self, kvikio: Any, path: AnyFile) -> Any:
        try:
            with opened(path) as fd:
                return kvikio.CuFile(f"/proc/self/fd/{fd}", "r")
        except (RuntimeError, OSError) as error:
            self.close()
            if isinstance(error, StorageError):
                raise
            code = getattr(error, "errno", None) or errno.EIO
            raise StorageError(code, f"kvikio cannot open it ({_last_line(error)})", path) from error

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._files:
            self._files.pop().close()


def _import_kvikio(mode: str) -> Any:
    """Import kvikio while the environment names the mode, so that it tries no other mode."""
    before = os.environ.get("KVIKIO_COMPAT_MODE")
    os.environ["KVIKIO_COMPAT_MODE"] = mode
    try:
        import kvikio
        import kvikio.defaults

        kvikio.defaults.get("compat_mode")
    finally:
        if before is None:
            del os.environ["KVIKIO_COMPAT_MODE"]
        else:
            os.environ["KVIKIO_COMPAT_MODE"] = before
    if "KVIKIO_NTHREADS" not in os.environ and kvikio.defaults.get("num_threads") == 1:
        kvikio.defaults.set({"num_threads": _THREADS})
    return kvikio


def _buffer(tensor: torch.Tensor) -> Any:
    """A buffer for kvikio: a CUDA tensor as it is, another one as an array."""
    return tensor if tensor.is_cuda else tensor.numpy()


def _last_line(error: Exception) -> str:
    """Of kvikio's text, which begins with a place in its sources; the error's name if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def open_kvikio_reader(device: Device, paths: Sequence[AnyFile]) -> KvikioReader | None:
    """Open files with kvikio, if GPUDirect Storage (GDS) reads them; else None, and the log says why, once.

    If GDS may work, a child process tries it: once for each file system, for at most 30 s.
    """
    faults = (why_no_gds(path, device.index) for path in paths)
    obstacle = next(filter(None, faults), "")
    if not obstacle:
        try:
            return KvikioReader(device, paths, gds=True)
        except StorageError as error:
            obstacle = str(error)
    if obstacle not in _logged:
        _logged.add(obstacle)
        _log.info("hot pages are read through host memory: %s", obstacle)
    return None
