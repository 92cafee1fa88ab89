"""DeviceRuns: reads a table's runs to the memory of a GPU, where lines keep rows. OnDevice: what packs use.

Pieces of a run come into pinned host memory and are copied to the device; kernels gather rows from lines and
from the run, and give rows of the run to lines. All is enqueued on one stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from gids import _core
from gids.cache.device.state import HostArray, row_copy
from gids.cache.output_dtype import RowForm
from gids.cuda.device import CACHE_PRIORITY, MadeOn, on_host
from gids.cuda.host_memory import prefer_node

if TYPE_CHECKING:
    from gids.cuda.device import Device, Event, Stream

UNIT = "packs/annex_rows.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_WAVES = 4  # blocks per multiprocessor; see the launch bounds of the kernels
_WIDEST = 16  # bytes that a lane copies at once


class OnDevice:
    """memory_bytes: of the device, for packs and outputs. staging_bytes: of pinned host memory.

    Attributes: stream: of kernels and of copies to the device.
    """

    def __init__(self, device: Device, memory_bytes: int, staging_bytes: int) -> None:
        self.device, self.memory_bytes, self.staging_bytes = device, memory_bytes, staging_bytes
        self.stream: Stream = device.new_stream(CACHE_PRIORITY)
        self._spooling = device.new_stream()
        self._complete = False  # the minibatch whose ids were copied last

    def ids_on_host(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Ids of a minibatch on the CPU. Blocks until they are there."""
        self._complete = isinstance(ids, MadeOn)
        return on_host(ids)

    def spooling(self) -> AbstractContextManager[object]:
        """A context in which torch copies tensors of the minibatch whose ids were copied last to the host.

        It waits for training only if the minibatch was made on torch's current stream, as training is.
        """
        if not self._complete:
            self._spooling.wait_stream(self.device.current_stream())
        return self.device.use(self._spooling)

    def settle(self) -> None:
        """Wait for torch's current stream, on which minibatches come from the spool."""
        self.device.current_stream().synchronize()


class DeviceRuns:
    """Reads the steps of a table's superbatch. In place of a _core.RunReader's read().

    native: of memory whose lines are elsewhere. memory: of native's pieces. longest: uses of the step that
    has most.
    """

    def __init__(
        self,
        on: OnDevice,
        native: _core.RunReader,
        memory: _core.RunMemory,
        form: RowForm,
        *,
        row_bytes: int,
        longest: int,
    ) -> None:
        device = on.device
        self._on, self.native, self._pieces = on, native, memory.pieces
        self._stride = stride = _core.annex_row_bytes(row_bytes)
        self._longest = longest
        device.preload(UNIT)
        prefer_node(memory.pieces_address, memory.pieces_bytes, device.numa_node)
        self._mapping = device.map_host(memory.pieces_address, memory.pieces_bytes, memory=memory)
        self._numbers = HostArray(device, 8 * longest)  # sources and keeps of a step
        self._overflowed = HostArray(device, 8)
        with device.use(on.stream):
            self._lines = device.allocate(max(1, memory.lines * stride))
            self._run = device.empty((max(1, longest * stride),), torch.uint8)
            self._sent = device.empty((2 * longest,), torch.int32)
            scales: int | torch.Tensor = 0
            if form.scales is not None:
                scales = torch.from_numpy(form.scales).to(device.torch_device)
        self._form = (*row_copy(form), scales)
        width = int(np.gcd(stride, _WIDEST))
        self._bytes = _core.copy_as(width, 0, 0), stride // width
        self._coming: deque[Event] = deque()  # copies of pieces to the device

    @property
    def overflowed(self) -> bool:
        """Whether a finite value became infinite, once the stream is synchronized. Told once."""
        told = bool(self._overflowed.bytes.any())
        self._overflowed.bytes[:] = 0
        return told

    def read(self, out: torch.Tensor) -> tuple[int, int, int]:
        """Enqueue what writes the rows of the next step to `out`, on the device.

        Blocks until its pieces are on the device. Returns (an errno or 0, file, offset).
        """
        on, native = self._on, self.native
        uses, copies = native.next_uses, native.next_copies
        on.stream.synchronize()  # the numbers are those of the step before
        numbers = self._numbers.bytes.view(np.uint32)
        sources, keeps = numbers[:uses], numbers[self._longest : self._longest + copies]
        native.numbers(sources, keeps)
        sent = self._sent[: self._longest], self._sent[self._longest :]
        for there, count, first in ((sent[0], uses, 0), (sent[1], copies, self._longest)):
            if count:
                address = self._numbers.bytes.ctypes.data + 4 * first
                on.device.copy_from_host(on.stream, there[:count], address)
        rows = 0
        while rows < copies:
            if len(self._coming) == self._pieces:
                self._free_piece()
            code, file, offset, address, first, count = native.next_piece()
            if code:
                return code, file, offset
            begin, end = first * self._stride, (first + count) * self._stride
            on.device.copy_from_host(on.stream, self._run[begin:end], address)
            self._coming.append(on.stream.record_event())
            rows += count
        self._launch(
            "gids_gather_annex", uses, self._lines, self._run, sent[0], uses, self._stride, out,
            *self._form, self._overflowed.address,
        )  # fmt: skip
        self._launch(
            "gids_keep_rows", copies, self._run, sent[1], copies, self._stride, *self._bytes, self._lines
        )
        while self._coming:
            self._free_piece()
        native.end_step()
        return 0, 0, 0

    def _free_piece(self) -> None:
        self._coming.popleft().synchronize()
        self.native.free_piece()

    def _launch(self, kernel: str, rows: int, *args: int | torch.Tensor) -> None:
        device = self._on.device
        blocks = min(-(-rows // _WARPS), _WAVES * device.sm_count)
        device.launch(self._on.stream, UNIT, kernel, blocks, _THREADS, *args)

    def close(self) -> None:
        """Let the device finish, free its memory. Idempotent. native must end before its memory does."""
        self._on.stream.synchronize()
        self._coming.clear()
        self._mapping.close()
        self._numbers.close()
        self._overflowed.close()
        self._lines = self._run = self._sent = torch.empty(0, dtype=torch.uint8)
