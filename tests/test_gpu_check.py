"""tools/gpu_check: its steps, limits and verdicts, with commands that stand in for the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu_check
from gpu_check import FULL, PART_S, QUICK, Check, Plan, Step

TOOLS = Path(gpu_check.__file__).parent
PYTHON = [sys.executable, "-P", "-c"]
LIMITS_S = (2.5, 10.0, 60.0)  # for what must overrun: the second and third where a child takes long to begin


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """A check with a GPU and a minute per step."""
    plan = Plan({**dict.fromkeys(FULL.shares_s, 60.0), "racecheck": 0.0}, small=True)
    found = Check(plan, tmp_path / "out", tmp_path / "scratch", build=False)
    found.machine = {"gpu": "NVIDIA H100"}
    found.out.mkdir()
    return found


@pytest.fixture
def as_pytest(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """as_pytest(code): run code instead of pytest."""

    def patch(code: str) -> None:
        monkeypatch.setattr(gpu_check, "pytest_command", lambda *_: [*PYTHON, code])

    return patch


def test_the_script_is_bash_and_lists_its_steps() -> None:
    script = TOOLS / "gpu_check.sh"
    subprocess.run(["bash", "-n", script], check=True)
    for option, expected in (([], "at most 230 s"), (["--quick"], "skipped")):
        done = subprocess.run(
            [script, "--dry-run", *option],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHON": sys.executable},
            cwd="/",
        )
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines[:-1]] == list(FULL.shares_s)
        assert expected in done.stdout
    bad = subprocess.run(
        [script, "--nonsense"], capture_output=True, env={**os.environ, "PYTHON": sys.executable}
    )
    assert bad.returncode == 2


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_each_part_takes_less_than_ten_minutes(plan: Plan) -> None:
    checks, figures = plan.part("checks"), plan.part("figures")
    assert sum(checks.shares_s.values()) <= PART_S
    assert sum(figures.shares_s.values()) <= PART_S < 590
    assert {*checks.shares_s, *figures.shares_s} == set(plan.shares_s) == set(plan.part("all").shares_s)
    assert {*checks.shares_s} & {*figures.shares_s} == {"machine", "build"}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_step_that_overruns_is_killed_with_its_children(tmp_path: Path) -> None:
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
def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert gpu_check.run_within(1.5, [*PYTHON, code], tmp_path / "log", dict(os.environ)).status is None


def test_a_step_without_time_left_is_skipped(check: Check) -> None:
    check.spent["tests"] = 59.5
    ended = check.run("tests", [*PYTHON, "raise SystemExit('was begun')"])
    assert (ended.status, ended.output, ended.begun) == (None, "", False)
    check.add("tests", ended)
    assert check.steps[0].note == "not begun: no time is left"
    check.begun -= sum(check.plan.shares_s.values())
    assert check.run("memcheck", [*PYTHON, "pass"]).status is None


TEST_FILES = {
    "test_passes": "def test_a(): pass\ndef test_b(): pass\n",
    "test_ends_the_process": "def test_a(): pass\ndef test_b(): os.abort()\ndef test_c(): pass\n",
    "test_hangs": "def test_a():\n    while True:\n        time.sleep(60)\ndef test_b(): pass\n",
    "test_no_more": "def test_a(): pass\ndef test_b(): raise ValueError\n",
    "test_on_the_cpu": "pytestmark = []\ndef test_a(): raise ValueError\n",
}


@pytest.fixture
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_a_crash_or_a_hang_costs_its_file_only(check: Check, test_files: Path) -> None:
    gpu_check.run_tests(check)
    assert [(s.name, s.result, s.note.partition(" in ")[0]) for s in check.steps] == [
        ("tests", "passed", "9 GPU tests"),
        ("tests/test_ends_the_process.py", "failed", "1 passed, 0 failed,"),
        ("tests/test_hangs.py", "failed", "0 passed, 0 failed,"),
        ("tests/test_no_more.py", "failed", "1 failed, 1 passed"),
        ("tests/test_passes.py", "passed", "2 passed"),
    ]
    assert check.steps[1].note.endswith("::test_b Fatal Python error: Aborted")
    assert check.steps[2].note.endswith("in tests/test_hangs.py::test_a  Timeout")
    log = (check.out / "tests.log").read_text()
    assert "Timeout" in log
    assert "time.sleep(60)" in log, "the stacks of the hang"
    assert gpu_check.status(check) == 1


@pytest.mark.slow
def test_a_file_that_pytest_cannot_end_is_killed(
    check: Check, test_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "TEST_S", 3600)
    for name in TEST_FILES.keys() - {"test_passes", "test_hangs"}:
        (test_files / f"tests/{name}.py").unlink()
    for limit_s in LIMITS_S:
        monkeypatch.setattr(gpu_check, "FILE_S", limit_s)
        check.steps.clear()
        check.spent.clear()
        gpu_check.run_tests(check)
        if "in tests/test_hangs.py::test_a" in check.steps[1].note and check.steps[2].result == "passed":
            break
    assert [s.result for s in check.steps] == ["passed", "overran", "passed"]
    assert check.steps[1].note.endswith("; 0 passed, 0 failed, in tests/test_hangs.py::test_a")


def test_a_file_that_cannot_be_imported_is_named(check: Check, test_files: Path) -> None:
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


def test_without_a_gpu_tests_are_collected_only(check: Check, test_files: Path) -> None:
    check.machine = {"no_gpu": "no driver"}
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
    check: Check,
    as_pytest: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: str,
    result: str,
    note: str,
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != 86 ]; do shift; done\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: str(tool))
    as_pytest(code)
    gpu_check.sanitize(check, "memcheck")
    gpu_check.sanitize(check, "racecheck")
    assert [(s.name, s.result, s.note) for s in check.steps] == [
        ("memcheck", result, note),
        ("racecheck", "skipped", "--quick"),
    ]


def test_the_tests_under_compute_sanitizer_exist() -> None:
    for test in gpu_check.SANITIZED:
        path, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test_") in (gpu_check.ROOT / path).read_text(), test


def test_without_compute_sanitizer_its_steps_are_skipped(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    gpu_check.sanitize(check, "memcheck")
    assert check.steps[0].result == "skipped"
    assert "was not found on the PATH" in check.steps[0].note
    assert gpu_check.status(check) == 0


def bench_that(folder: Path, body: str) -> None:
    (folder / "bench").mkdir(exist_ok=True)
    (folder / "bench/gpu.py").write_text(
        "import json, os, sys, time\n"
        "def write(*figures):\n"
        "    path = sys.argv[sys.argv.index('--json') + 1]\n"
        "    keys = ('name', 'value', 'unit', 'bar', 'passed', 'note')\n"
        "    json.dump({'figures': [dict(zip(keys, f)) for f in figures]}, open(path, 'w'))\n"
        "assert '--small' in sys.argv and os.environ['SETTING'] == '8'\n" + body
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
def test_results_are_compared_with_their_targets(
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    body: str,
    result: str,
    note: str,
    count: int,
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    bench_that(tmp_path, body)
    monkeypatch.setattr(gpu_check, "BENCHMARKS", {"gather": ("gather", {"SETTING": "8"})})
    for limit_s in LIMITS_S:
        if result == "overran":
            check.plan = Plan(
                {**check.plan.shares_s, "gather": check.spent.get("gather", 0.0) + limit_s}, small=True
            )
        check.steps.clear()
        gpu_check.benchmark(check, "gather")
        if len(check.figures) == count:
            break
    step = check.steps[0]
    assert (step.name, step.result) == ("gather", result)
    assert note in step.note
    assert len(check.figures) == count
    assert all(f["step"] == "gather" for f in check.figures)


def test_the_report_has_tables_and_json(check: Check, tmp_path: Path) -> None:
    check.machine |= {"driver": "580.1", "torch": "2.11.0", "commit": "abc"}
    check.steps = [Step("tests", "passed", 61.4, "41 passed"), Step("racecheck", "skipped", 0, "a | b")]
    check.figures = [
        {"name": "gather", "value": 0.912, "unit": "x", "bar": 0.8, "passed": True, "note": ""},
        {"name": "nodes", "value": 5.1e7, "unit": "nodes/s", "bar": 7.7e7, "passed": False, "note": ""},
        {"name": "copy", "value": 3900.0, "unit": "GB/s", "bar": None, "passed": None, "note": ""},
    ]
    text = gpu_check.report(check)
    assert "gpu NVIDIA H100, driver 580.1, torch 2.11.0, commit abc" in text
    assert "| tests | passed | 61 | 41 passed |" in text
    assert "| racecheck | skipped | 0 | a / b |" in text
    assert "| gather | 0.912 x | ≥ 0.8 x | passed |" in text
    assert "| nodes | 5.1e+07 nodes/s | ≥ 7.7e+07 nodes/s | failed |" in text
    assert "| copy | 3,900 GB/s |  |  |" in text
    gpu_check.write_json(check, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"] is True
    assert found["machine"]["gpu"] == "NVIDIA H100"
    assert [s["seconds"] for s in found["steps"]] == [61.4, 0]
    assert len(found["figures"]) == 3


@pytest.mark.parametrize(
    ("rows", "kernel", "copy", "better"),
    [
        (1.2, 0.95, 0.9, "copy"),
        (0.8, 0.9, 0.99, "kernel"),
        (1.01, 0.9, 0.95, "copy"),  # rows/s alike
        (0.99, 0.9, 0.91, "kernel"),  # all alike: it needs no device memory
    ],
)
def test_the_report_names_the_better_transfer(
    check: Check, rows: float, kernel: float, copy: float, better: str
) -> None:
    values = {"rows/s": rows, "kernel": kernel, "copy": copy}
    check.plan = FULL
    check.figures = [
        {"name": name, "value": values[key], "unit": "x", "bar": None, "passed": None, "note": ""}
        for key, name in gpu_check.TRANSFERS.items()
    ]
    said = gpu_check.report(check)
    assert f"\n\nBetter default for transfer=: {better!r}. GraphSAGE trains {rows:.2f} times" in said
    assert f"keeps {copy:.0%} of its speed with 'copy', {kernel:.0%} with 'kernel'." in said
    check.figures.pop()  # a benchmark was killed
    assert "transfer=" not in gpu_check.report(check)


def test_wheels_are_installed_before_the_build(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "output_of", lambda command: "")
    commands = gpu_check.build_commands(check)
    assert "nanobind-backend>=1.0" in commands[0]
    assert "--no-build-isolation" in commands[-1]
    assert f"{check.site}" in commands[-1]
    check.wheels = tmp_path
    (tmp_path / "nanobind_backend-1.0.0-cp311-abi3-linux.whl").touch()
    commands = gpu_check.build_commands(check)
    assert len(commands) == 2
    assert "--no-index" in commands[0]
    assert commands[0][-1].endswith(".whl")


def test_a_missing_build_backend_is_named(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check.build = True
    failing = [*PYTHON, "raise SystemExit('no network')", "nanobind-backend>=1.0"]
    monkeypatch.setattr(gpu_check, "build_commands", lambda check: [failing])
    assert not gpu_check.build(check)
    assert check.steps[0].result == "failed"
    assert "--wheels DIR (no network)" in check.steps[0].note


def test_without_a_gpu_it_says_so_and_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "MACHINE", 'print(\'{"torch": "2.13.0+cpu", "no_gpu": "no driver"}\')')
    monkeypatch.setattr(gpu_check, "pytest_command", lambda *_: [*PYTHON, "print('tests/test_a.py: 43')"])
    assert gpu_check.main(["--no-build", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert said.endswith("no GPU: no driver\n")
    assert "| tests | skipped |" in said
    assert "43 GPU tests in 1 files" in said
    found = json.loads((tmp_path / "out/gpu-check.json").read_text())
    assert (found["passed"], found["no_gpu"]) == (False, "no driver")
    assert {s["name"]: s["result"] for s in found["steps"]} == {
        **dict.fromkeys(FULL.shares_s, "skipped"),
        "machine": "passed",
    }
    assert [p.name for p in (tmp_path / "out").iterdir() if p.is_dir()] == [], "no scratch is left"


def test_this_machine_is_described(check: Check) -> None:
    check.machine = {}
    gpu_check.look_at_machine(check)
    assert check.machine["python"].startswith("3.")
    assert check.machine["cores"] >= 1
    assert "torch" in check.machine
    assert "gpu" in check.machine or check.no_gpu
    assert not check.machine["no_gpu"].startswith("the interpreter") if check.no_gpu else True
