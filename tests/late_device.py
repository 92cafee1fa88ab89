"""An emulated device whose streams run behind and out of step, as a GPU's do: what waits for what?

Work on a stream of new_stream() is only enqueued. Now and then, and when the host waits, the device does a
piece of work of a stream drawn at random among those that may go on; some streams are favored for a while. So
streams run in every order that events allow, and as late as the host allows. The seed fixes the order.

torch's current stream is torch's CPU: waiting for an event blocks. Inside use(), torch's own work first waits
for the stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from emulator import EmulatedDevice, EmulatedEvent, EmulatedStream
from torch.overrides import TorchFunctionMode

from gids.cuda.device import COPY_PRIORITY, Event, Stream

FAVORED_STEPS = 20
"""Pieces of work until other streams are favored."""

PATIENCE_S = 0.03
"""Seconds without work until slow streams go on: longer than a read of the request queue."""

# What torch does without reading or writing a tensor's memory.
_WITHOUT_MEMORY = {"__get__", "__len__", "data_ptr", "dim", "element_size", "empty", "is_contiguous", "numel"}
_WITHOUT_MEMORY |= {"size", "storage_offset", "stride", "unbind", "untyped_storage", "view"}
_WITHOUT_MEMORY |= {"_record_function_enter_new", "_record_function_exit._RecordFunction"}


class LateEvent(EmulatedEvent):
    """passed: settable; an event that belongs to no stream passes when it is set."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.passed = False

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.passed)

    def query(self) -> bool:
        self._device.progress()
        return self.passed


class LateStream(EmulatedStream):
    """slow: settable; its work is done only when the host waits and no other stream can go on."""

    slow = False

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.queue: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()
        """The work, and whether it may be done now."""

    def put(self, work: Callable[[], object], may_run: Callable[[], bool] = lambda: True) -> None:
        self._device.memory.collect()
        self.queue.append((work, may_run))
        self._device.progress()

    def wait_stream(self, stream: Stream) -> None:
        if isinstance(stream, LateStream):
            self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        self.put(lambda: None, lambda: event.passed)

    def record_event(self) -> LateEvent:
        event = LateEvent(self._device)
        self.put(partial(setattr, event, "passed", True))
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class CpuStream(EmulatedStream):
    """torch's: work there is done when it is enqueued, after what it waits for."""

    def wait_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class LateDevice(EmulatedDevice):
    """lazy: chance that enqueueing does no work; with 1, only the host's waits do (default: by the seed).

    close() does all work; AssertionError when something went wrong on a stream.
    """

    def __init__(self, seed: int, *, lazy: float | None = None, **options: Any) -> None:
        super().__init__(seed, **{"limit_s": 20.0} | options)
        self._default: EmulatedStream = CpuStream()
        self._streams: list[LateStream] = []
        self._random = random.Random(seed)
        self._lazy = self._random.choice((0.2, 0.7, 1.0)) if lazy is None else lazy
        self._favors: dict[LateStream, float] = {}
        self._done = 0  # pieces of work
        self._errors: list[BaseException] = []
        self._working = threading.RLock()

    def new_stream(self, priority: int = COPY_PRIORITY) -> LateStream:
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def progress(self) -> None:
        """Do some work, or none. Called whenever the host touches the device."""
        while self._random.random() >= self._lazy and self._work():
            pass

    def run_until(self, done: Callable[[], bool]) -> None:
        """Do work until the host may go on."""
        begin = worked = time.monotonic()
        while not done():
            now = time.monotonic()
            if self._work(slow_too=now > worked + PATIENCE_S):
                worked = now
                continue
            assert now < begin + self.limit_s, f"the host waits for what does not come: {self._errors}"
            time.sleep(2e-5)

    def wait_value(self, stream: Stream, address: int, value: int) -> bool:
        if not isinstance(stream, LateStream):
            return super().wait_value(stream, address, value)
        if not self.can_wait_value:
            return False
        self.check_mapped("wait_value", address)
        word = ctypes.c_int64.from_address(address)
        stream.put(lambda: None, lambda: ctypes.c_int64(word.value - value).value >= 0)
        return True

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, EmulatedStream)
        before, self._stream = self._stream, stream
        try:
            with _InOrder(self, stream):
                yield
        finally:
            self._stream = before

    def close(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self._streams))
        assert not self._errors, self._errors

    def _work(self, *, slow_too: bool = False) -> bool:
        """Do the next work of a stream. False if none may go on."""
        with self._working:
            ready = [s for s in self._streams if s.queue and s.queue[0][1]() and (slow_too or not s.slow)]
            if not ready:
                return False
            if self._done % FAVORED_STEPS == 0:
                self._favors = {s: self._random.random() ** 3 for s in self._streams}
            self._done += 1
            stream = self._random.choices(ready, [self._favors.get(s, 0) + 1e-3 for s in ready])[0]
            work, _ = stream.queue.popleft()
            try:
                with torch._C.DisableTorchFunction():  # what work does is in order
                    work()
            except BaseException as error:
                self._errors.append(error)
            return True


class _InOrder(TorchFunctionMode):
    """torch's work waits for what is enqueued on its stream."""

    def __init__(self, device: LateDevice, stream: EmulatedStream) -> None:
        super().__init__()
        self._device, self._its_stream = device, stream

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        none = name in _WITHOUT_MEMORY
        none |= name == "__getitem__" and not isinstance(args[1], torch.Tensor)
        none |= name == "contiguous" and args[0].is_contiguous()
        # Inside a nested use() of another stream, that stream's mode comes first.
        if self._device.current_stream() is self._its_stream and not none:
            self._its_stream.synchronize()
        return function(*args, **(kwargs or {}))
