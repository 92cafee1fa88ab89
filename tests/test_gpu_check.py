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
from gpu_check import FULL, QUICK, TOTAL_S, Check, Plan, Step

TOOLS = Path(gpu_check.__file__).parent
PYTHON = [sys.executable, "-P", "-c"]
LIMITS_S = (2.5, 10.0, 60.0)  # for what must overrun: the second and third where a child takes long to begin


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """A check with a GPU and half a minute per step."""
    plan = Plan({**dict.fromkeys(FULL.shares_s, 30.0), "racecheck": 0.0}, small=True)
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
    for option, expected in (([], "at most 155 s"), (["--quick"], "skipped")):
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
def test_all_shares_together_are_under_ten_minutes(plan: Plan) -> None:
    assert sum(plan.shares_s.values()) <= TOTAL_S < 590
    assert {"machine", "build", "tests", "memcheck", "racecheck", *gpu_check.BENCHMARKS} == set(plan.shares_s)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert gpu_check.run_within(1.5, [*PYTHON, code], tmp_path / "log", dict(os.environ)).status is None


def test_a_step_without_time_left_is_skipped(check: Check) -> None:
    check.spent["tests"] = 29.5
    ended = check.run("tests", [*PYTHON, "raise SystemExit('was begun')"])
    assert (ended.status, ended.output) == (None, "")
    check.begun -= TOTAL_S
    assert check.run("memcheck", [*PYTHON, "pass"]).status is None


def test_tests_are_counted(check: Check, as_pytest: Callable[[str], None]) -> None:
    as_pytest("print('== 41 passed, 2 skipped in 3.21s ==')")
    gpu_check.run_tests(check)
    as_pytest("print('1 failed, 40 passed in 0.5s'); raise SystemExit(1)")
    gpu_check.run_tests(check)
    as_pytest("print('INTERNALERROR'); raise SystemExit(3)")
    gpu_check.run_tests(check)
    begun = r"print('a.py::t[x y] PASSED [ 1%]\na.py::u FAILED [ 2%]\na.py::v[w] ', end='', flush=True)"
    as_pytest(f"import time; {begun}; time.sleep(3600)")
    for limit_s in LIMITS_S:
        check.plan = Plan({**check.plan.shares_s, "tests": check.spent["tests"] + limit_s}, small=True)
        del check.steps[3:]
        gpu_check.run_tests(check)
        if "in a.py::v[w]" in check.steps[3].note:
            break
    assert [(s.result, s.note) for s in check.steps] == [
        ("passed", "41 passed, 2 skipped"),
        ("failed", "1 failed, 40 passed"),
        ("failed", "INTERNALERROR"),
        ("overran", check.steps[-1].note),
    ]
    assert check.steps[-1].note.endswith("; 1 passed, 1 failed, in a.py::v[w]")
    assert gpu_check.status(check) == 1


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
        "import json, sys, time\n"
        "def write(*figures):\n"
        "    path = sys.argv[sys.argv.index('--json') + 1]\n"
        "    keys = ('name', 'value', 'unit', 'bar', 'passed', 'note')\n"
        "    json.dump({'figures': [dict(zip(keys, f)) for f in figures]}, open(path, 'w'))\n"
        "assert '--small' in sys.argv\n" + body
    )


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
    assert all(f["question"] == "gather" for f in check.figures)


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
    monkeypatch.setattr(
        gpu_check, "pytest_command", lambda *_: [*PYTHON, "print('43 skipped, 9 deselected in 1.0s')"]
    )
    assert gpu_check.main(["--no-build", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert said.endswith("no GPU: no driver\n")
    assert "| tests | skipped |" in said
    assert "43 skipped" in said
    found = json.loads((tmp_path / "out/gpu-check.json").read_text())
    assert (found["passed"], found["no_gpu"]) == (False, "no driver")
    assert {s["result"] for s in found["steps"]} == {"passed", "skipped"}
    assert [p.name for p in (tmp_path / "out").iterdir() if p.is_dir()] == [], "no scratch is left"


def test_this_machine_is_described(check: Check) -> None:
    check.machine = {}
    gpu_check.look_at_machine(check)
    assert check.machine["python"].startswith("3.")
    assert check.machine["cores"] >= 1
    assert "torch" in check.machine
    assert "gpu" in check.machine or check.no_gpu
    assert not check.machine["no_gpu"].startswith("the interpreter") if check.no_gpu else True
