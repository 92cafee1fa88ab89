"""What ranks with an emulated device do in tests of the shared topology.

In a module of its own: the processes of ranks import it.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import emulator
import torch
import torch.distributed as dist
from emulator import EmulatedDevice
from programs import check_same, logged

import gids
import gids.distributed
from gids import cuda
from gids.sampler.device import pinned_graph

Seeds = torch.Tensor | dict[str, torch.Tensor]


def open_emulated(folder: str) -> EmulatedDevice:
    """The device that device="cuda" opens from now on, in a process of its own."""
    emulator.folder = Path(folder)
    device = EmulatedDevice()
    cuda.open_device = lambda name=None: device  # type: ignore[assignment]
    return device


@contextlib.contextmanager
def emulated(folder: str) -> Iterator[EmulatedDevice]:
    """The emulated device in place of a GPU. Its kernels are compiled in the folder."""
    before = cuda.open_device
    try:
        yield open_emulated(folder)
    finally:
        cuda.open_device = before  # type: ignore[assignment]


def shared_mappings() -> list[dict[str, int]]:
    """The mappings of shared memory of this process: inode, and bytes by the kernel's name."""
    found: list[dict[str, int]] = []
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        head, *lines = entry.splitlines()
        if head.partition("memfd:")[2].startswith("gids"):
            sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", "\n".join(lines), re.MULTILINE))
            found.append({"inode": int(head.split()[4])} | {k: 1024 * int(v) for k, v in sizes.items()})
    return found


def make_loader(source: Any, seeds: Seeds, **options: Any) -> gids.NodeLoader:
    return gids.NodeLoader(
        source, seeds, [3, 4], **{"seed": 0, "batch_size": 20, "shuffle": True, "tables": []} | options
    )


def compare(mine: gids.NodeLoader, theirs: gids.NodeLoader) -> None:
    for a, b in zip(mine, theirs, strict=True):
        check_same(a, b)


def look(loader: gids.NodeLoader) -> dict[str, Any]:
    """What a rank holds while all have the loader."""
    memory, pinned = loader.stats()["memory"], loader._topology.pinned
    dist.barrier()
    saw = {
        "mappings": shared_mappings(),
        "allocated": memory["topology"],
        "on the device": memory["topology on the device"],
        "borrowed": sum(p.borrowed_bytes for p in pinned),
        "repr": repr(pinned[0]) if pinned else "",
        "over bus": [p.over_bus for p in pinned],
    }
    dist.barrier()
    return saw


def share(
    folder: str | None, path: Path, seeds: Seeds, opened_by: str, options: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """Compare a loader whose ranks share the topology with one that has a copy of its own.

    folder: None for a GPU. own: options of this rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    options = options | own
    opening = contextlib.nullcontext() if folder is None else emulated(folder)
    with opening as device, patch("gids.sampler.device.pinned_graph._COPIED_AT_ONCE", 1 << 12):
        opened = gids.open(path) if opened_by == "open" else gids.distributed.open(path)
        with opened as source, gids.open(path) as whole:
            alone_options = options | {"rank": rank, "world_size": size}
            with (
                make_loader(source, seeds, **options) as mine,
                make_loader(whole, seeds, **alone_options) as alone,
            ):
                saw = look(mine)
                saw["alone"] = alone.stats()["memory"]["topology"]
                compare(mine, alone)
        assert device is None or not device.mapped
    gc.collect()
    saw["left"] = shared_mappings()
    return saw


def refuse(folder: str, path: Path, seeds: Seeds, refusing: int) -> dict[str, Any]:
    """The rank `refusing` cannot use shared memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulated(folder))
        lines = stack.enter_context(logged())
        source = stack.enter_context(gids.open(path))
        if rank == refusing:
            denied = PermissionError(13, "Permission denied")
            stack.enter_context(patch.object(pinned_graph, "open_shared", side_effect=denied))
        mine = stack.enter_context(make_loader(source, seeds, device="cuda", topology_on="host"))
        saw = look(mine)
        alone = stack.enter_context(make_loader(source, seeds, rank=rank, world_size=size))
        compare(mine, alone)
    return saw | {"log": [line for line in lines if "do not share" in line]}


def fail(folder: str, path: Path, seeds: Seeds, failing: int) -> tuple[str, str]:
    """The error of each rank, if the rank `failing` cannot fill its memory. Then they make another one."""
    saw = ("", "")
    no_memory = MemoryError("no memory to convert")
    with emulated(folder) as device, gids.open(path) as source:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == failing:
                fill = "gids.sampler.device.pinned_graph.OnHost.fill"
                stack.enter_context(patch(fill, side_effect=no_memory))
            try:
                make_loader(source, seeds, device="cuda", topology_on="host").close()
            except Exception as error:
                saw = type(error).__name__, str(error)
        assert not device.mapped
        gc.collect()
        assert not shared_mappings()
        dist.barrier()
        with make_loader(source, seeds, device="cuda", topology_on="host") as loader:
            next(iter(loader))
            assert shared_mappings()
    return saw


def live_on(tell: Callable[[Any], None], folder: str, path: Path, seeds: Seeds, killed: Path) -> int:
    """Sample once rank 0, which allocated the topology, was killed: this file tells it. Returns the number of
    minibatches, which are right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    open_emulated(folder)
    source = gids.open(path)
    mine = make_loader(source, seeds, device="cuda", topology_on="host")
    alone = list(make_loader(source, seeds, rank=rank, world_size=size))
    tell(sorted(found["inode"] for found in shared_mappings()))
    while not killed.exists():
        time.sleep(0.01)
    for a, b in zip(mine, alone, strict=True):
        check_same(a, b)
    return len(alone)
