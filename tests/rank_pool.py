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
        function, arguments, rank, size, meeting = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=_TIMEOUT_S / 2),
            )
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
        context = fork_context("gids.distributed", "gids.pyg")
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0
        self._pipes: list[Connection] = []
        self.processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(
        self, size: int, function: Callable[..., Any], *arguments: Any, by_rank: Sequence[Any] = ()
    ) -> list[Any]:
        """The results of function(*arguments) on ranks 0 to size - 1. by_rank: a last argument for each."""
        self._jobs += 1
        meeting = str(Path(self._folder.name) / f"meeting-{self._jobs}")
        pipes = self._pipes[:size]
        for rank, pipe in enumerate(pipes):
            pipe.send((function, (*arguments, *by_rank[rank : rank + 1]), rank, size, meeting))
        results: dict[int, Any] = {}
        while len(results) < size:
            ready = wait([p for r, p in enumerate(pipes) if r not in results], _TIMEOUT_S)
            assert ready, f"ranks {sorted(set(range(size)) - set(results))} do not answer"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[pipes.index(pipe)] = pipe.recv()
        failed = [f"rank {r}: {told}" for r, (ok, told) in sorted(results.items()) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [results[r][1] for r in range(size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()
