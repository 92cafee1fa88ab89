"""What this machine can do for gids: `gids info --system [PATH]`.

Each item is one small function. Nothing here fails because a part of the machine or a package is absent.
Files of /proc and /sys are read below `root`, so that tests can replace them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gids.bench.machine import PACKAGES, memory_bytes, package_version
from gids.cuda.driver import Driver, ask_driver
from gids.io.device.kvikio_reader import why_no_gds
from gids.sizes import format_bytes, memory_groups


@dataclass(frozen=True)
class Item:
    """One line of the table. advice: what to change, or "" when nothing needs to."""

    item: str
    found: str
    advice: str = ""


def describe_system(
    path: Path,
    *,
    root: Path = Path("/"),
    load: Callable[[str], Any] = ctypes.CDLL,
    try_kvikio: Callable[[Path], str] = why_no_gds,
) -> list[Item]:
    """Describe this machine and the file system of path (a file, dataset or directory).

    root: contains proc and sys. load: opens a shared library, as ctypes.CDLL. try_kvikio: says why kvikio
    does not read a file by GPUDirect Storage; called if there is a device. Writes nothing but a temporary
    file of 8 KiB, if path is a directory without a dataset.
    """
    driver = ask_driver(load)
    has_gpu = bool(driver.devices)
    return [
        Item("kernel", f"{platform.system()} {platform.release()}"),
        Item("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        _memory(root),
        *_file_system(path),
        *_cuda(driver),
        _kvikio_reads(path, has_gpu, try_kvikio),
        *(_package(name, has_gpu) for name in PACKAGES if name != "matplotlib"),
    ]


def as_table(items: list[Item]) -> Iterator[str]:
    """Lines in two columns, with each advice below its item."""
    width = max(len(i.item) for i in items)
    for i in items:
        yield f"{i.item:<{width}}  {i.found}"
        if i.advice:
            yield f"{'':<{width}}  -> {i.advice}"


def _memory(root: Path) -> Item:
    total, available = memory_bytes("MemTotal", root), memory_bytes("MemAvailable", root)
    if total is None or available is None:
        return Item("memory", "unknown: not in /proc/meminfo")
    state = f"{format_bytes(total)}, {format_bytes(available)} available"
    files = [group / name for group, name, _ in memory_groups(root)]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    least = min((int(limit) for limit in limits if limit.isdigit()), default=total)
    if least < total:
        advice = "raise the limit of the control group, or keep memory= of gids.open() below it"
        return Item("memory", f"{state}, limited to {format_bytes(least)}", advice)
    return Item("memory", state)


def _file_system(path: Path) -> Iterator[Item]:
    from gids.io import probe

    name = f"direct I/O at {path}"
    try:
        with _some_file(path) as file:
            probed = probe(file)
    except OSError as error:
        yield Item(name, f"not tried: {error.strerror or error}", "give a file, or a writable directory")
        return
    if probed["direct"]:
        yield Item(name, f"{probed['file_system']}, O_DIRECT, alignment {probed['alignment']} B")
    else:
        advice = "keep datasets on a local file system with direct I/O, such as ext4 or XFS on NVMe"
        yield Item(name, f"{probed['file_system']}, no O_DIRECT ({probed['direct_note']})", advice)
    if obstacle := probed["io_uring_note"]:
        advice = (
            "gids reads with threads instead, which takes more CPU time. Allow io_uring: Linux 5.6 or later, "
            "sysctl kernel.io_uring_disabled=0, a larger `ulimit -l`, and in a container a seccomp profile "
            "that permits it"
        )
        yield Item("io_uring", f"no: {obstacle}", advice)
    else:
        yield Item("io_uring", "yes")


@contextlib.contextmanager
def _some_file(path: Path) -> Iterator[Path]:
    """A file in the file system of path."""
    manifest = path / "manifest.json"
    if not path.is_dir() or manifest.is_file():
        yield manifest if path.is_dir() else path
        return
    with tempfile.NamedTemporaryFile(dir=path, prefix=".gids-") as file:
        file.write(os.urandom(8192))
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _cuda(driver: Driver) -> Iterator[Item]:
    supported = "" if driver.version is None else "CUDA {}.{}".format(*driver.version)
    yield Item("CUDA driver", "; ".join(part for part in (supported, driver.fault) if part))
    for number, device in enumerate(driver.devices):
        capability = "{}.{}".format(*device.capability)
        memory = format_bytes(device.memory_bytes)
        yield Item(f"CUDA device {number}", f"{device.name}, {memory}, compute capability {capability}")


def _kvikio_reads(path: Path, has_device: bool, try_kvikio: Callable[[Path], str]) -> Item:
    """Try reads with kvikio, rather than list what they need."""
    name = f"GPUDirect Storage at {path}"
    if not has_device:
        return Item(name, "not tried: no CUDA device")
    try:
        with _some_file(path) as file:
            reason = try_kvikio(file)
    except OSError as error:
        return Item(name, f"not tried: {error.strerror or error}")
    advice = (
        "reads go through pinned host memory instead. To use GDS, install kvikio, load nvidia-fs (or set "
        "use_pci_p2pdma in cufile.json), keep the dataset on ext4 (data=ordered) or XFS on NVMe, and run "
        "`gdscheck -p`"
    )
    return Item(name, f"no: {reason}", advice) if reason else Item(name, "yes, by kvikio")


def _package(name: str, has_gpu: bool) -> Item:
    installed = package_version(name)
    if installed is not None:
        cpu_only = name == "torch" and has_gpu and installed.endswith("+cpu")
        advice = "install a CUDA build of torch: this one cannot use the GPU"
        return Item(name, installed, advice if cpu_only else "")
    advice = "pip install 'gids-loader[cuda13]' (CUDA 12: 'gids-loader[cuda12]')"
    return Item(name, "not installed", advice if has_gpu and name in ("cupy", "kvikio") else "")
