"""One epoch of minibatches that another framework samples, here or in worker processes.

Called by the adapters of DGL and GraphBolt, which put the features into their minibatches. Each tensor from a
worker takes a file descriptor and shared memory while it lives, so a window of minibatches can exhaust both:
Headroom measures that. DGL and GraphBolt alone hold few minibatches.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, Generic, TypeVar

from gids.cuda import on_host
from gids.io.engine import raise_descriptor_limit
from gids.loader.feature_loader import FeatureLoader
from gids.loader.rows import EpochInput, Features, Ids

T = TypeVar("T")
log = logging.getLogger("gids")


def _free_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def _free_shared_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return stat.f_bavail * stat.f_frsize


_DESCRIPTORS = 16
"""Tensors of a minibatch: each takes a file descriptor."""


def guard_workers(loader: Any) -> None:
    """Let a torch DataLoader with workers fail where it would wait for ever. Call it before each epoch.

    Its workers have fewer minibatches ready for want of descriptors. A worker that cannot send a minibatch
    ends: then PyTorch raises RuntimeError. Raises OSError where a worker could not make one minibatch while
    another waits.
    """
    raise_descriptor_limit()
    if getattr(loader.worker_init_fn, "func", None) is not _init_worker:
        loader.worker_init_fn = partial(_init_worker, loader.worker_init_fn)
    free = _free_descriptors()
    if free < 2 * _DESCRIPTORS:
        raise OSError(
            errno.EMFILE,
            f"{free} free file descriptors are too few for worker processes: raise `ulimit -n`, or set "
            "num_workers=0",
        )
    most = max(1, (free // _DESCRIPTORS - 2) // loader.num_workers)
    if loader.prefetch_factor > most:
        log.warning(
            "prefetch_factor lowered from %d to %d for %d workers: there are %d free file descriptors; raise "
            "`ulimit -n`",
            loader.prefetch_factor,
            most,
            loader.num_workers,
            free,
        )
        loader.prefetch_factor = most


def _init_worker(init: Callable[[int], object] | None, worker: int) -> None:
    """Call `init`, a worker_init_fn. Then a minibatch that this worker cannot send ends the worker."""
    Queue._on_queue_feeder_error = staticmethod(_exit_worker)  # type: ignore[attr-defined]
    if init is not None:
        init(worker)


def _exit_worker(error: Exception, _: object) -> None:
    traceback.print_exception(error)
    os._exit(1)  # this is not the worker's main thread


_FEW = 4
"""Where so many minibatches do not fit twice, none is held beside the one that is due."""


@dataclass
class _Resource:
    name: str
    cure: str
    free: Callable[[], int]
    free_at_start: int


class Headroom:
    """Measures what the held minibatches use, compared with the moment when this was made."""

    def __init__(self) -> None:
        self._resources = []
        for name, cure, free in (
            ("file descriptors", "raise `ulimit -n`", _free_descriptors),
            ("bytes of /dev/shm", "enlarge /dev/shm", _free_shared_bytes),
        ):
            with suppress(OSError):  # the system has no such resource
                self._resources.append(_Resource(name, cure, free, free()))

    def window_limit(self, held: int) -> tuple[int, str] | None:
        """A safe window, and why it must be lowered; None while less than half of each resource is used.

        held: number of minibatches that are sampled and not yet handed out. The other half is for the planned
        ones, those in the workers' queues and those that the consumer keeps.
        """
        for kind in self._resources:
            free = kind.free()
            if 2 * free < kind.free_at_start:
                reason = (
                    f"{held} minibatches from worker processes left {free} of {kind.free_at_start} "
                    f"{kind.name}; {kind.cure}"
                )
                return held // 2 if held >= _FEW else 0, reason
        return None


class FrameworkEpoch(Generic[T], Iterator[Any]):
    """An iterator of finish(minibatch, {table: features}).

    If sampling a minibatch fails, here or in a worker, the error is raised when that minibatch is due, and
    ends the epoch.

    ids_of: returns the rows of each table that a minibatch reads, on any device. bytes_of: returns the memory
    of a minibatch. in_workers: minibatches come from worker processes. If this process cannot hold a window
    of them, the window is lowered and a warning is logged.
    """

    def __init__(
        self,
        feature_loader: FeatureLoader,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        finish: Callable[[T, Features], Any] = lambda minibatch, rows: (minibatch, rows),
        *,
        bytes_of: Callable[[T], int],
        in_workers: bool,
    ) -> None:
        self._headroom, self._finish = Headroom() if in_workers else None, finish
        if feature_loader.device.type == "cpu":
            of_any_device, ids_of = ids_of, lambda minibatch: on_host(of_any_device(minibatch))
        self._stream = feature_loader.attach_epoch(
            EpochInput(minibatches=minibatches, ids_of=ids_of, bytes_of=bytes_of)
        )

    def __next__(self) -> Any:
        if self._headroom is not None:
            limit = self._headroom.window_limit(self._stream.ahead)
            if limit is not None:
                self._stream.limit_window(*limit)
        minibatch, features = next(self._stream)
        try:
            return self._finish(minibatch, features)
        except BaseException as error:
            self._stream.fail(error)
            raise

    def close(self) -> None:
        """End the epoch: reads finish, workers stop. Idempotent. Its end, and dropping it, do the same."""
        self._stream.close()
