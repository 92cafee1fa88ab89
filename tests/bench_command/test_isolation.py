"""Fresh processes: their input, answer and failures, the cold page cache and the memory limit."""

from __future__ import annotations

import contextlib
import os
import select
import textwrap

import numpy as np
import pytest

from gids.bench.isolation import FreshProcessError, MemoryGroup, cached_share, run_fresh
from gids.io import drop_page_cache

HEAD = """
import os, subprocess, sys
from gids.bench.isolation import limit_own_memory
def run(config):
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make the body of run(config) a module, and return its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(body: str) -> str:
        (tmp_path / "fresh_program.py").write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
        return "fresh_program"

    return write


@pytest.fixture
def group():
    try:
        made = MemoryGroup()
    except OSError as error:
        pytest.skip(f"no memory cgroup here: {error}")
    with made:
        yield made
    assert not made.path.exists()


def test_a_fresh_process_answers_without_huge_pages_and_its_children_die_with_it(program):
    name = program("""
        child = subprocess.Popen(["sleep", "600"])
        huge = [line.split()[1] for line in open("/proc/self/status") if line.startswith("THP_enabled")]
        return {"child": child.pid, "huge": huge, "arenas": os.environ["MALLOC_ARENA_MAX"], **config}
    """)
    result = run_fresh(name, {"a": [1, 2]})
    child = result.pop("child")
    assert result.pop("huge") in ([], ["0"])
    assert result == {"a": [1, 2], "arenas": "2"}
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(child)], [], [], 60)[0], "it lives on"


@pytest.mark.parametrize(
    ("timeout_s", "reason"),
    [
        (60, "failed (exit status 1): KeyError: 'no table here'"),
        (0.001, "did not end within 0 s and was stopped: the disk may be very slow or busy"),
    ],
)
def test_a_failed_process_has_a_reason(program, timeout_s, reason):
    with pytest.raises(FreshProcessError) as failed:
        run_fresh(program("raise KeyError('no table here')"), {}, timeout_s=timeout_s)
    assert failed.value.reason == reason


def test_a_limit_counts_children_and_a_killed_one_is_the_reason_of_the_failure(program, group):
    name = program("""
        limit_own_memory(200 << 20)
        subprocess.run([sys.executable, "-c", "bytearray(b'1') * (400 << 20)"], check=True)
        return {}
    """)
    with pytest.raises(FreshProcessError, match="needed more memory than its limit"):
        run_fresh(name, {}, group=group)


def test_a_limit_counts_the_page_cache(program, group, tmp_path, on_disk):
    np.ones(6_250_000).tofile(tmp_path / "data")  # 50 MB
    drop_page_cache(tmp_path / "data")
    name = program("""
        limit_own_memory(25 << 20)
        with open(config["path"], "rb") as file:
            while file.read(1 << 20):
                pass
        return {}
    """)
    run_fresh(name, {"path": str(tmp_path / "data")}, group=group)
    assert cached_share(tmp_path / "data") < 0.7
