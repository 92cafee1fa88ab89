"""What figures were measured on: the machine, the versions, the commit. Called by report.py.

Looks and never fails because something is absent.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("gids", "numpy", "torch", "dgl", "cupy-cuda13x", "cupy-cuda12x", "matplotlib")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, load and CUDA devices. Sizes in bytes."""
    from gids.cuda.driver import ask_driver

    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "gpus": [device.name for device in ask_driver().devices],
    }


def versions() -> dict[str, str]:
    """Of Python and of the installed packages that take part."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any] | None:
    """The commit of the checkout that this package is run from, and whether files differ from it; or None."""
    source = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:  # installed below somebody else's checkout
        return None
    found = git("rev-parse", "HEAD")
    return None if found is None else {"hash": found, "modified": bool(git("status", "--porcelain"))}


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
