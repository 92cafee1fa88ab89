"""Reads extents with kvikio, by GPUDirect Storage, where the machine has it.

For large extents only: kvikio calls CUDA, has no batches, and reads short extents through host memory in the
calling thread. So it never serves the request queue, and the pinned reader reads short extents.

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
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.errors import StorageError
from gids.io.device.extents import ExtentReader, Extents, PinnedExtentReader
from gids.stored_file import AnyFile, opened

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device
    from gids.io.engine import Engine

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
_IN_FLIGHT = 64


class KvikioReader(ExtentReader):
    """Reads with kvikio.

    gds: use GPUDirect Storage (kvikio's mode OFF; probe it first, as it can hang) or read through host memory
    (mode ON). pinned: reads extents below kvikio's GDS threshold (KVIKIO_GDS_THRESHOLD, default 16 KiB), and
    everything after an error of kvikio; it is closed with this reader. Without it kvikio reads all, and its
    error is raised.

    With GDS the memory of the first out is registered with cuFile, and kept alive, until close(). Raises
    StorageError if a file cannot be opened.
    """

    def __init__(
        self,
        device: Device,
        paths: Sequence[AnyFile],
        *,
        gds: bool,
        pinned: ExtentReader | None = None,
    ) -> None:
        super().__init__(device, paths)
        self._gds, self._pinned = gds, pinned
        self._kvikio = _import_kvikio("OFF" if gds else "ON")
        self._threshold = int(self._kvikio.defaults.get("gds_threshold")) if pinned is not None else 0
        self._registered: torch.Tensor | None = None
        self._files: list[Any] = []
        with self._mode():
            for path in self._paths:
                self._files.append(self._open(path))

    def read_checked(self, extents: Extents, out: torch.Tensor) -> None:
        extents = extents.merged()
        short = extents.lengths < self._threshold
        if self._pinned is not None and short.any():
            self._pinned.read_checked(extents.take(short), out)
        extents = extents.take(~short)
        self._device.current_stream().synchronize()  # kvikio's threads ignore torch's streams
        self._register(out)
        try:
            self._read(extents, out)
        except StorageError as error:
            if self._pinned is None:
                raise
            _log.info("reading extents through pinned memory: %s", error)
            self._threshold = sys.maxsize
            self._pinned.read_checked(extents, out)

    def _read(self, extents: Extents, out: torch.Tensor) -> None:
        waiting: deque[tuple[Any, int, int, int]] = deque()
        failed: StorageError | None = None
        for file, offset, length, out_offset in zip(*(column.tolist() for column in extents), strict=True):
            if len(waiting) == _IN_FLIGHT and (failed := self._collect(*waiting.popleft())):
                break
            target = _buffer(out[out_offset : out_offset + length])
            try:
                future = self._files[file].pread(target, length, offset)
            except Exception as error:  # what kvikio checks before it reads
                failed = self._failure(errno.EIO, file, offset, length, _last_line(error))
                break
            waiting.append((future, file, offset, length))
        while waiting:  # also after a failure, as the others still write to out
            late = self._collect(*waiting.popleft())
            failed = failed or late
        if failed:
            raise failed

    def _collect(self, future: Any, file: int, offset: int, length: int) -> StorageError | None:
        """Wait for a read; return its error, if any. kvikio reports errors and short reads as text only."""
        try:
            done = future.get()
            return None if done == length else self._failure(errno.EIO, file, offset, length, f"read {done}")
        except Exception as error:
            return self._failure(errno.EIO, file, offset, length, _last_line(error))

    def _register(self, out: torch.Tensor) -> None:
        if not self._gds or self._registered is not None:
            return
        self._registered = out
        try:
            with self._mode():
                self._kvikio.memory_register(_buffer(out))
        except (RuntimeError, OSError) as error:
            _log.info("cuFile cannot register the memory for GPUDirect Storage: %s", error)

    def _open(self, path: AnyFile) -> Any:
        try:
            with opened(path) as fd:
                return self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r")
        except (RuntimeError, OSError) as error:
            self._pinned = None  # the caller goes on with it
            self.close()
            if isinstance(error, StorageError):
                raise
            code = getattr(error, "errno", None) or errno.EIO
            raise StorageError(code, f"kvikio cannot open it ({_last_line(error)})", path) from error

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        """Set kvikio's compatibility mode, which is process-wide, for this reader."""
        mode = self._kvikio.CompatMode.OFF if self._gds else self._kvikio.CompatMode.ON
        with self._kvikio.defaults.set({"compat_mode": mode}):
            yield

    def close(self) -> None:
        """Close the files, end the registration, close the pinned reader. Idempotent."""
        super().close()
        if self._registered is not None:
            with contextlib.suppress(RuntimeError, OSError), self._mode():
                self._kvikio.memory_deregister(_buffer(self._registered))
            self._registered = None
        while self._files:
            self._files.pop().close()
        if self._pinned is not None:
            self._pinned.close()


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


def open_kvikio_reader(
    device: Device, paths: Sequence[AnyFile], *, pinned: ExtentReader | None = None
) -> KvikioReader | None:
    """Open files with kvikio, if GPUDirect Storage (GDS) reads them; else None, and the log says why, once.

    pinned: see KvikioReader.

    If GDS may work, a child process tries it: once for each file system, for at most 30 s.
    """
    faults = (why_no_gds(path, device.index) for path in paths)
    obstacle = next(filter(None, faults), "")
    if not obstacle:
        try:
            return KvikioReader(device, paths, gds=True, pinned=pinned)
        except StorageError as error:
            obstacle = str(error)
    if obstacle not in _logged:
        _logged.add(obstacle)
        _log.info("reading extents through pinned memory: %s", obstacle)
    return None


def open_extent_reader(device: Device, engine: Engine, paths: Sequence[AnyFile]) -> ExtentReader:
    """Open a reader of the files that engine was opened with, into the memory of device.

    With kvikio where GPUDirect Storage works, else with the engine into pinned staging (64 MiB, freed by
    close). Blocks like open_kvikio_reader.
    """
    with contextlib.ExitStack() as opening:
        pinned = PinnedExtentReader(device, engine, paths)
        opening.callback(pinned.close)
        reader = open_kvikio_reader(device, paths, pinned=pinned) or pinned
        opening.pop_all()
        return reader
