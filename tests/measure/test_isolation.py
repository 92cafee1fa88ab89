"""Fresh processes: their input, answer and failures, the cold page cache and the memory limit."""

import os
import re
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from gids.io import drop_page_cache
from gids.measure.isolation import (
    FreshProcessError,
    FreshProcessOutOfMemory,
    FreshProcessTimeout,
    MemoryGroup,
    cached_share,
    run_fresh,
)

THP = re.compile(r"^THP_enabled:\s*(\d)", re.M)
HEAD = """
import sys, os, time
from gids.measure.isolation import serve
from gids.measure.isolation import limit_own_memory
def work(config):
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make the body of work(config) a module, and return its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(body: str) -> str:
        text = HEAD + textwrap.indent(textwrap.dedent(body), "    ") + "\nsys.exit(serve(work))\n"
        (tmp_path / "fresh_program.py").write_text(text)
        return "fresh_program"

    return write


@pytest.fixture
def group():
    try:
        made = MemoryGroup("gids-test")
    except OSError as error:
        pytest.skip(f"no memory cgroup here: {error}")
    with made:
        yield made
    assert not made.path.exists()


def test_the_page_cache_of_a_process_that_joins_a_group_is_limited(group, on_disk, tmp_path):
    before, limit = Path("/proc/self/cgroup").read_text(), 32 << 20
    (tmp_path / "file").write_bytes(bytes(2 * limit))
    drop_page_cache(tmp_path)
    with group.joined(limit):
        assert Path("/proc/self/cgroup").read_text() != before
        assert group.limit_bytes() == limit
        assert not np.memmap(tmp_path / "file", np.uint8, "r").any()
    assert Path("/proc/self/cgroup").read_text() == before
    assert 0 < cached_share(tmp_path / "file") <= 0.5


def test_a_fresh_process_gets_its_config_and_answers(program):
    name = program("return {'pid': os.getpid(), **config}")
    result = run_fresh(name, {"a": [1, 2]})
    assert result.pop("pid") != os.getpid()
    assert result == {"a": [1, 2]}


def test_children_of_a_fresh_process_die_with_it(program, tmp_path):
    name = program("""
        import subprocess
        child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return {"child": child.pid}
    """)
    child = run_fresh(name, {})["child"]
    status = Path(f"/proc/{child}/status")
    for _ in range(600):
        try:
            if "State:\tZ" in status.read_text():
                return
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        (
            "raise KeyError('no table here')",
            FreshProcessError,
            "failed (exit status 1): KeyError: 'no table here'",
        ),
        ("os.kill(os.getpid(), 11)", FreshProcessError, "failed (signal 11)"),
        pytest.param(
            "time.sleep(3600)",
            FreshProcessTimeout,
            "did not end within 1 s and was stopped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failed_process_has_a_reason(program, body, error, reason):
    with pytest.raises(error) as failed:
        run_fresh(program(body), {}, timeout_s=1 if error is FreshProcessTimeout else 60)
    assert failed.value.reason == reason


def test_malloc_has_two_arenas_and_no_huge_pages_in_a_fresh_process_and_its_children(program, monkeypatch):
    if not THP.search(Path("/proc/self/status").read_text()):
        pytest.skip("this kernel does not report whether huge pages are enabled")
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    name = program("""
        import subprocess
        child = ["grep", "THP_enabled", "/proc/self/status"]
        return {
            "own": open("/proc/self/status").read().split("THP_enabled:")[1].split()[0],
            "child": subprocess.run(child, capture_output=True, text=True).stdout.split()[1],
            "arenas": os.environ["MALLOC_ARENA_MAX"],
        }
    """)
    before = THP.findall(Path("/proc/self/status").read_text())
    assert run_fresh(name, {}) == {"own": "0", "child": "0", "arenas": "2"}
    monkeypatch.setenv("MALLOC_ARENA_MAX", "5")
    assert run_fresh(name, {})["arenas"] == "5"
    assert THP.findall(Path("/proc/self/status").read_text()) == before  # this process keeps its setting


def test_a_limited_process_that_takes_more_memory_is_killed(program, group):
    name = program("""
        limit_own_memory(200 << 20)
        return {"bytes": len(bytearray(b"1") * (400 << 20))}
    """)
    with pytest.raises(FreshProcessOutOfMemory) as failed:
        run_fresh(name, {}, group=group)
    assert failed.value.reason == "needed more than 210 MB of memory and was killed by the kernel"


def test_a_child_that_is_killed_for_memory_is_the_reason_of_the_failure(program, group):
    name = program("""
        import subprocess
        limit_own_memory(200 << 20)
        subprocess.run([sys.executable, "-c", "bytearray(b'1') * (400 << 20)"], check=True)
        return {}
    """)
    with pytest.raises(FreshProcessOutOfMemory, match="needed more than 210 MB"):
        run_fresh(name, {}, group=group)


def test_a_limit_can_be_lifted(program, group):
    name = program("""
        limit_own_memory(100 << 20)
        limit_own_memory(None)
        return {"bytes": len(bytearray(b"1") * (200 << 20))}
    """)
    assert run_fresh(name, {}, group=group) == {"bytes": 200 << 20}
    assert group.limit_bytes() is None


def test_own_memory_counts_what_is_allocated_and_no_page_cache(program, group, tmp_path):
    (tmp_path / "data").write_bytes(bytes(100_000_000))
    drop_page_cache(tmp_path / "data")
    name = program("""
        from gids.measure.isolation import OwnPeak, own_memory_bytes
        before = own_memory_bytes()
        with open(config["path"], "rb") as file:
            while file.read(1 << 20):
                pass
        after_reading = own_memory_bytes()
        with OwnPeak() as peak:
            memory = bytearray(b"1") * (100 << 20)
            time.sleep(0.2)
            del memory
            time.sleep(0.2)
        return {
            "read": after_reading - before,
            "peak": peak.peak_bytes - before,
            "left": own_memory_bytes() - before,
        }
    """)
    found = run_fresh(name, {"path": str(tmp_path / "data")}, group=group)
    assert found["read"] < 20 << 20
    assert 100 << 20 <= found["peak"] < 130 << 20
    assert found["left"] < 20 << 20


def test_a_limit_counts_the_page_cache(program, group, tmp_path, on_disk):
    np.ones(25_000_000).tofile(tmp_path / "data")  # 200 MB
    drop_page_cache(tmp_path / "data")
    name = program("""
        limit_own_memory(120 << 20)
        with open(config["path"], "rb") as file:
            while file.read(1 << 20):
                pass
        return {}
    """)
    run_fresh(name, {"path": str(tmp_path / "data")}, group=group)
    assert cached_share(tmp_path / "data") < 0.7


def test_cached_share_follows_the_page_cache(tmp_path, on_disk):
    path = tmp_path / "data"
    path.write_bytes(bytes(1_000_000))
    assert cached_share(path) == 1
    drop_page_cache(path)
    assert cached_share(path) == 0
    path.write_bytes(b"")
    assert cached_share(path) == 0
