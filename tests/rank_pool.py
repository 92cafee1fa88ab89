"""Processes that are ranks of torch.distributed, one test after the other: to start one takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from gids.cuda.driver import ask_driver

_TIMEOUT_S = 120.0


class RankError(AssertionError):
    """What a rank raised."""


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        function, arguments, rank, size, meeting, timeout_s = job
        try:
            store = dist.FileStore(meeting, size)
            store.set_timeout(timedelta(seconds=_TIMEOUT_S / 2))
            store.set(f"rank {rank}", "imported the function")  # before the time-out of the group runs
            store.wait([f"rank {other}" for other in range(size)])
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            try:
                dist.barrier()  # a rank that ends at once would cut the connections that others still make
                result = True, function(*arguments)
            finally:
                dist.destroy_process_group()
        except BaseException:
            result = False, traceback.format_exc()
        pipe.send(result)


def fork_context(*modules: str) -> ForkServerContext:
    """Processes are forks of one that has imported these modules. With a GPU they are not imported there: PyG
    uses CUDA while it is imported, and then no fork can use it.
    """
    context = multiprocessing.get_context("forkserver")
    if not ask_driver().devices:
        context.set_forkserver_preload(list(modules))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSAFEPATH", "1")  # it would import gids from the checkout, without native code
        forkserver.ensure_running()
    return context


class RankPool:
    """Ranks 0 to size - 1. Close it at the end."""

    def __init__(self, size: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._context = fork_context("gids.distributed", "gids.pyg")
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._pipes[rank:] = [mine, *self._pipes[rank + 1 :]]
        self.processes[rank:] = [process, *self.processes[rank + 1 :]]

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        by_rank: Sequence[Any] = (),
        lost: int | None = None,
        timeout_s: float = _TIMEOUT_S / 2,
    ) -> list[Any]:
        """The results of function(*arguments) on ranks 0 to size - 1. by_rank: a last argument for each.

        lost: a rank that ends or stops, whose result is None. timeout_s: of the process group.
        """
        self._jobs += 1
        meeting = str(Path(self._folder.name) / f"meeting-{self._jobs}")
        pipes = self._pipes[:size]
        for rank, pipe in enumerate(pipes):
            pipe.send((function, (*arguments, *by_rank[rank : rank + 1]), rank, size, meeting, timeout_s))
        results: dict[int, Any] = {}
        if lost is not None:
            results[lost] = True, None
        while len(results) < size:
            ready = wait([p for r, p in enumerate(pipes) if r not in results], _TIMEOUT_S)
            assert ready, f"ranks {sorted(set(range(size)) - set(results))} do not answer"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[pipes.index(pipe)] = pipe.recv()
        if lost is not None:
            self._end(lost)
            self._start(lost)
        failed = [f"rank {r}: {told}" for r, (ok, told) in sorted(results.items()) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [results[r][1] for r in range(size)]

    def _end(self, rank: int, timeout_s: float = 0) -> None:
        self._pipes[rank].close()
        self.processes[rank].join(timeout_s)
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        for rank in range(len(self.processes)):
            self._end(rank, 10)
        self._folder.cleanup()
