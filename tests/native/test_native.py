"""Builds and runs every test_*.cpp of this folder: as it is, and under the thread and address sanitizers.

The first line of a test names what it links, as patterns below native/: `// sources: io/*.cpp`. The program
gets a directory to work in as its argument; it passes when it exits with 0.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
COMPILER = os.environ.get("CXX", "g++")
VARIANTS = {
    "plain": [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
WARNINGS = ["-Wall", "-Wextra", "-Werror"]

Compile = Callable[[Path, str], Path]


@pytest.fixture(scope="session")
def compile_object(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """(source, variant) -> object file; each is compiled once in a session."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler ({COMPILER})")
    folder = tmp_path_factory.mktemp("objects")

    def compile_one(source: Path, variant: str) -> Path:
        target = folder / variant / f"{source.parent.name}-{source.stem}.o"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            run([COMPILER, *flags(variant), *WARNINGS, "-c", source, "-o", target])
        return target

    return compile_one


def flags(variant: str) -> list[str | Path]:
    return [
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        "-ffp-contract=off",
        f"-I{NATIVE}/include",
        f"-I{NATIVE}",
        f"-I{HERE}",
        *VARIANTS[variant],
    ]


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}", pytrace=False)
    return done


def sources_of(test: Path) -> list[Path]:
    first = test.read_text().splitlines()[0]
    prefix = "// sources:"
    assert first.startswith(prefix), f"{test.name}: the first line must be '{prefix} PATTERN ...'"
    return [
        source for pattern in first.removeprefix(prefix).split() for source in sorted(NATIVE.glob(pattern))
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("test", sorted(HERE.glob("test_*.cpp")), ids=lambda path: path.stem)
def test_native(test: Path, variant: str, compile_object: Compile, tmp_path: Path) -> None:
    objects = [compile_object(source, variant) for source in [test, *sources_of(test)]]
    program = tmp_path / test.stem
    run([COMPILER, *flags(variant), *objects, "-o", program])
    work = tmp_path / "work"
    work.mkdir()
    launch: list[str | Path] = [program, work]
    if variant == "thread" and shutil.which("setarch"):
        # Older runtimes of the thread sanitizer cannot stand much randomisation of addresses.
        launch = ["setarch", platform.machine(), "-R", *launch]
    print(run(launch).stdout)
