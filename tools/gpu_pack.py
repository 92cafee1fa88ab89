"""Makes the archive of `gpu_check.sh --pack`, for a machine without network. Called by gpu_check.py.

It holds the tracked files but the package and the pages of docs, and in wheels/ gids, built here, and what
gids and its tests need beside torch, NumPy and CuPy. The check installs from wheels/ what the machine lacks.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

LIMIT_BYTES = 10_000_000
BUILD_FOLDER = "build/pack"  # is kept, so that the next build compiles only what changed
FOLDER = "gids-gpu-check"
NEEDED = {  # distribution -> module that shows that it is installed
    "nanobind-backend": "nanobind_backend",
    "tqdm": "tqdm",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "execnet": "execnet",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "packaging": "packaging",
    "pygments": "pygments",
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # of nanobind-backend, the only wheel that is not for all of them
PIP = [sys.executable, "-P", "-m", "pip", "-q", "--disable-pip-version-check"]


class PackError(Exception):
    """The archive cannot be made."""


def pack(root: Path, archive: Path, commit: str) -> int:
    """Write the archive of the clone at root. Returns its bytes. Raises PackError."""
    if platform.machine() != "x86_64":
        raise PackError(f"make the archive on an x86-64 machine (this is {platform.machine()})")
    with tempfile.TemporaryDirectory(prefix="gids-pack-") as temporary:
        wheels = Path(temporary)
        _build(root, wheels)
        _download(wheels)
        partial = archive.with_name(archive.name + ".partial")
        try:
            _write(root, wheels, commit, partial)
            size = partial.stat().st_size
            if size >= LIMIT_BYTES:
                raise PackError(f"the archive has {size:,} bytes; {LIMIT_BYTES:,} is the limit")
            partial.replace(archive)
        finally:
            partial.unlink(missing_ok=True)
    return size


def _build(root: Path, wheels: Path) -> None:
    """The wheel of gids."""
    options = ["--no-deps", f"--config-settings=build-dir={root / BUILD_FOLDER}", "-w", str(wheels)]
    probe = "import nanobind, scikit_build_core"
    if subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True).returncode == 0:
        options.append("--no-build-isolation")
    _run("the wheel of gids cannot be built", [*PIP, "wheel", *options, str(root)])


def _download(wheels: Path) -> None:
    options = ["--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    for glibc in ("2_28", "2_27", "2_17"):
        options += ["--platform", f"manylinux_{glibc}_x86_64"]
    for version in PYTHONS:
        names = list(NEEDED) if version == PYTHONS[0] else ["nanobind-backend"]
        command = [*PIP, "download", *options, "--python-version", version, *names]
        _run(f"the wheels of {', '.join(names)} cannot be downloaded", command)


def _run(what: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"{what}: {done.stderr.strip()[-2000:]}")


def _write(root: Path, wheels: Path, commit: str, archive: Path) -> None:
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        raise PackError(f"{root} must be a git clone: {listed.stderr.strip()}")
    names = [name for name in listed.stdout.split("\0") if name]
    names = [n for n in names if not n.startswith(("gids/", "docs/")) or n.endswith(".json")]
    with tarfile.open(archive, "w") as tar:
        for name in sorted(names):
            if (root / name).is_file():  # or deleted, and not committed yet
                tar.add(root / name, f"{FOLDER}/{name}")
        for wheel in sorted(wheels.glob("*.whl")):
            tar.add(wheel, f"{FOLDER}/wheels/{wheel.name}")
        (wheels / "commit.txt").write_text(commit)
        tar.add(wheels / "commit.txt", f"{FOLDER}/wheels/commit.txt")
