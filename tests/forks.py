"""Functions in forks of a process that has imported torch, DGL and PyG, which takes seconds.

A fork begins without threads.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_pool import fork_context

_TIMEOUT_S = 300
_ALL = ("gids.dgl", "gids.pyg", "gids.distributed", "torch._dynamo")


class Done(NamedTuple):
    returncode: int | None
    stdout: str
    stderr: str


class Fork:
    """Calls function(*arguments). folder: a new one, for what it prints.

    modules: imported once for all forks, if this is the first one.
    """

    def __init__(
        self, folder: Path, function: Callable[..., Any], *arguments: Any, modules: tuple[str, ...] = _ALL
    ) -> None:
        context = fork_context(*modules)
        folder.mkdir()
        self._folder = folder
        self._process = context.Process(target=_call, args=(folder, function, arguments))
        self._process.start()

    def done(self) -> Done:
        """Wait until it has ended."""
        self._process.join(_TIMEOUT_S)
        self._process.kill()
        self._process.join()
        printed = [(self._folder / name).read_text() for name in ("stdout", "stderr")]
        return Done(self._process.exitcode, *printed)


def peak_bytes(folder: Path, function: Callable[..., Any], *arguments: Any) -> int:
    """What a call adds at most to the memory of a fork."""
    fork = Fork(folder, _measure, function, arguments, modules=("gids.convert", "forks")).done()
    assert fork.returncode == 0, fork.stderr
    return int(fork.stdout.split()[-1])


def _measure(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    before = _peak_bytes()
    function(*arguments)
    print(_peak_bytes() - before)


def _peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def _call(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    function(*arguments)


def run_ranks(folder: Path, size: int, words: list[str]) -> str:
    """Run a script and its arguments on several ranks, with the environment that torchrun gives them. Returns
    what the ranks print; all must end well."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    folder.mkdir()
    forks = [Fork(folder / str(rank), _be_rank, rank, environment, words) for rank in range(size)]
    ended = [fork.done() for fork in forks]
    assert [rank.returncode for rank in ended] == [0] * size, "\n".join(rank.stderr for rank in ended)
    return "".join(rank.stdout for rank in ended)


def _be_rank(rank: int, environment: dict[str, str], words: list[str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
