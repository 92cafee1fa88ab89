"""An emulated device whose streams run behind and out of step, as a GPU's do: what waits for what?

Work on a stream of new_stream() is only enqueued. Now and then, and when the host waits, the device does a
piece of work of a stream drawn at random among those that may go on; some streams are favored for a while. So
streams run in every order that events allow, and as late as the host allows. The seed fixes the order.

torch's current stream is torch's CPU: waiting for an event blocks. Inside use(), torch's own work first waits
for the stream.

The device knows which work each stream, and the host, has waited for. A kernel, a copy or a function of torch
that uses a tensor raises RuntimeError unless it waited for the work that writes the tensor, also if that work
happens to be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
WITHOUT_MEMORY = {"__get__", "__len__", "data_ptr", "dim", "element_size", "empty", "is_contiguous", "numel"}
WITHOUT_MEMORY |= {"size", "storage_offset", "stride", "unbind", "untyped_storage", "view"}
WITHOUT_MEMORY |= {"_record_function_enter_new", "_record_function_exit._RecordFunction"}

_BLOCKING = {"cpu", "tolist", "item", "numpy", "equal", "nonzero", "unique"}
_BLOCKING |= {"__bool__", "__int__", "__float__", "__index__", "__array__"}
"""What torch does that blocks the host until the current stream is done."""

Clock = dict["LateStream", int]
"""The work that comes before something else: of each stream, the number of its first pieces."""


class LateEvent(EmulatedEvent):
    """passed: settable; an event that belongs to no stream passes when it is set."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.passed = False
        self.after: Clock = {}

    def synchronize(self) -> None:
        super().synchronize()
        self._device.run_until(lambda: self.passed)
        merge(self._device.seen, self.after)

    def query(self) -> bool:
        self.enqueue()
        self._device.progress()
        if self.passed:
            merge(self._device.seen, self.after)
        return self.passed


class LateStream(EmulatedStream):
    """slow: settable; its work is done only when the host waits and no other stream can go on."""

    slow = False

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device
        self.queue: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()
        """The work, and whether it may be done now."""
        self.after: Clock = {self: 0}
        """What comes before its next work."""

    def put(
        self, work: Callable[[], object], may_run: Callable[[], bool] = lambda: True, *, counts: bool = True
    ) -> None:
        self._device.memory.collect()
        self._put(work, may_run, counts=counts)

    def _put(
        self, work: Callable[[], object], may_run: Callable[[], bool] = lambda: True, *, counts: bool
    ) -> None:
        """After collect(), which needs the memory's lock: that is taken before a stream's."""
        merge(self.after, self._device.seen)
        self.after[self] += 1
        super().put(work, may_run, counts=counts)

    def enqueue(self, work: Callable[[], object], may_run: Callable[[], bool]) -> None:
        self.queue.append((work, may_run))
        self._device.progress()

    def wait_stream(self, stream: Stream) -> None:
        if isinstance(stream, LateStream):
            self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        super().wait_event(event)
        if isinstance(event, LateEvent):
            merge(self.after, event.after)

    def record_event(self, *, counts: bool = True) -> LateEvent:
        event = LateEvent(self._device)
        self._device.memory.collect()
        with self._flushing:
            event.held_by(self)
            self._put(partial(setattr, event, "passed", True), counts=counts)
            event.after = dict(self.after)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def run(self) -> None:
        """Do its work so far, so that torch can work. It does not count as waited for by the host."""
        if self.held:
            raise RuntimeError("torch works on a stream before what a batch holds")
        event = self.record_event()
        self.flush()
        self._device.run_until(lambda: event.passed)


class CpuStream(EmulatedStream):
    """torch's: work there is done when it is enqueued, after what it waits for."""

    of_torch = True

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    @property
    def after(self) -> Clock:
        """What comes before its next work."""
        return self._device.seen

    def wait_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def wait_event(self, event: Event) -> None:
        self.entries += 1
        event.synchronize()


class LateDevice(EmulatedDevice):
    """lazy: chance that enqueueing does no work; with 1, only the host's waits do (default: by the seed).

    torch's functions are checked until close(): all of this thread, and those inside use() in any thread.
    close() does all work; AssertionError when something went wrong on a stream.

    seen: the work that the host has waited for, in any thread.
    """

    def __init__(self, seed: int, *, lazy: float | None = None, **options: Any) -> None:
        super().__init__(seed, **{"limit_s": 20.0} | options)
        self.seen: Clock = {}
        self._written: dict[int, Clock] = {}  # what each tensor on the device must wait for, by its memory
        self._streams: list[LateStream] = []
        self._random = random.Random(seed)
        self._lazy = self._random.choice((0.2, 0.7, 1.0)) if lazy is None else lazy
        self._favors: dict[LateStream, float] = {}
        self._done = 0  # pieces of work
        self._errors: list[BaseException] = []
        self._working = threading.RLock()
        self._checks = _InOrder(self, self._default)
        self._checks.__enter__()

    def _of_torch(self) -> EmulatedStream:
        return CpuStream(self)

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
        self.check_mapped("wait_value", address)
        word = ctypes.c_int64.from_address(address)
        stream.put(lambda: None, lambda: ctypes.c_int64(word.value - value).value >= 0)
        return True

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, EmulatedStream)
        with super().use(stream), _InOrder(self, stream):
            yield

    def check_order(self, what: str, stream: EmulatedStream, tensors: Sequence[torch.Tensor]) -> None:
        assert isinstance(stream, LateStream | CpuStream)
        for tensor in tensors:
            for writer, number in self._written.get(_memory_of(tensor), {}).items():
                if max(stream.after.get(writer, 0), self.seen.get(writer, 0)) < number:
                    raise RuntimeError(
                        f"{what} uses a tensor, {tensor.dtype}{list(tensor.shape)}, that another stream may "
                        "still write: wait for that stream first"
                    )

    def note_written(self, stream: EmulatedStream, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not (memory := _memory_of(tensor)):
                continue
            if memory not in self._written:
                self._written[memory] = {}
                weakref.finalize(tensor.untyped_storage(), self._written.pop, memory, None)
            if isinstance(stream, LateStream):
                self._written[memory][stream] = stream.after[stream]

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device, as far as is known: a kernel or a stream has written to it."""
        return _memory_of(tensor) in self._written

    def close(self) -> None:
        self._checks.__exit__(None, None, None)
        for stream in self._streams:
            stream.flush()
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
    """torch's work waits for what is enqueued on its stream, and uses no tensor that it does not wait for."""

    def __init__(self, device: LateDevice, stream: EmulatedStream) -> None:
        super().__init__()
        self._device, self._its_stream = device, stream

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        none = name in WITHOUT_MEMORY
        none |= name == "__getitem__" and not isinstance(args[1], torch.Tensor)
        none |= name == "contiguous" and args[0].is_contiguous()
        # Inside a nested use() of another stream, that stream's mode comes first.
        if none or self._device.current_stream() is not self._its_stream:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._run(name, function, args, kwargs)

    def _run(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, stream = self._device, self._its_stream
        here = [tensor for tensor in _tensors((args, kwargs)) if device.is_here(tensor)]
        if name in _BLOCKING and not here:  # of a tensor on the host: it waits for nothing
            return function(*args, **kwargs)
        device.check_order(f"torch's {name}()", stream, here)
        if isinstance(stream, LateStream):
            stream.run()
        result = function(*args, **kwargs)
        if name in _BLOCKING or (name == "to" and "cpu" in (*args, *kwargs.values())):
            if isinstance(stream, LateStream):
                merge(device.seen, stream.after)
            # "cuda" and "cpu" are one device here: a copy to the host would be the tensor itself.
            return result.clone() if here and name in ("cpu", "to") else result
        if here and isinstance(stream, LateStream):
            stream.after[stream] += 1
            in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
            device.note_written(stream, [*_tensors(result), *here[: int(in_place)]])
        return result


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, which views share; 0 for an empty one."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


_merging = threading.Lock()


def merge(clock: Clock, other: Clock) -> None:
    with _merging:  # two threads that wait at once would undo what the other one has seen
        for stream, number in other.items():
            clock[stream] = max(clock.get(stream, 0), number)
