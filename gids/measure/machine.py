"""The machine and the installed packages: one description for `gids info --system`, reports and benchmarks.

Nothing here fails because a part of the machine is absent.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gids
from gids.cuda.driver import Driver, ask_driver

PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "dgl": ("dgl",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "matplotlib": ("matplotlib",),
}
"""The packages that gids can use -> the names under which they are distributed."""


@dataclass(frozen=True)
class Machine:
    """cores: those that this process may use. Memory is None where /proc/meminfo does not say."""

    processor: str
    cores: int
    all_cores: int
    memory_bytes: int | None
    available_bytes: int | None
    kernel: str
    load_average: float
    gpus: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The object "machine" of docs/bench-schema.json."""
        left_out = ("all_cores", "available_bytes")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def this_machine(root: Path = Path("/"), driver: Driver | None = None) -> Machine:
    """Describe this machine. root: the folder of proc. driver: None asks the CUDA driver."""
    memory = _fields(root / "proc/meminfo")

    def bytes_of(name: str) -> int | None:
        number = memory.get(name, "").removesuffix(" kB")
        return 1024 * int(number) if number.isdigit() else None

    return Machine(
        processor=_fields(root / "proc/cpuinfo").get("model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        all_cores=os.cpu_count() or 1,
        memory_bytes=bytes_of("MemTotal"),
        available_bytes=bytes_of("MemAvailable"),
        kernel=platform.release(),
        load_average=os.getloadavg()[0],
        gpus=tuple(device.name for device in (driver or ask_driver()).devices),
    )


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


def _fields(path: Path) -> dict[str, str]:
    """`name: value` lines of a file; of equal names the first."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in reversed(lines)]
    return {name.strip(): value.strip() for name, _, value in pairs}
