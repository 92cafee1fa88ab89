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
    made = Check(dict.fromkeys(limits_of("all", False), 60.0), tmp_path / "out", tmp_path / "scratch")
    made.small, made.build = True, False
    made.out.mkdir()
    return made


@pytest.fixture
def as_pytest(monkeypatch):
    """as_pytest(code): run code instead of pytest."""

    def patch(code):
        monkeypatch.setattr(gpu_check, "pytest_command", lambda *_: [*PYTHON, code])

    return patch


def run_script(*options):
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        [TOOLS / "gpu_check.sh", *options], capture_output=True, text=True, env=env, cwd="/"
    )


def test_the_script_lists_its_steps():
    for option, expected in (([], "at most 230 s"), (["--quick"], "skipped")):
        done = run_script("--dry-run", *option)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines[:-1]] == list(limits_of("all", False))
        assert expected in done.stdout
    assert run_script("--nonsense").returncode == 2


def test_each_part_takes_less_than_ten_minutes():
    for part in PARTS_S:
        limits_s = limits_of(part, False)
        assert sum(limits_s.values()) <= 575
        assert limits_s.keys() == {*FIRST_S, *PARTS_S[part]}
    assert [name for name, limit_s in limits_of("checks", True).items() if not limit_s] == [
        "racecheck",
        "synccheck",
        "initcheck",
    ]


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


@pytest.mark.slow
def test_a_command_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert gpu_check.run_within(1.5, [*PYTHON, code], tmp_path / "log", dict(os.environ)).status is None


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
def test_a_crash_or_a_hang_costs_its_file_only(check, test_files):
    gpu_check.run_tests(check)
    assert [(s.name, s.result, s.note.partition(" in ")[0]) for s in check.steps] == [
        ("tests", "passed", "9 GPU tests"),
        ("tests/test_passes.py", "passed", "2 passed"),
        ("tests/test_ends_the_process.py", "failed", "1 passed, 0 failed,"),
        ("tests/test_hangs.py", "failed", "0 passed, 0 failed,"),
        ("tests/test_no_more.py", "failed", "1 failed, 1 passed"),
    ]
    assert check.steps[2].note.endswith("::test_b Fatal Python error: Aborted")
    assert check.steps[3].note.endswith("in tests/test_hangs.py::test_a  Timeout")
    log = (check.out / "tests.log").read_text()
    assert "Timeout" in log
    assert "time.sleep(60)" in log, "the stacks of the hang"
    assert check.status == 1


@pytest.mark.slow
def test_a_file_that_pytest_cannot_end_is_killed(check, test_files, monkeypatch):
    monkeypatch.setattr(gpu_check, "TEST_S", 3600)
    for name in TEST_FILES.keys() - {"test_passes", "test_hangs"}:
        (test_files / f"tests/{name}.py").unlink()
    for limit_s in LIMITS_S:
        for name in ("FILE_S", "TOGETHER_S"):
            monkeypatch.setattr(gpu_check, name, limit_s)
        check.steps.clear()
        gpu_check.run_tests(check)
        if "in tests/test_hangs.py::test_a" in check.steps[-1].note:
            break
    assert [s.result for s in check.steps] == ["passed", "passed", "overran"]
    assert check.steps[2].note.endswith("; 0 passed, 0 failed, in tests/test_hangs.py::test_a")


@pytest.mark.slow
def test_files_that_pass_share_one_process(check, test_files):
    for name in ("test_hangs", "test_ends_the_process", "test_no_more"):
        pids = f"def test_a(): open('{test_files}/pids', 'a').write(f'{{os.getpid()}} ')\n"
        (test_files / f"tests/{name}.py").write_text(
            "import os, pytest\npytestmark = pytest.mark.gpu\n" + pids
        )
    gpu_check.run_tests(check)
    assert [(s.name, s.result, s.note) for s in check.steps] == [
        ("tests", "passed", "5 GPU tests in 4 files"),
        ("tests of 4 files", "passed", "5 passed"),
    ]
    pids = (test_files / "pids").read_text().split()
    assert len(pids) == 3
    assert len(set(pids)) == 1


def test_results_are_written_after_every_step(check):
    for name in ("gather", "packs"):
        check.skip(name, "for a reason")
        content = json.loads((check.out / "gpu-check.json").read_text())
        assert content["steps"][-1]["name"] == name
        assert not content["finished"]
        assert not content["passed"]


def test_a_file_that_cannot_be_imported_is_named(check, test_files):
    (test_files / "tests/test_hangs.py").unlink()
    (test_files / "tests/test_ends_the_process.py").write_text("import no_such_module  # gpu\n")
    (test_files / "tests/test_no_more.py").write_text("from gids import not_here  # device\n")
    (test_files / "tests/test_on_the_cpu.py").write_text("import no_such_module\n")
    gpu_check.run_tests(check)
    assert [(s.name, s.result, s.note.partition(" (")[0]) for s in check.steps] == [
        ("tests", "passed", "2 GPU tests in 1 files"),
        ("tests/test_ends_the_process.py", "skipped", "needs no_such_module"),
        (
            "tests/test_no_more.py",
            "failed",
            "cannot be imported: ImportError: cannot import name 'not_here' from 'gids'",
        ),
        ("tests/test_passes.py", "passed", "2 passed"),
    ]
    (test_files / "tests/test_passes.py").unlink()
    check.steps.clear()
    gpu_check.run_tests(check)
    assert check.steps[0].result == "failed"


def test_without_a_gpu_tests_are_collected_only(check, test_files):
    check.no_gpu = "no driver"
    gpu_check.run_tests(check)
    assert [(s.name, s.result, s.note) for s in check.steps] == [
        ("tests", "skipped", "no GPU: 9 GPU tests in 4 files")
    ]


@pytest.mark.parametrize(
    ("code", "result", "note"),
    [
        ("print('3 passed in 1.0s'); print('==== ERROR SUMMARY: 0 errors')", "passed", "3 passed; 0 errors"),
        (
            "print('3 passed in 1.0s'); print('==== ERROR SUMMARY: 2 errors'); raise SystemExit(86)",
            "failed",
            "3 passed; 2 errors",
        ),
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
    gpu_check.sanitize(check, "memcheck")
    assert [(s.name, s.result, s.note) for s in check.steps] == [("memcheck", result, note)]


def test_the_tests_under_compute_sanitizer_exist():
    for test in gpu_check.SANITIZED:
        path, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test_") in (gpu_check.ROOT / path).read_text(), test


def test_without_compute_sanitizer_its_steps_are_skipped(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    gpu_check.sanitize(check, "memcheck")
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


def test_the_report_has_tables(check):
    check.machine = {"GPU": "NVIDIA H100", "commit": "abc"}
    check.steps = [Step("tests", "passed", 61.4, "41 passed"), Step("racecheck", "skipped", 0, "a | b")]
    check.figures = [
        {"name": "gather", "value": 0.912, "unit": "x", "bar": 0.8, "passed": True, "note": ""},
        {"name": "nodes", "value": 5.1e7, "unit": "nodes/s", "bar": 7.7e7, "passed": False, "note": ""},
        {"name": "copy", "value": 3900.0, "unit": "GB/s", "bar": None, "passed": None, "note": ""},
    ]
    assert gpu_check.report(check).splitlines()[2:] == [
        "| GPU | NVIDIA H100 |",
        "| commit | abc |",
        "",
        "| step | result | seconds | |",
        "|---|---|---|---|",
        "| tests | passed | 61 | 41 passed |",
        "| racecheck | skipped | 0 | a / b |",
        "",
        "| figure | measured | target | |",
        "|---|---|---|---|",
        "| gather | 0.912 x | ≥ 0.8 x | passed |",
        "| nodes | 5.1e+07 nodes/s | ≥ 7.7e+07 nodes/s | failed |",
        "| copy | 3,900 GB/s |  |  |",
    ]


def test_wheels_are_installed_before_the_build(check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "output_of", lambda command: "")
    commands = gpu_check.build_commands(check)
    assert "nanobind-backend>=1.0" in commands[0]
    assert "--no-build-isolation" in commands[-1]
    assert f"{check.scratch}/site" in commands[-1]
    check.wheels = tmp_path
    (tmp_path / "nanobind_backend-1.0.0-cp311-abi3-linux.whl").touch()
    commands = gpu_check.build_commands(check)
    assert len(commands) == 2
    assert "--no-index" in commands[0]
    assert commands[0][-1].endswith(".whl")


def test_a_missing_build_backend_is_named(check, monkeypatch):
    check.build = True
    failing = [*PYTHON, "raise SystemExit('no network')", "nanobind-backend>=1.0"]
    monkeypatch.setattr(gpu_check, "build_commands", lambda check: [failing])
    assert not gpu_check.build(check)
    assert check.steps[0].result == "failed"
    assert "--wheels DIR (no network)" in check.steps[0].note


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_ends_with_status_2(as_pytest, tmp_path, monkeypatch, capsys):
    """The machine is the real one, without its GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    as_pytest("print('tests/test_a.py: 43')")
    folders = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")]
    assert gpu_check.main(["--no-build", *folders]) == 2
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "out/gpu-check.json").read_text())
    assert content["no_gpu"]
    assert printed.endswith(f"no GPU: {content['no_gpu']}\n")
    assert "| tests | skipped |" in printed
    assert "43 GPU tests in 1 files" in printed
    assert content["passed"] is False
    assert {s["name"]: s["result"] for s in content["steps"]} == {
        **dict.fromkeys(limits_of("all", False), "skipped"),
        "machine": "passed",
    }
    assert {"kernel", "cores", "torch", "commit"} <= content["machine"].keys()
    assert [p.name for p in (tmp_path / "out").iterdir() if p.is_dir()] == []
    assert list((tmp_path / "scratch").iterdir()) == [], "no scratch is left"
    assert content["finished"]


def test_a_gpu_that_gids_opens_is_named(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "GPU", "print('noise'); print('GPU NVIDIA H100')")
    monkeypatch.setattr(gpu_check, "SYSTEM", "raise SystemExit('it is not described')")
    gpu_check.look_at_machine(check)
    assert (check.no_gpu, check.machine["GPU"]) == ("", "NVIDIA H100")
    assert [(s.name, s.result, s.note) for s in check.steps] == [("machine", "passed", "NVIDIA H100")]
