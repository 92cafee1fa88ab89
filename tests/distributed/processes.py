"""Ranks in processes of their own, which a test can kill or stop. RankPool is faster for ranks that go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest

PATIENCE_S = 60.0
"""How long a test waits for a rank that should answer at once: the machine may be busy."""


class Outcome(NamedTuple):
    """How a rank ended. error: the name of the class, or None. value: what was returned, or the message."""

    error: str | None
    value: Any


def _be_rank(
    pipe: Connection,
    rank: int,
    size: int,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    patience = timedelta(seconds=PATIENCE_S)
    # As without torchrun, rank 0 has the store: it ends when rank 0 does.
    port = pipe.recv() if rank else 0
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=patience)
    if rank == 0:
        pipe.send(store.port)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    pipe.send("ready")
    try:
        outcome = Outcome(None, function(lambda said: pipe.send(said), *arguments))
    except Exception as error:
        outcome = Outcome(type(error).__name__, str(error))
    pipe.send(outcome)
    dist.destroy_process_group()


class Processes:
    """Ranks 0 to size - 1, which call function(tell, *arguments). tell(value) sends a value to the test.

    timeout_s: of their process group.
    """

    def __init__(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = PATIENCE_S
    ) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack for every lost connection
        # Modules are imported once. Processes are forks of one that has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch.nn.parallel", "gids.distributed"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONSAFEPATH", "1")  # it imports the installed gids, wherever tests run
            forkserver.ensure_running()
        self.ranks = range(size)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in self.ranks:
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_be_rank, args=(theirs, rank, size, timeout_s, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        port = self.told(0)
        for pipe in self._pipes[1:]:
            pipe.send(port)
        for rank in self.ranks:
            assert self.told(rank) == "ready"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def told(self, rank: int, timeout_s: float = PATIENCE_S) -> Any:
        """The next thing that a rank says."""
        ready = wait([self._pipes[rank]], timeout_s)
        assert ready, f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def outcome(self, rank: int, timeout_s: float = PATIENCE_S) -> Outcome:
        """How a rank ends, after all that it says before."""
        end = time.monotonic() + timeout_s
        while not isinstance(said := self.told(rank, max(0.0, end - time.monotonic())), Outcome):
            pass
        return said

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        os.kill(pid, number)

    def has_ended(self, rank: int, timeout_s: float = PATIENCE_S) -> bool:
        self._processes[rank].join(timeout_s)
        return not self._processes[rank].is_alive()
