"""What this machine can do for gids: `gids info --system [PATH]`.

Each item is one small function. Nothing here fails because a part of the machine or a package is absent.
Files of /proc and /sys are read below `root`, so that tests can replace them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gids.bench.machine import PACKAGES, fields, memory_bytes, package_version
from gids.cuda.driver import Driver, ask_driver
from gids.io.device.kvikio_reader import why_no_gds
from gids.sizes import format_bytes, memory_groups

_MEMLOCK_BYTES = 1 << 30  # the largest buffer that can be registered
_IPC_LOCK = 1 << 14  # the capability for which the limit does not count; root lacks it in a container
_WHEELS = {"cupy": "'cupy-cuda13x[ctk]'", "kvikio": "kvikio-cu13"}  # for a GPU


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
        _kernel(platform.release()),
        _cores(),
        _memory(root),
        *_file_system(path),
        _memlock(root),
        *_cuda(driver),
        *(_pcie(root, device.pci) for device in driver.devices if device.pci),
        *_kvikio_reads(path, has_gpu, try_kvikio),
        *(_package(name, has_gpu) for name in PACKAGES if name != "matplotlib"),
    ]


def as_table(items: list[Item]) -> Iterator[str]:
    """Lines in two columns, with each advice below its item."""
    width = max(len(i.item) for i in items)
    for i in items:
        yield f"{i.item:<{width}}  {i.found}"
        if i.advice:
            yield f"{'':<{width}}  -> {i.advice}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _kernel(release: str) -> Item:
    numbers = re.match(r"(\d+)\.(\d+)", release)
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < (6, 1)
    advice = "update to Linux 6.1 or later: less CPU time per read, and a known alignment of direct I/O"
    return Item("kernel", f"{platform.system()} {release}", advice if old else "")


def _cores() -> Item:
    advice = "this process is limited to some of the cores: see taskset and cpusets"
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Item("cores", f"{cores} of {all_cores}", advice if cores < all_cores else "")


def _memory(root: Path) -> Item:
    total, available = memory_bytes("MemTotal", root), memory_bytes("MemAvailable", root)
    if total is None or available is None:
        return Item("memory", "unknown: not in /proc/meminfo")
    state = f"{format_bytes(total)}, {format_bytes(available)} available"
    limits = [_read(group / name) or "max" for group, name, _ in memory_groups(root)]
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
        from gids import _core

        yield _io_uring(_core.why_no_uring())
        return
    if probed["direct"]:
        yield Item(name, f"{probed['file_system']}, O_DIRECT, alignment {probed['alignment']} B")
    else:
        advice = "keep datasets on a local file system with direct I/O, such as ext4 or XFS on NVMe"
        yield Item(name, f"{probed['file_system']}, no O_DIRECT ({probed['direct_note']})", advice)
    yield _io_uring(probed["io_uring_note"])


def _io_uring(obstacle: str) -> Item:
    if not obstacle:
        return Item("io_uring", "yes")
    advice = (
        "gids reads with threads instead, which takes more CPU time. Allow io_uring: kernel 5.6 or later, "
        "sysctl kernel.io_uring_disabled=0, a larger `ulimit -l`, and in a container a seccomp profile that "
        "permits it"
    )
    return Item("io_uring", f"no: {obstacle}", advice)


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


def _memlock(root: Path) -> Item:
    capabilities = int(fields(root / "proc/self/status").get("CapEff", "0"), 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    fine = soft == resource.RLIM_INFINITY or soft >= _MEMLOCK_BYTES or bool(capabilities & _IPC_LOCK)
    cure = (
        "`ulimit -l unlimited`" if hard == resource.RLIM_INFINITY else "memlock in /etc/security/limits.conf"
    )
    advice = f"raise it with {cure}: larger buffers are not registered, and reads take more CPU time"
    return Item("RLIMIT_MEMLOCK", limit, "" if fine else advice)


def _cuda(driver: Driver) -> Iterator[Item]:
    supported = "" if driver.version is None else "CUDA {}.{}".format(*driver.version)
    yield Item("CUDA driver", "; ".join(part for part in (supported, driver.fault) if part))
    for number, device in enumerate(driver.devices):
        capability = "{}.{}".format(*device.capability)
        memory = format_bytes(device.memory_bytes)
        yield Item(f"CUDA device {number}", f"{device.name}, {memory}, compute capability {capability}")


def _pcie(root: Path, address: str) -> Item:
    folder = root / "sys/bus/pci/devices" / address
    speed, width = _read(folder / "max_link_speed"), _read(folder / "max_link_width")
    now_width = _read(folder / "current_link_width")
    name = f"PCIe of {address}"
    gigatransfers = re.match(r"[\d.]+", speed or "")
    if gigatransfers is None or not width:
        return Item(name, "unknown: the system does not report the link")
    generations = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
    generation = generations.get(gigatransfers[0], "?")
    narrow = bool(now_width) and now_width != width
    advice = f"use a slot with {width} lanes: the link has {now_width}"
    return Item(name, f"generation {generation}, {now_width or width} lanes", advice if narrow else "")


def _kvikio_reads(path: Path, has_device: bool, try_kvikio: Callable[[Path], str]) -> Iterator[Item]:
    """Try reads with kvikio, rather than list what they need."""
    name = f"GPUDirect Storage at {path}"
    if not has_device:
        yield Item(name, "not tried: no CUDA device")
        return
    try:
        with _some_file(path) as file:
            reason = try_kvikio(file)
    except OSError as error:
        yield Item(name, f"not tried: {error.strerror or error}")
        return
    if not reason:
        yield Item(name, "yes, by kvikio")
        return
    if "not installed" in reason:
        advice = ""  # the item of kvikio has it
    elif "forbids" in reason:
        advice = "unset KVIKIO_COMPAT_MODE"
    else:
        advice = (
            "reads go through pinned host memory instead. To use GDS, load nvidia-fs (or set use_pci_p2pdma "
            "in cufile.json), keep the dataset on ext4 (data=ordered) or XFS on NVMe, and run `gdscheck -p`"
        )
    yield Item(name, f"no: {reason}", advice)


def _package(name: str, has_gpu: bool) -> Item:
    installed = package_version(name)
    if installed is not None:
        cpu_only = name == "torch" and has_gpu and installed.endswith("+cpu")
        advice = "install a CUDA build of torch: this one cannot use the GPU"
        return Item(name, installed, advice if cpu_only else "")
    wheel = _WHEELS.get(name, "") if has_gpu else ""
    other = wheel.replace("cuda13x", "cuda12x").replace("cu13", "cu12")
    return Item(name, "not installed", f"pip install {wheel} (CUDA 12: {other})" if wheel else "")
