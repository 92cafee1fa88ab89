"""Opening, choosing and closing engines; errors and their messages."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import ended

import gids.io

PAGE = 4096
ROOT = Path(__file__).parents[2]


def threads() -> dict[int, str]:
    """The name of each thread of this process, by its id."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def wait_until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "kind", "options", "error", "text"),
    [
        ("absent.bin", "auto", {}, FileNotFoundError, r"cannot open .*absent\.bin for reading"),
        (".", "threads", {}, OSError, "neither a regular file nor a block device"),
        ("file", "libaio", {}, ValueError, r"one of auto, uring, threads, mmap \(got 'libaio'\)"),
        ("file", "threads", {"depth": 0}, ValueError, "depth must be .* to .*got"),
        ("file", "threads", {"depth": 1 << 20}, ValueError, "depth must be .* to .*got"),
        ("file", "threads", {"threads": 5000}, ValueError, "threads must be .* to .*got"),
        ("file", "mmap", {"max_read_bytes": 0}, ValueError, "max_read_bytes must be .* to .*got"),
        ("file", "mmap", {"max_merge_bytes": 1 << 31}, ValueError, "max_merge_bytes must be .* to .*got"),
    ],
)
def test_what_cannot_be_opened_is_refused(
    tmp_path: Path, path: str, kind: str, options: dict[str, int], error: type[Exception], text: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(error, match=text):
        gids.io.open_engine([tmp_path / path], kind, **options)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"files": np.array([4], np.uint32)}, ValueError, "file 4 of 4"),
        ({"offsets": np.array([-1])}, ValueError, r"offsets\[0\] is negative: -1"),
        ({"nbytes": 2 * PAGE, "out": np.empty((1, 2 * PAGE), np.uint8)}, ValueError, "max_read_bytes"),
        ({"offsets": np.zeros(2, np.int64)}, ValueError, "differ in length: 1, 2, 1, 1"),
        ({"out": np.empty((1, 100), np.uint8)}, ValueError, r"must have shape \[n, 4096\]"),
        ({"offsets": np.zeros(1, np.int32)}, TypeError, "incompatible function"),
        (
            {"out": np.frombuffer(bytes(PAGE), np.uint8).reshape(1, PAGE)},
            TypeError,
            "incompatible function arguments",
        ),  # not writable
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_reads_are_refused_before_any_is_issued(
    shards: list[Path], changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    read = {"files": np.zeros(1, np.uint32), "offsets": np.zeros(1, np.int64), "nbytes": PAGE}
    with gids.io.open_engine(shards, max_read_bytes=PAGE) as engine:
        with pytest.raises(error, match=text):
            engine.read(*({**read, "out": np.empty((1, PAGE), np.uint8)} | changed).values())
        assert engine.stats()["reads"] == 0


def test_the_error_for_a_file_system_without_direct_io_says_what_to_do() -> None:
    with pytest.raises(
        OSError, match=r"/proc/version: the proc file system refuses .*direct=False.*ext4"
    ) as caught:
        gids.io.open_engine(["/proc/version"])
    assert caught.value.errno == errno.EINVAL
    with gids.io.open_engine(["/proc/version"], "threads", direct=False) as engine:
        out = np.empty((1, 5), np.uint8)
        assert engine.read(np.zeros(1, np.uint32), np.zeros(1, np.int64), 5, out).tolist() == [0]
        assert out.tobytes() == b"Linux"


def test_a_low_limit_of_open_files_is_raised_or_named(shards: list[Path]) -> None:
    def use(raised: bool) -> None:
        few = os.dup(0) + 8  # the lowest free number, and some more
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few + 99 if raised else few))
        if raised:
            with gids.io.open_engine(shards * 9, "threads"):
                assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + 99
        else:
            with pytest.raises(OSError, match=r"too many open files: .* raise `ulimit -n`"):
                gids.io.open_engine(shards * 9, "threads")

    ended(partial(use, True))
    ended(partial(use, False))


def test_closing_is_final_idempotent_and_leaves_nothing(shards: list[Path], kind: str) -> None:
    gc.collect()  # from earlier tests
    before, descriptors = threads().keys(), len(os.listdir("/proc/self/fd"))
    engine = gids.io.open_engine(shards, kind)
    assert f"gids-{kind}" in threads().values()
    engine.close()
    engine.close()
    wait_until(lambda: threads().keys() <= before)  # a joined thread leaves /proc a moment later
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(RuntimeError, match="the I/O engine is closed"):
        engine.read(np.zeros(1, np.uint32), np.zeros(1, np.int64), PAGE, np.empty((1, PAGE), np.uint8))
    assert engine.stats()["reads"] == 0
    dropped = gids.io.open_engine(shards, kind)
    del dropped
    wait_until(lambda: threads().keys() <= before)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_engine_names_itself_and_what_it_found(shards: list[Path], kind: str) -> None:
    with gids.io.open_engine(shards, kind, max_read_bytes=PAGE) as engine:
        assert repr(engine).startswith(f"<gids.io.Engine {kind}: ")
        assert ("buffered" if kind == "mmap" else "direct I/O in units of") in engine.note
        assert engine.alignment in ([1] if kind == "mmap" else [2**i for i in range(17)])
        assert engine.depth * PAGE <= engine.bounce_bytes <= engine.depth * (PAGE + 2 * engine.alignment)


def test_probe_agrees_with_the_engine(shards: list[Path]) -> None:
    found = gids.io.probe(shards[0])
    assert found["direct"] == (not found["direct_note"])
    assert found["io_uring"] == (not found["io_uring_note"])
    assert found["memlock_bytes"] >= -1
    if found["direct"]:
        with gids.io.open_engine(shards, "threads") as engine:
            assert engine.alignment == found["alignment"]
    refused = gids.io.probe("/proc/version")
    assert (refused["file_system"], refused["direct"], refused["alignment"]) == ("proc", False, 1)
    assert "refuses direct I/O" in refused["direct_note"]


def test_without_io_uring_auto_takes_threads_and_says_why_once(shards: list[Path], tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    deny = tmp_path / "deny_io_uring"
    subprocess.run([compiler, "-o", deny, ROOT / "tools/deny_io_uring.c"], check=True)
    script = """
        import logging, sys
        import gids.io
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
        for _ in range(2):
            with gids.io.open_engine(sys.argv[1:]) as engine:
                print(engine.name, "/", engine.note)
        try:
            gids.io.open_engine(sys.argv[1:], "uring")
        except PermissionError as error:
            print(error)
        print(gids.io.probe(sys.argv[1]))
    """
    command = [str(deny), sys.executable, "-P", "-c", textwrap.dedent(script), *map(str, shards)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 126:
        pytest.skip("this system does not let a process filter its own system calls")
    assert done.returncode == 0, done.stderr
    *engines, refused, probed = [line for line in done.stdout.splitlines() if "io_uring" in line]
    assert len(engines) == 2
    reason = "a seccomp profile or security module forbids io_uring"
    for line in engines:
        assert line.startswith("threads / ")
        assert f"not io_uring: {reason}" in line
    assert reason in refused
    assert "'io_uring': False" in probed
    assert done.stderr.count("gids WARNING I/O engine threads") == 1


def test_a_forked_child_cannot_use_the_engine_and_ends_without_it(shards: list[Path]) -> None:
    engine = gids.io.open_engine(shards)

    def read() -> list[int]:
        out = np.empty((1, PAGE), np.uint8)
        return engine.read(np.zeros(1, np.uint32), np.zeros(1, np.int64), PAGE, out).tolist()

    def use() -> None:
        nonlocal engine
        with pytest.raises(RuntimeError, match="was opened before a fork"):
            read()
        engine.close()
        del engine

    assert read() == [0]
    ended(use)
    assert read() == [0]
    engine.close()


def test_failing_to_start_a_thread_is_an_error_and_leaves_no_thread(shards: list[Path]) -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("descriptors would be wanting before memory for threads")
    options: dict[str, Any] = {"depth": 500, "threads": 500, "direct": False, "max_read_bytes": PAGE}
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def run_out_of_memory() -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        before = len(threads())
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (200 << 20), -1))  # a stack takes 2 MiB or more
        with pytest.raises(OSError, match=r"cannot start the thread gids-.*ask for fewer threads"):
            gids.io.open_engine(shards, "threads", **options)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        wait_until(lambda: len(threads()) == before)  # a joined thread leaves /proc a moment later
        with gids.io.open_engine(shards, "threads", direct=False) as engine:
            assert engine.name == "threads"

    ended(run_out_of_memory)


def test_dropping_the_page_cache_of_a_directory_keeps_the_data(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"kept" * 5000)
    gids.io.drop_page_cache(tmp_path)
    assert (tmp_path / "sub" / "a.bin").read_bytes() == b"kept" * 5000


def test_a_path_may_have_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.bin")
    path.write_bytes(b"x" * 100)
    with gids.io.open_engine([path], direct=False) as engine:
        out = np.empty((1, 5), np.uint8)
        assert engine.read(np.zeros(1, np.uint32), np.zeros(1, np.int64), 5, out).tolist() == [0]
    assert gids.io.probe(path)["alignment"] >= 1
