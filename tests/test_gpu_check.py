"""tools/gpu_check: its steps, limits and verdicts, with commands that stand in for the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu_check
from gpu_check import FIRST_S, PARTS_S, Check, Step, limits_of

TOOLS = Path(gpu_check.__file__).parent
PYTHON = [sys.executable, "-P", "-c"]
LIMITS_S = (2.5, 10.0, 60.0)  # for what must overrun: the second and third where a child takes long to begin


@pytest.fixture
def check(tmp_path):
    """A check with a GPU and a minute per step."""
    made = Check(dict.fromkeys(limits_of("all"), 60.0), tmp_path / "out", tmp_path / "scratch")
    made.small, made.build = True, False
    made.out.mkdir()
    return made


@pytest.fixture
def as_pytest(monkeypatch):
    """as_pytest(code): run code instead of pytest."""

    def patch(code):
        monkeypatch.setattr(gpu_check, "pytest_command", lambda *_: [*PYTHON, code])

    return patch


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


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_step_that_overruns_is_killed_with_its_children(tmp_path):
    marker = tmp_path / "pid"
    grandchild = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    code = "import subprocess, sys; print('begun', flush=True)\n"
    code += f"subprocess.run([sys.executable, '-P', '-c', {grandchild!r}])"
    for limit_s in LIMITS_S:
        ended = gpu_check.run_within(limit_s, [*PYTHON, code], tmp_path / "log", dict(os.environ))
        assert ended.status is None
        if marker.exists() and marker.read_text():
            break
    assert ended.output.strip() == "begun"
    pid = int(marker.read_text())
    for _ in range(600):
        if not runs(pid):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the grandchild lives on")


def test_a_step_without_time_left_is_not_begun(check):
    check.limits_s = {"tests": 0.5}
    ended = check.run("tests", [*PYTHON, "raise SystemExit('was begun')"])
    check.add("tests", ended)
    assert check.steps == [Step("tests", "overran", 0.0, "not begun: no time is left")]
    assert check.status == 1


TEST_FILES = {
    "test_passes": "def test_a(): pass\ndef test_b(): pass\n",
    "test_ends_the_process": "def test_a(): pass\ndef test_b(): os.abort()\ndef test_c(): pass\n",
    "test_hangs": "def test_a():\n    while True:\n        time.sleep(60)\ndef test_b(): pass\n",
    "test_no_more": "def test_a(): pass\ndef test_b(): raise ValueError\n",
    "test_on_the_cpu": "pytestmark = []\ndef test_a(): raise ValueError\n",
}


@pytest.fixture
def test_files(tmp_path, monkeypatch):
    """A repository with TEST_FILES."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, text in TEST_FILES.items():
        begin = "import os, time\nimport pytest\npytestmark = pytest.mark.gpu\n"
        (tmp_path / f"tests/{name}.py").write_text(begin + text)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "TEST_S", 3)
    return tmp_path


@pytest.mark.slow
def test_a_crash_or_a_hang_costs_its_test_only(check, test_files):
    """What fails runs again, alone: here a test that passes only then."""
    (test_files / "tests/test_beside.py").write_text(
        "import os\nimport pytest\npytestmark = pytest.mark.gpu\n"
        "def test_a(): assert os.environ['PYTEST_XDIST_WORKER_COUNT'] == '1'\n"
    )
    check.limits_s["tests"] = 300.0
    gpu_check.run_tests(check)
    steps = {s.name: (s.result, s.note) for s in check.steps}
    assert steps.pop("tests") == ("passed", "4 failed, 6 passed")
    assert steps.pop("tests/test_beside.py::test_a") == ("passed", "passed alone")
    assert {name: result for name, (result, _) in steps.items()} == {
        "tests/test_ends_the_process.py::test_b": "failed",
        "tests/test_hangs.py::test_a": "failed",
        "tests/test_no_more.py::test_b": "failed",
    }
    assert steps["tests/test_no_more.py::test_b"][1] == "ValueError"
    assert check.status == 1


def test_results_are_written_after_every_step(check):
    for name in ("gather", "packs"):
        check.skip(name, "for a reason")
        content = json.loads((check.out / "gpu-check.json").read_text())
        assert content["steps"][-1]["name"] == name
        assert not content["finished"]
        assert not content["passed"]


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_named(check, test_files):
    (test_files / "tests/test_hangs.py").unlink()
    test = "\ndef test_a(gpu): pass\n"
    (test_files / "tests/test_ends_the_process.py").write_text(f"import no_such_module{test}")
    (test_files / "tests/test_no_more.py").write_text(f"from gids import not_here{test}")
    (test_files / "tests/test_on_the_cpu.py").write_text("import no_such_module\n")
    for folder, text in (("lacks", "import no_such_module"), ("other", "1 / 0")):
        (test_files / "tests" / folder).mkdir()
        (test_files / "tests" / folder / "conftest.py").write_text(f"{text}\n")
        (test_files / "tests" / folder / f"test_{folder}.py").write_text(test)
    gpu_check.run_tests(check)
    assert [(s.name, s.result, s.note.partition(" (")[0]) for s in check.steps] == [
        ("tests/lacks", "skipped", "needs no_such_module"),
        ("tests/other", "failed", "cannot be imported: ZeroDivisionError: division by zero"),
        ("tests/test_ends_the_process.py", "skipped", "needs no_such_module"),
        (
            "tests/test_no_more.py",
            "failed",
            "cannot be imported: ImportError: cannot import name 'not_here' from 'gids'",
        ),
        ("tests", "passed", "2 passed"),
    ]


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
        (
            "print('==== Error: Device not supported'); raise SystemExit(1)",
            "skipped",
            "this machine does not allow it: Device not supported",
        ),
    ],
)
def test_the_output_of_compute_sanitizer_is_reported(
    check, as_pytest, monkeypatch, tmp_path, code, result, note
):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != 86 ]; do shift; done\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: str(tool))
    as_pytest(code)
    monkeypatch.setattr(gpu_check, "run_tests", lambda _: None)
    gpu_check.run_tests_and_sanitizers(check)
    assert [(s.name, s.result, s.note) for s in check.steps] == [("memcheck", result, note)]


def test_the_tests_under_compute_sanitizer_exist():
    for test in gpu_check.SANITIZED:
        path, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test_") in (gpu_check.ROOT / path).read_text(), test


def test_without_compute_sanitizer_its_steps_are_skipped(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    gpu_check.add_sanitized(check, "memcheck", gpu_check.sanitize(check, "memcheck"))
    assert check.steps[0].result == "skipped"
    assert "was not found on the PATH" in check.steps[0].note
    assert check.status == 0


def bench_that(folder, body):
    (folder / "bench").mkdir(exist_ok=True)
    (folder / "bench/gpu.py").write_text(
        "import json, os, sys, time\n"
        "def write(*figures):\n"
        "    path = sys.argv[sys.argv.index('--json') + 1]\n"
        "    keys = ('name', 'value', 'unit', 'bar', 'passed', 'note')\n"
        "    json.dump({'figures': [dict(zip(keys, f)) for f in figures]}, open(path, 'w'))\n"
        "assert sys.argv[1] == 'streams' and '--small' in sys.argv\n"
        "assert os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] == '8'\n" + body
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("body", "result", "note", "count"),
    [
        ("write(('a', 0.9, 'x', 0.8, True, ''), ('b', 7, 'GB/s', None, None, ''))", "passed", "", 2),
        ("write(('a', 0.7, 'x', 0.8, False, ''))", "failed", "below its target: a", 1),
        ("write(); raise SystemExit('broken')", "failed", "broken", 0),
        ("write()", "failed", "it wrote no results", 0),
        ("write(('a', 0.9, 'x', 0.8, True, ''))\ntime.sleep(3600)", "overran", "killed after", 1),
    ],
)
def test_results_are_compared_with_their_targets(check, monkeypatch, tmp_path, body, result, note, count):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    bench_that(tmp_path, body)
    for limit_s in LIMITS_S if result == "overran" else (60.0,):
        check = Check({"streams-8": limit_s}, check.out, check.scratch, small=True)
        gpu_check.benchmark(check, "streams-8")
        if len(check.figures) == count:
            break
    [step] = check.steps
    assert (step.name, step.result) == ("streams-8", result)
    assert note in step.note
    assert len(check.figures) == count
    assert all(f["step"] == "streams-8" for f in check.figures)


def test_a_gpu_that_gids_opens_is_named(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "GPU", "print('noise'); print('GPU NVIDIA H100')")
    monkeypatch.setattr(gpu_check, "SYSTEM", "raise SystemExit('it is not described')")
    gpu_check.look_at_machine(check)
    assert (check.no_gpu, check.machine["GPU"]) == ("", "NVIDIA H100")
    assert [(s.name, s.result, s.note) for s in check.steps] == [("machine", "passed", "NVIDIA H100")]
