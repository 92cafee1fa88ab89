"""The machine and the installed packages, for reports of benchmarks and `gids info --system`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gids
from gids.cuda.driver import ask_driver

PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "dgl": ("dgl",),
    "torch_geometric": ("torch_geometric",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "matplotlib": ("matplotlib",),
}
"""The packages that gids can use -> the names under which they are distributed."""


def this_machine() -> dict[str, Any]:
    """The object "machine" of docs/bench-schema.json."""
    return {
        "processor": fields(Path("/proc/cpuinfo")).get("model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes("MemTotal"),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "gpus": [device.name for device in ask_driver().devices],
    }


def package_version(name: str) -> str | None:
    """The installed version of a package of PACKAGES; None if it is not installed."""
    for candidate in PACKAGES[name]:
        try:
            return version(candidate)
        except PackageNotFoundError:
            continue
    return None


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages."""
    installed = {name: number for name in PACKAGES if (number := package_version(name))}
    return {"python": platform.python_version(), "gids": gids.__version__, **installed}


def memory_bytes(name: str, root: Path = Path("/")) -> int | None:
    """A field of /proc/meminfo, such as MemTotal; None if it is not there. root: the folder of proc."""
    number = fields(root / "proc/meminfo").get(name, "").removesuffix(" kB")
    return 1024 * int(number) if number.isdigit() else None


def fields(path: Path) -> dict[str, str]:
    """`name: value` lines of a file; of equal names the first."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in reversed(lines)]
    return {name.strip(): value.strip() for name, _, value in pairs}
