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
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
COMPILER = os.environ.get("CXX", "g++")
NOT_POINTERS = "-fno-sanitize=null,alignment,object-size,vptr,pointer-overflow"
VARIANTS = {
    "thread": ["-O1", "-fsanitize=thread"],
    "undefined": ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"],
    # These programs run for less time than optimizing them takes. AddressSanitizer checks pointers already.
    "address": ["-O0", "-fsanitize=address,undefined", NOT_POINTERS, "-fno-sanitize-recover=all"],
}
FLAGS = ["-std=c++20", "-pthread", "-ffp-contract=off", f"-I{NATIVE}/include", f"-I{NATIVE}", f"-I{HERE}"]
FLAGS += ["-g1", "-Wall", "-Wextra", "-Werror"]  # -g1: line numbers in what a sanitizer prints
DEFAULT = {
    "thread": ["mapped_file", "page_word", "workers"],
    "undefined": ["mix", "ring_count", "variates", "weighted"],
}
"""Tests that need few sources. tests/cache, tests/io, tests/packs and tests/sampler compare what the others
link with models."""
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
STANDARD = (
    "algorithm array atomic condition_variable deque fstream functional future iostream map memory mutex"
)
STANDARD += " random set span stdexcept string system_error thread unordered_map vector"

Built = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """(test, variant) -> its program. Each source is compiled once, ahead of the tests and on every core, and
    so are the headers of the standard library where there are many sources. The name of what is compiled has
    a checksum of all it was made of."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler ({COMPILER})")
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    folder = request.config.cache.mkdir("native") if has_cache else tmp_path_factory.mktemp("objects")
    paths = [*sorted(NATIVE.rglob("*.h")), *sorted(HERE.glob("*.h"))]
    headers = b"".join(path.read_bytes() for path in paths)
    version = run(COMPILER, "--version")

    def made(name: str, source: Path, suffix: str, *options: str) -> Path:
        """The file that the compiler makes. An earlier one is taken if it was made of the same."""
        command = [COMPILER, *FLAGS, *options, str(source)]
        checksum = zlib.crc32(f"{version}{command}".encode() + headers + source.read_bytes())
        target = folder / f"{name}-{checksum:08x}{suffix}"
        if not target.exists():
            for older in folder.glob(f"{name}-????????{suffix}"):
                older.unlink(missing_ok=True)  # of another process of tests
            partial = folder / f"{os.getpid()}-{target.name}"
            run(*command, "-o", str(partial))
            partial.replace(target)
        return target

    def compile_headers(variant: str) -> Path:
        header = folder / f"{variant}.h"
        header.write_text("".join(f"#include <{name}>\n" for name in STANDARD.split()))
        return made(variant, header, ".h.gch", *VARIANTS[variant], "-x", "c++-header").with_suffix("")

    def compile_one(source: Path, variant: str) -> Path:
        name, options = f"{source.parent.name}-{source.stem}-{variant}", [*VARIANTS[variant], "-c"]
        if variant in precompiled:
            options += ["-include", str(precompiled[variant].result())]
            name += "-precompiled"
        return made(name, source, ".o", *options)

    def link(test: str, variant: str) -> Path:
        program = tmp_path_factory.mktemp(f"{test}-{variant}") / test
        objects = [str(jobs[source, variant].result()) for source in sources_of(test)]
        run(COMPILER, *FLAGS, *VARIANTS[variant], *objects, "-o", str(program))
        return program

    wanted = {
        (source, item.callspec.params["variant"]): None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_native
        for source in sources_of(item.callspec.params["test"])
    }
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counts = Counter(variant for _, variant in wanted)
        precompiled = {v: pool.submit(compile_headers, v) for v, count in counts.items() if count > 10}
        jobs: dict[tuple[Path, str], Future[Path]] = {job: pool.submit(compile_one, *job) for job in wanted}
        yield link
        pool.shutdown(cancel_futures=True)


def sources_of(test: str) -> list[Path]:
    path = HERE / f"test_{test}.cpp"
    patterns = path.read_text().splitlines()[0].removeprefix("// sources:").split()
    return [path, *(source for pattern in patterns for source in sorted(NATIVE.glob(pattern)))]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


@pytest.mark.parametrize(
    ("test", "variant"),
    [
        *((name, variant) for variant, names in DEFAULT.items() for name in names),
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
    assert names == {name for each in (DEFAULT, SLOW) for tests in each.values() for name in tests}
