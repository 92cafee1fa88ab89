"""Reads extents with kvikio, by GPUDirect Storage if the machine has it. Made after kvikio_probe.

For large extents only: kvikio calls CUDA, has no batches, and reads short extents through host memory in the
calling thread. So it never serves the request queue, and the pinned reader reads short extents.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gids.errors import StorageError
from gids.io.device.extent_reader import ExtentReader, Extents
from gids.stored_file import AnyFile, file_status, opened

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device

_log = logging.getLogger("gids")
_THREADS = 16
_IN_FLIGHT = 64


class KvikioReader(ExtentReader):
    """Reads with kvikio.

    gds: use GPUDirect Storage (kvikio's mode OFF; probe it first, as it can hang) or read through host memory
    (mode ON). small: reads extents below kvikio's GDS threshold (KVIKIO_GDS_THRESHOLD, default 16 KiB) and is
    closed with this reader; without it kvikio reads all.

    With GDS the memory of the first out is registered with cuFile, and kept alive, until close(). Raises
    StorageError if a file cannot be opened.
    """

    def __init__(
        self,
        device: Device,
        paths: Sequence[str | os.PathLike[str]],
        *,
        gds: bool,
        small: ExtentReader | None = None,
    ) -> None:
        super().__init__(device, paths)
        self._gds, self._small = gds, small
        self._kvikio = _import_kvikio("OFF" if gds else "ON")
        self._threshold = int(self._kvikio.defaults.get("gds_threshold")) if small is not None else 0
        self._registered: torch.Tensor | None = None
        self._files: list[Any] = []
        with self._mode():
            for path in self._paths:
                self._files.append(self._open(path))

    @property
    def name(self) -> str:
        return "kvikio (GDS)" if self._gds else "kvikio (compat)"

    def read_checked(self, extents: Extents, out: torch.Tensor) -> None:
        extents = extents.merged()
        small = extents.lengths < self._threshold
        if self._small is not None and small.any():
            self._small.read_checked(extents.take(small), out)
            extents = extents.take(~small)
        self._device.current_stream().synchronize()  # kvikio's threads ignore torch's streams
        self._register(out)
        self._read(extents, out)

    def _read(self, extents: Extents, out: torch.Tensor) -> None:
        rows = list(zip(*(column.tolist() for column in extents), strict=True))
        waiting: deque[tuple[Any, tuple[int, int, int, int]]] = deque()
        failed: StorageError | None = None
        for row in rows:
            file, offset, length, out_offset = row
            if len(waiting) == _IN_FLIGHT:
                failed = self._collect(*waiting.popleft())
                if failed:
                    break
            target = _buffer(out[out_offset : out_offset + length])
            waiting.append((self._files[file].pread(target, length, offset), row))
        while waiting:  # also after a failure, as the others still write to out
            late = self._collect(*waiting.popleft())
            failed = failed or late
        if failed:
            raise failed

    def _collect(self, future: Any, row: tuple[int, int, int, int]) -> StorageError | None:
        """Wait for a read; return its error, if any. kvikio reports errors and short reads as text only."""
        file, offset, length, _ = row
        try:
            done = future.get()
        except (RuntimeError, OSError) as error:
            text = str(error).strip().splitlines()[-1]
            code = _named_errno(error) or (
                errno.ENODATA if _ends_before(self._paths[file], offset + length) else errno.EIO
            )
            return self._failure(code, file, offset, length, text)
        if done != length:
            return self._failure(errno.ENODATA, file, offset, length, f"read {done} bytes")
        return None

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
        except StorageError:
            self.close()
            raise
        except (RuntimeError, OSError) as error:
            self.close()
            detail = str(error).strip().splitlines()[-1]
            raise StorageError(
                _named_errno(error) or errno.EIO, f"kvikio cannot open it ({detail})", path
            ) from error

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        """Set kvikio's compatibility mode, which is process-wide, for this reader."""
        mode = self._kvikio.CompatMode.OFF if self._gds else self._kvikio.CompatMode.ON
        with self._kvikio.defaults.set({"compat_mode": mode}):
            yield

    def close(self) -> None:
        """Close the files, end the registration, close the reader of small extents. Idempotent."""
        super().close()
        if self._registered is not None:
            with contextlib.suppress(RuntimeError, OSError), self._mode():
                self._kvikio.memory_deregister(_buffer(self._registered))
            self._registered = None
        while self._files:
            self._files.pop().close()
        if self._small is not None:
            self._small.close()


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


def _ends_before(path: AnyFile, end: int) -> bool:
    try:
        return file_status(path).st_size < end
    except OSError:
        return False


def _named_errno(error: Exception) -> int:
    """The errno whose text is in kvikio's error message, or 0."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    return next((code for code in errno.errorcode if os.strerror(code) in text), 0)
