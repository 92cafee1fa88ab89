"""Builds and runs every test_*.cpp of this folder under the thread sanitizer; if slow tests run, also under
those of addresses and undefined behaviour. Object files stay in pytest's cache.

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
WARNINGS = ["-Wall", "-Wextra", "-Winvalid-pch", "-Werror"]
STANDARD = ["algorithm", "array", "atomic", "condition_variable", "deque", "fstream", "functional", "future"]
STANDARD += ["iostream", "map", "memory", "mutex", "random", "set", "span", "stdexcept", "string"]
STANDARD += ["system_error", "thread", "unordered_map", "vector"]

Objects = Callable[[Path, str], list[Path]]


@pytest.fixture(scope="session")
def objects_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Objects]:
    """(test, variant) -> its object files; each is compiled once, ahead of the tests and on every core.

    The headers of the standard library, most of what there is to compile, are compiled once per variant. What
    is compiled has a checksum of all it was made of in its name.
    """
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler ({COMPILER})")
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    folder = request.config.cache.mkdir("native") if has_cache else tmp_path_factory.mktemp("objects")
    compiler = run([COMPILER, "--version"]).stdout
    headers_crc = crc_of(*sorted(NATIVE.rglob("*.h")), *sorted(HERE.glob("*.h")))
    jobs: dict[tuple[Path, str], Future[Path]] = {}

    def made(name: str, suffix: str, crc: int, *command: str | Path) -> Path:
        """The file that the command makes. An earlier one is taken if it was made of the same."""
        target = folder / f"{name}-{crc:08x}{suffix}"
        if not target.exists():
            for older in folder.glob(f"{name}-????????{suffix}"):
                older.unlink(missing_ok=True)  # of another process of tests
            partial = folder / f"{os.getpid()}-{target.name}"
            run([*command, "-o", partial])
            partial.replace(target)
        return target

    def compile_headers(variant: str) -> Path:
        text = "".join(f"#include <{name}>\n" for name in STANDARD)
        options = [*flags(variant), *WARNINGS]
        crc = zlib.crc32(f"{compiler} {options} {text}".encode())
        header = folder / f"{variant}-{crc:08x}.h"
        if not header.exists():
            header.write_text(text)
        made(variant, ".h.gch", crc, COMPILER, *options, "-x", "c++-header", header)
        return header

    def compile_one(source: Path, variant: str) -> Path:
        header = headers[variant].result()
        command = [COMPILER, *flags(variant), *WARNINGS, "-include", header, "-c", source]
        crc = zlib.crc32(f"{compiler} {command}".encode(), crc_of(source) ^ headers_crc)
        return made(f"{variant}-{source.parent.name}-{source.stem}", ".o", crc, *command)

    def start(test: Path, variant: str) -> list[Future[Path]]:
        found = [(source, variant) for source in [test, *sources_of(test)]]
        for job in found:
            if job not in jobs:
                jobs[job] = pool.submit(compile_one, *job)
        return [jobs[job] for job in found]

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        tests = [
            item.callspec.params
            for item in request.session.items
            if isinstance(item, pytest.Function) and item.function is test_native
        ]
        # Ahead of the objects, which wait for them.
        headers = {
            variant: pool.submit(compile_headers, variant) for variant in {t["variant"] for t in tests}
        }
        for test in tests:
            start(**test)
        yield lambda test, variant: [job.result() for job in start(test, variant)]
    finally:
        pool.shutdown(cancel_futures=True)


def crc_of(*files: Path) -> int:
    crc = 0
    for file in files:
        crc = zlib.crc32(file.read_bytes(), crc)
    return crc


def flags(variant: str) -> list[str | Path]:
    return [
        "-std=c++20",
        "-g1",  # line numbers in what a sanitizer prints
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


USUAL = "thread"
"""The variant in which tests run by default."""
SLOW = (
    "test_annex",
    "test_bulk_sampling",
    "test_io_engine",
    "test_node_set",
    "test_out_of_memory",
)
SLOW += ("test_page_cache", "test_request_queue")  # tests/cache and tests/io compare these with their models
ONE_THREAD = ("test_out_of_memory",)
"""Tests whose threads wait for each other all the time: only the other sanitizers look at them."""


@pytest.mark.parametrize(
    ("test", "variant"),
    [
        pytest.param(
            test,
            variant,
            marks=[pytest.mark.slow] if variant != USUAL or test.stem in SLOW else [],
            id=f"{test.stem}-{variant}",
        )
        for test in sorted(HERE.glob("test_*.cpp"))
        for variant in VARIANTS
        if not (variant == "thread" and test.stem in ONE_THREAD)
    ],
)
def test_native(test: Path, variant: str, objects_of: Objects, tmp_path: Path) -> None:
    objects = objects_of(test, variant)
    program = tmp_path / test.stem
    run([COMPILER, *flags(variant), *objects, "-o", program])
    work = tmp_path / "work"
    work.mkdir()
    launch: list[str | Path] = [program, work]
    if variant == "thread" and shutil.which("setarch"):
        # Older runtimes of the thread sanitizer cannot stand much randomisation of addresses.
        launch = ["setarch", platform.machine(), "-R", *launch]
    print(run(launch).stdout)
