"""tools/gpu_check: its steps, limits and verdicts, with commands that stand in for the real ones."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu_check
from gpu_check import FIRST_S, PARTS_S, Check, Step, limits_of

TOOLS = Path(gpu_check.__file__).parent
PYTHON = [sys.executable, "-P", "-c"]


@pytest.fixture
def check(tmp_path):
    """A check with a GPU and a minute per step."""
    made = Check(dict.fromkeys(limits_of("all"), 60.0), tmp_path / "out", tmp_path / "scratch")
    made.small, made.build = True, False
    made.out.mkdir()
    return made


def test_the_script_runs_the_check():
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [TOOLS / "gpu_check.sh", "--nonsense"], capture_output=True, text=True, env=env, cwd="/"
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr


def test_all_takes_less_than_fifteen_minutes():
    assert sum(limits_of("all").values()) < 900
    for part in PARTS_S:
        assert limits_of(part).keys() == {*FIRST_S, *PARTS_S[part]}


@pytest.mark.slow
def test_a_step_that_overruns_is_killed_with_its_children(tmp_path):
    marker = tmp_path / "pid"
    grandchild = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    code = "import subprocess, sys; print('begun', flush=True)\n"
    code += f"subprocess.run([sys.executable, '-P', '-c', {grandchild!r}])"
    for limit_s in (2.5, 10.0, 60.0):  # the second and third where a child takes long to begin
        ended = gpu_check.run_within(limit_s, [*PYTHON, code], tmp_path / "log", dict(os.environ))
        assert ended.status is None
        if marker.exists() and marker.read_text():
            break
    assert ended.output.strip() == "begun"
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(int(marker.read_text()))], [], [], 60)[0], "it lives on"


def test_a_step_without_time_left_is_not_begun(check):
    check.limits_s = {"tests": 0.5}
    ended = check.run("tests", [*PYTHON, "raise SystemExit('was begun')"])
    check.add("tests", ended)
    assert check.steps == [Step("tests", "overran", 0.0, "not begun: no time is left")]
    assert check.status == 1
    content = json.loads((check.out / "gpu-check.json").read_text())
    assert content["steps"][-1]["name"] == "tests"
    assert not content["finished"]
    assert not content["passed"]


TEST_FILES = {
    "test_passes": "def test_a(): pass\ndef test_b(): pass\n",
    "test_ends_the_process": "def test_a(): pass\ndef test_b(): os.abort()\ndef test_c(): pass\n",
    "test_hangs": "def test_a():\n    while True:\n        time.sleep(60)\ndef test_b(): pass\n",
    "test_no_more": "def test_a(): pass\ndef test_b(): raise ValueError\n",
    "test_on_the_cpu": "pytestmark = []\ndef test_a(): raise ValueError\n",
    "test_beside": "def test_a(): assert os.environ['PYTEST_XDIST_WORKER_COUNT'] == '1'\n",
    "test_lacks": "import no_such_module\n",
}


@pytest.mark.slow
def test_a_crash_a_hang_or_a_missing_module_costs_its_tests_only(check, tmp_path, monkeypatch):
    """What fails runs again, alone: here test_beside passes only then."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, text in TEST_FILES.items():
        begin = "import os, time\nimport pytest\npytestmark = pytest.mark.gpu\n"
        (tmp_path / f"tests/{name}.py").write_text(begin + text)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "TEST_S", 3)
    check.limits_s["tests"] = 300.0
    gpu_check.run_tests(check)
    steps = {s.name: (s.result, s.note) for s in check.steps}
    assert steps.pop("tests/test_lacks.py") == ("skipped", "needs no_such_module")
    assert steps.pop("tests") == ("passed", "4 failed, 6 passed")
    assert steps.pop("tests/test_beside.py::test_a") == ("passed", "passed alone")
    assert {name: result for name, (result, _) in steps.items()} == {
        "tests/test_ends_the_process.py::test_b": "failed",
        "tests/test_hangs.py::test_a": "failed",
        "tests/test_no_more.py::test_b": "failed",
    }
    assert steps["tests/test_no_more.py::test_b"][1] == "ValueError"
    assert check.status == 1


def test_each_file_with_gpu_tests_is_chosen(request):
    files = {item.path for item in request.session.items if item.get_closest_marker("gpu")}
    fixture = "@pytest.fixture\ndef loader(device): pass\n\ndef test_a(loader): pass\n"
    for text in (fixture, *(path.read_text() for path in files)):
        assert gpu_check.HAS_GPU_TESTS.search(text)


@pytest.mark.parametrize(
    ("code", "result", "note"),
    [
        ("print('tests/a.py::b PASSED [ 9%]\\n=== ERROR SUMMARY: 0 errors')", "passed", "1 passed; 0 errors"),
        ("print('=== ERROR SUMMARY: 2 errors'); raise SystemExit(86)", "failed", "; 2 errors"),
    ],
)
def test_the_output_of_compute_sanitizer_is_reported(check, monkeypatch, tmp_path, code, result, note):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != 86 ]; do shift; done\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: str(tool))
    monkeypatch.setattr(gpu_check, "pytest_command", lambda *_: [*PYTHON, code])
    monkeypatch.setattr(gpu_check, "run_tests", lambda _: None)
    gpu_check.run_tests_and_sanitizers(check)
    assert [(s.name, s.result, s.note) for s in check.steps] == [("memcheck", result, note)]


def test_the_tests_under_compute_sanitizer_exist():
    for test in gpu_check.SANITIZED:
        path, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test_") in (gpu_check.ROOT / path).read_text(), test


BENCHMARK = """
import json, os, sys
def write(*figures):
    path = sys.argv[sys.argv.index('--json') + 1]
    keys = ('name', 'value', 'unit', 'bar', 'passed', 'note')
    json.dump({'figures': [dict(zip(keys, f)) for f in figures]}, open(path, 'w'))
assert sys.argv[1] == 'streams' and '--small' in sys.argv
assert os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] == '8'
"""


@pytest.mark.parametrize(
    ("body", "result", "note", "count"),
    [
        ("write(('a', 0.9, 'x', 0.8, True, ''), ('b', 7, 'GB/s', None, None, ''))", "passed", "", 2),
        ("write(('a', 0.7, 'x', 0.8, False, ''))", "failed", "below its target: a", 1),
        ("write(); raise SystemExit('broken')", "failed", "broken", 0),
        ("write()", "failed", "it wrote no results", 0),
    ],
)
def test_results_are_compared_with_their_targets(check, monkeypatch, tmp_path, body, result, note, count):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/gpu.py").write_text(BENCHMARK + body)
    gpu_check.benchmark(check, "streams-8")
    [step] = check.steps
    assert (step.name, step.result) == ("streams-8", result)
    assert note in step.note
    assert [f["step"] for f in check.figures] == ["streams-8"] * count


def test_a_gpu_that_gids_opens_is_named(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "GPU", "print('noise'); print('GPU NVIDIA H100')")
    monkeypatch.setattr(gpu_check, "SYSTEM", "raise SystemExit('it is not described')")
    gpu_check.look_at_machine(check)
    assert (check.no_gpu, check.machine["GPU"]) == ("", "NVIDIA H100")
    assert [(s.name, s.result, s.note) for s in check.steps] == [("machine", "passed", "NVIDIA H100")]
