"""A timeline of a loader's stages and requests, for chrome://tracing and https://ui.perfetto.dev.

Called by users. It reads the engine's counters where the loader's stages begin and end, and keeps the first
events only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gids.loader import FeatureLoader, Observer

_PID, _TID = 1, 1
_NS_PER_US = 1000


class Timeline:
    """The work of one thread, in slices, and counters.

    most_events: keep the first N events (about 100 B of JSON each); the file has the number of the others.
    Not thread-safe.
    """

    def __init__(self, most_events: int = 100_000) -> None:
        self._most = most_events
        self._events: list[tuple[int, int, str, float | None]] = []  # begin and length in ns, name, counter
        self._left_out = 0
        self._begun = time.perf_counter_ns()

    def add(self, name: str, begun_ns: int, end_ns: int) -> None:
        """Add a slice between two values of time.perf_counter_ns()."""
        self._keep((begun_ns - self._begun, max(0, end_ns - begun_ns), name, None))

    def count(self, name: str, at_ns: int, value: float) -> None:
        """Add a counter's value, valid from at_ns on."""
        self._keep((at_ns - self._begun, 0, name, value))

    @contextmanager
    def follow(self, loader: FeatureLoader) -> Iterator[None]:
        """Add the loader's stages and its requests in flight while the block runs.

        Slices: `sample`, `enter`, `plan`, `gather`, and `wait` at the start of `gather`, which is as long as
        the gather waited for pages.
        """
        with loader.observe(_Stages(self, loader)):
            yield

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON in one step. Raises OSError."""
        whole = Path(path)
        is_device = whole.exists() and not whole.is_file()  # such as /dev/stdout, which is not replaced
        part = whole if is_device else Path(f"{whole}.part")
        events = [
            {"ph": "M", "ts": 0, "pid": _PID, "tid": _TID, "name": kind, "args": {"name": name}}
            for kind, name in (("process_name", "gids"), ("thread_name", "training loop"))
        ]
        # If two slices begin together, the longer one comes first.
        for begin, length, name, value in sorted(self._events, key=lambda event: (event[0], -event[1])):
            event: dict[str, Any] = {"ts": begin / _NS_PER_US, "pid": _PID, "tid": _TID, "name": name}
            if value is None:
                event |= {"ph": "X", "dur": length / _NS_PER_US}
            else:
                event |= {"ph": "C", "args": {"value": value}}
            events.append(event)
        head = {"displayTimeUnit": "ms", "otherData": {"events_left_out": self._left_out}}
        with open(part, "w") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, events)) + "\n]}\n")
        if not is_device:
            part.replace(whole)

    def _keep(self, event: tuple[int, int, str, float | None]) -> None:
        if len(self._events) < self._most:
            self._events.append(event)
        else:
            self._left_out += 1


class _Stages(Observer):
    """Adds a loader's stages to a timeline."""

    def __init__(self, timeline: Timeline, loader: FeatureLoader) -> None:
        self._timeline, self._loader = timeline, loader
        # The time of the last _rate(), and the bytes read until then.
        self._last = (time.perf_counter_ns(), int(loader.engine.stats()["bytes_read"]))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = self._look()
        waited = self._waited_ns() if name == "gather" else 0
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            self._timeline.add(name, begun, end)
            if name == "gather":
                wait = min(self._waited_ns() - waited, end - begun)
                self._timeline.add("wait", begun, begun + wait)
                self._rate(end)
            self._look()

    def _look(self) -> int:
        now = time.perf_counter_ns()
        in_flight = self._loader.engine.stats()["in_flight"]
        self._timeline.count("requests in flight", now, in_flight)
        return now

    def _rate(self, now: int) -> None:
        """Add MB/s since the last minibatch was gathered."""
        before, bytes_before = self._last
        bytes_read = int(self._loader.engine.stats()["bytes_read"])
        self._timeline.count("MB/s read", before, 1e3 * (bytes_read - bytes_before) / max(1, now - before))
        self._last = (now, bytes_read)

    def _waited_ns(self) -> int:
        return int(1e9 * self._loader.stats()["seconds"]["wait"])
