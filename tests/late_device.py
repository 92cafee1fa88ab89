"""An emulated device whose streams run behind, as a GPU's do, for tests of what waits for what.

Each stream of new_stream() has a thread that does its work later than it was enqueued. torch's current stream
is torch's CPU: waiting for an event blocks. Inside use() torch allocates; other work of torch's there would
come too early, so that a test of whoever relies on it fails.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from emulator import EmulatedDevice, EmulatedEvent, EmulatedStream

from gids.cuda.device import Argument, Event, Stream, as_word, check_grid


class LateEvent(EmulatedEvent):
    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> None:
        assert self.passed.wait(60), "an event that does not come"

    def query(self) -> bool:
        return self.passed.is_set()


class LateStream(EmulatedStream):
    """seed: of the pauses that it makes."""

    def __init__(self, seed: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()
        assert not self._errors, self._errors

    def wait_stream(self, stream: Stream) -> None:
        if isinstance(stream, LateStream):
            self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def record_event(self) -> LateEvent:
        event = LateEvent()
        self.put(event.passed.set)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * 4e-3)
            try:
                work()
            except BaseException as error:
                self._errors.append(error)


class CpuStream(EmulatedStream):
    """torch's: work there is done when it is enqueued, after what it waits for."""

    def wait_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class LateDevice(EmulatedDevice):
    """close() ends the streams; AssertionError when something went wrong on one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._stream: EmulatedStream = CpuStream()
        self._streams: list[LateStream] = []
        self._one_at_a_time = threading.Lock()
        self._kept: list[torch.Tensor] = []  # as torch keeps a tensor's memory for its stream's work

    def new_stream(self) -> EmulatedStream:
        self._streams.append(LateStream(len(self._streams)))
        return self._streams[-1]

    def launch(
        self, stream: Stream, unit: str, kernel: str, blocks: int, threads: int, *args: Argument
    ) -> None:
        check_grid(kernel, blocks, threads)
        for i, arg in enumerate(args):
            as_word(kernel, i, arg, self.torch_device)

        def run() -> None:
            with self._one_at_a_time:
                super(LateDevice, self).launch(stream, unit, kernel, blocks, threads, *args)

        stream.put(run) if isinstance(stream, LateStream) else run()

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._kept.append(super().empty(shape, dtype))
        return self._kept[-1]

    def wait_value(self, stream: Stream, address: int, value: int) -> bool:
        wait = super().wait_value
        if not isinstance(stream, LateStream):
            return wait(stream, address, value)
        stream.put(lambda: wait(stream, address, value))
        return True

    def copy_from_host(self, stream: Stream, to: torch.Tensor, address: int) -> None:
        copy = super().copy_from_host
        stream.put(lambda: copy(stream, to, address)) if isinstance(stream, LateStream) else copy(
            stream, to, address
        )

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, EmulatedStream)
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def close(self) -> None:
        for stream in self._streams:
            stream.end()
