"""Builds and runs every test_*.cpp of this folder under sanitizers; most only if slow tests run. Object files
stay in pytest's cache.

The first line of a test names what it links, as patterns below native/: `// sources: io/*.cpp`. The program
gets a directory to work in as its argument; it passes when it exits with 0.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
COMPILER = os.environ.get("CXX", "g++")
VARIANTS = {
    "thread": ["-O1", "-fsanitize=thread"],
    # Optimizing these checks takes longer than they run.
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
FLAGS = ["-std=c++20", "-pthread", "-ffp-contract=off", f"-I{NATIVE}/include", f"-I{NATIVE}", f"-I{HERE}"]
FLAGS += ["-g1", "-Wall", "-Wextra", "-Werror"]  # -g1: line numbers in what a sanitizer prints
DEFAULT = ["mapped_file", "mix", "page_word", "ring_count", "variates", "weighted", "workers"]
"""Tests of the thread sanitizer that need few sources. tests/cache, tests/io and tests/sampler compare what
the others link with their models."""
SLOW = {
    "thread": [
        "annex",
        "bulk_sampling",
        "io_engine",
        "node_set",
        "page_cache",
        "queue_service",
        "request_queue",
    ],
    "address": ["annex", "io_engine", "out_of_memory", "page_cache", "queue_service"],
}

Built = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """(test, variant) -> its program. Each source is compiled once, ahead of the tests and on every core. The
    name of an object file has a checksum of all it was made of."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler ({COMPILER})")
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    folder = request.config.cache.mkdir("native") if has_cache else tmp_path_factory.mktemp("objects")
    paths = [*sorted(NATIVE.rglob("*.h")), *sorted(HERE.glob("*.h"))]
    headers = b"".join(path.read_bytes() for path in paths)
    version = run(COMPILER, "--version")
    objects: dict[tuple[Path, str], Future[Path]] = {}

    def compile_one(source: Path, variant: str) -> Path:
        command = [COMPILER, *FLAGS, *VARIANTS[variant], "-c", str(source)]
        checksum = zlib.crc32(f"{version}{command}".encode() + headers + source.read_bytes())
        name = f"{variant}-{source.parent.name}-{source.stem}"
        target = folder / f"{name}-{checksum:08x}.o"
        if not target.exists():
            for older in folder.glob(f"{name}-????????.o"):
                older.unlink(missing_ok=True)  # of another process of tests
            partial = folder / f"{os.getpid()}-{target.name}"
            run(*command, "-o", str(partial))
            partial.replace(target)
        return target

    def start(test: str, variant: str) -> list[Future[Path]]:
        path = HERE / f"test_{test}.cpp"
        patterns = path.read_text().splitlines()[0].removeprefix("// sources:").split()
        sources = [path, *(source for pattern in patterns for source in sorted(NATIVE.glob(pattern)))]
        for job in [(source, variant) for source in sources]:
            if job not in objects:
                objects[job] = pool.submit(compile_one, *job)
        return [objects[source, variant] for source in sources]

    def link(test: str, variant: str) -> Path:
        program = tmp_path_factory.mktemp(f"{test}-{variant}") / test
        made = [str(each.result()) for each in start(test, variant)]
        run(COMPILER, *FLAGS, *VARIANTS[variant], *made, "-o", str(program))
        return program

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.function is test_native:
                start(**item.callspec.params)
        yield link
        pool.shutdown(cancel_futures=True)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


@pytest.mark.parametrize(
    ("test", "variant"),
    [
        *((name, "thread") for name in DEFAULT),
        *(pytest.param(name, v, marks=pytest.mark.slow) for v, names in SLOW.items() for name in names),
    ],
)
def test_native(test: str, variant: str, built: Built, tmp_path: Path) -> None:
    launch = [str(built(test, variant)), str(tmp_path)]
    if variant == "thread" and shutil.which("setarch"):
        # Older runtimes of the thread sanitizer cannot stand much randomisation of addresses.
        launch = ["setarch", platform.machine(), "-R", *launch]
    print(run(*launch))


def test_every_program_runs() -> None:
    names = {path.stem.removeprefix("test_") for path in HERE.glob("test_*.cpp")}
    assert names == {*DEFAULT, *SLOW["thread"], *SLOW["address"]}
