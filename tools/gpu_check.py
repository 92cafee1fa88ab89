"""Builds gids in a temporary directory, and runs `pytest -m gpu`, compute-sanitizer and bench/gpu.py.

Tests share a few processes; those that fail run again, alone. Every benchmark has its own process, and every
step has a time limit. Prints a line and writes a JSON file after each step. Called by gpu_check.sh.
Needs only Python. `--pack FILE.tar` makes an archive that runs elsewhere.

A step that takes too long is killed with its children, and the next step starts. Exit status: 0 all steps
passed, 1 a step failed or was killed, 2 no GPU (steps that need none are run).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import gpu_pack

ROOT = Path(__file__).resolve().parents[1]
WORKERS = max(4, min(8, (os.cpu_count() or 4) // 2))  # processes of tests
TEST_S = 45  # for one test; beyond it pytest ends the process, and goes on in another one
GRACE_S = 3.0  # between asking a step to end and killing it
PYTHON = [sys.executable, "-P"]
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
FIRST_S: Mapping[str, float] = {"build": 100, "machine": 20}
PARTS_S: Mapping[str, Mapping[str, float]] = {
    "checks": {
        "tests": 230,
        "life": 50,
        "large": 50,
    },
    "figures": {
        "bus": 15,
        "streams-8": 15,  # with 8 connections to the device
        "streams-32": 15,
        "gather": 25,
        "planning": 20,
        "queue": 30,
        "extents": 25,
        "packs": 35,
        "sampling": 30,
        "overlap": 35,
        "training": 70,
        "array": 130,
    },
    "papers": {
        "sizes": 90,
        "windows": 90,
        "buffer": 60,
    },
}
"""The most seconds of each step. All but the tests are questions of bench/gpu.py. The sanitizers run beside
the tests, and may take as long."""
SANITIZED = (  # small, and between them every kernel
    "tests/io/test_device_queue.py::test_every_page_comes_back",
    "tests/io/test_device_queue.py::test_tiny_rings_go_round_many_times",
    "tests/io/test_device_queue.py::test_without_a_waiting_stream_a_kernel_polls",
    "tests/cache/test_device_cache.py::test_rows_equal_the_source_when_a_minibatch_takes_many_rounds",
    "tests/cache/test_planner.py::test_plan_on_a_device_keeps_as_many_pages_of_each_worth_as_the_model",
    "tests/cache/test_cache_contract.py::test_reading_through_needs_no_step_and_changes_no_word",
    "tests/cache/test_cache_contract.py::test_converted_rows_equal_torch_bit_for_bit",
    "tests/cache/test_cache_contract.py::test_int8_rows_are_widened_as_numpy_does",
    "tests/packs/test_packs_on_a_device.py::test_epochs_are_those_of_random_reads",
    "tests/sampler/test_neighbor.py::test_minibatches_equal_the_model",
    "tests/sampler/test_neighbor.py::test_relations_are_sampled_as_in_the_model",
    "tests/sampler/test_samplers_on_a_device.py::test_relations_are_sampled_as_on_the_cpu",
)
NO_SANITIZER = re.compile(
    r"device (is )?not supported|unable to (find|load)|insufficient permissions", re.IGNORECASE
)
HAS_GPU_TESTS = re.compile(r"mark\.gpu|def \w+\([^)]*\b(device|gpu)\b")  # a test, or a fixture of tests
RESULT = re.compile(  # in one process, and in several
    r"^(tests/.*?) ([A-Z]+) +\[ *\d+%\]$|^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (tests/.*?) *$", re.MULTILINE
)
LISTED = ("PASSED", "FAILED", "ERROR")
SUMMARY = re.compile(rf"^({'|'.join(LISTED)}) (tests/.*?::.*?)(?: - .*)?$", re.MULTILINE)
NO_MODULE = re.compile(r"No module named '(?!gids|tests)(\w+)|needs (DGL)")
CONFTEST = re.compile(r"^ImportError while loading conftest '(.*?)/conftest\.py'", re.MULTILINE)
GPU = "from gids import cuda; print('GPU', cuda.open_device().name)"
SYSTEM = "import sys; from gids.cli import main; sys.exit(main(['info', '--system', '--json', sys.argv[1]]))"


@dataclass
class Step:
    """A step that has ended. result: "passed", "failed", "overran", "skipped". note: why, or counts."""

    name: str
    result: str
    seconds: float
    note: str


@dataclass
class Ended:
    """A command that has ended. status: None if it was killed, or not begun because no time was left."""

    status: int | None
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        """The last line; if pip quotes the output of a command, the last line of that output."""
        quoted = self.output.partition("[end of output]")[0]
        return (quoted.strip().splitlines() or [""])[-1].strip()


@dataclass
class Check:
    """One run of the check. limits_s: its steps. small: small benchmarks. scratch: gids is built there."""

    limits_s: Mapping[str, float]
    out: Path
    scratch: Path
    small: bool = False
    build: bool = True
    steps: list[Step] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    no_gpu: str = ""  # why there is none
    finished: bool = False
    _ends: dict[str, float] = field(default_factory=dict)

    def run(self, step: str, command: Sequence[str], **env: str) -> Ended:
        """Run a command in the time left of its step. Its output goes to OUT/STEP.log."""
        limit = self.limits_s["tests" if step in SANITIZERS else step]
        end = self._ends.setdefault(step, time.monotonic() + limit)
        paths = [str(self.scratch / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        first = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # streams do not share a hardware channel
        last = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **env}
        log = self.out / f"{step}.log"
        return run_within(end - time.monotonic(), command, log, first | os.environ | last)

    def add(self, name: str, ended: Ended, note: str = "", *, passed: bool = True) -> None:
        """Add a line. passed: what the step found, beside the status of its command."""
        if ended.status is None:
            why = f"killed after {ended.seconds:.0f} s" if ended.seconds else "not begun: no time is left"
            self._tell(name, "overran", ended, f"{why}; {note}" if note else why)
        elif passed and ended.status == 0:
            self._tell(name, "passed", ended, note)
        else:
            self._tell(name, "failed", ended, note or ended.last_line)

    def skip(self, name: str, why: str) -> None:
        self._tell(name, "skipped", Ended(0, 0.0, ""), why)

    def _tell(self, name: str, result: str, ended: Ended, note: str) -> None:
        self.steps.append(Step(name, result, ended.seconds, note[:300]))
        print(f"  {name}: {result} in {ended.seconds:.0f} s  {note[:300]}", flush=True)
        self.write()

    @property
    def path(self) -> Path:
        return self.out / "gpu-check.json"

    def write(self) -> None:
        """What is known so far: a check that is killed keeps it."""
        content = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": self.machine,
            "small": self.small,
            "finished": self.finished,
            "passed": self.finished and self.status == 0,
            "no_gpu": self.no_gpu,
            "steps": [asdict(step) for step in self.steps],
            "figures": self.figures,
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(self.path)

    @property
    def status(self) -> int:
        """The exit status."""
        if self.no_gpu:
            return 2
        return int(any(step.result in ("failed", "overran") for step in self.steps))


def run_within(limit_s: float, command: Sequence[str], log: Path, env: Mapping[str, str]) -> Ended:
    """Run a command in its own session; if it takes too long, kill the whole session."""
    if limit_s < 1.0:
        return Ended(None, 0.0, "")
    begun = time.monotonic()
    status: int | None = None
    with open(log, "a+b") as sink:
        sink.write(f"$ {shlex.join(command)}\n".encode())
        sink.flush()
        start = sink.tell()
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(limit_s)
        finally:
            end_session(child)
        sink.seek(start)
        output = sink.read().decode(errors="replace")
    return Ended(status, time.monotonic() - begun, output)


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the processes of a child's session; some may survive if the kernel does not release them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


def output_of(command: Sequence[str]) -> str:
    """stdout of a short command; "" if it does not exist or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def commit() -> str:
    """The commit of the clone or archive, or ""."""
    with contextlib.suppress(OSError):  # in an archive of --pack
        return (ROOT / "wheels/commit.txt").read_text()
    head = output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return head + (" with changes" if head and changed else "")


# --- the steps ---


def build_commands(check: Check) -> list[list[str]]:
    pip = [*PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    pip += ["--target", str(check.scratch / "site")]
    packed = ROOT / "wheels"
    if packed.is_dir():  # made by --pack
        missing = f"[n for n, m in {gpu_pack.NEEDED}.items() if not importlib.util.find_spec(m)]"
        names = output_of([*PYTHON, "-c", f"import importlib.util; print(*{missing})"]).split()
        return [[*pip, "--no-index", "--find-links", str(packed), "gids-loader", *names]]
    has_backend = output_of([*PYTHON, "-c", "import nanobind_backend; print('yes')"])
    backend = [] if has_backend else [[*pip, "nanobind-backend>=1.0"]]
    folder = f"--config-settings=build-dir={check.scratch / 'build'}"
    return [*backend, [*pip, "--no-build-isolation", folder, str(ROOT)]]


def build(check: Check) -> bool:
    """Whether gids can be used."""
    if not check.build:
        check.skip("build", "--no-build: the installed gids is used")
        return True
    for command in build_commands(check):
        ended = check.run("build", command)
        if ended.status != 0:
            advice = "nanobind-backend cannot be installed: on another machine, make an archive with --pack"
            note = ended.last_line
            check.add("build", ended, f"{advice} ({note})" if "nanobind-backend" in command[-1] else note)
            return False
    ended = check.run("build", [*PYTHON, "-c", "import gids._core; print(gids.__file__)"])
    built = ended.last_line.startswith(str(check.scratch))
    hidden = f"{ended.last_line} hides it: uninstall that, or check it with --no-build"
    check.add("build", ended, "" if built else hidden, passed=built)
    return built


def look_at_machine(check: Check) -> None:
    """Find out whether gids opens a GPU, and describe the machine."""
    opened = check.run("machine", [*PYTHON, "-c", GPU])
    name = "".join(re.findall("^GPU (.*)", opened.output, re.MULTILINE))
    if not name and opened.status is not None:
        check.no_gpu = opened.last_line.partition(": ")[2] or opened.last_line or "no answer"
        opened.status = 0
    system = check.run("machine", [*PYTHON, "-c", SYSTEM, str(check.out)])
    with contextlib.suppress(ValueError):
        check.machine = {item["item"]: item["found"] for item in json.loads(system.output)}
    check.machine |= {"GPU": name, "commit": commit()}
    check.add("machine", opened, name or f"no GPU: {check.no_gpu}")


def pytest_command(tests: Iterable[str], workers: int = 0) -> list[str]:
    """The pytest command. workers: processes, 0 for none but pytest's own."""
    command = [*PYTHON, "-m", "pytest", "-m", "gpu", "-v", "-rfEp", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", f"--timeout={TEST_S}", "--timeout-method=thread"]
    if workers:  # pytest-benchmark refuses them
        command += ["-p", "no:benchmark", f"-n{workers}", "--dist=worksteal"]
    return [*command, *tests]


def run_tests(check: Check) -> None:
    """All tests, in a few processes. A hang or a crash costs the test only. Those that fail run again, alone:
    beside others, device memory can run short.

    A file or folder that needs a module which this machine lacks is skipped.
    """
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if HAS_GPU_TESTS.search(path.read_text())]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    while True:
        collected = check.run("tests", [*pytest_command(names), "--collect-only", "-qqq"])
        parts = re.split(r"^_+ ERROR collecting (\S+\.py) _+$", collected.output, flags=re.M)[1:]
        if of_folder := CONFTEST.search(collected.output):  # pytest names the first, and collects nothing
            parts = [os.path.relpath(of_folder[1], ROOT), collected.output]
        for place, text in zip(parts[::2], parts[1::2], strict=True):
            names = [name for name in names if name != place and not name.startswith(f"{place}/")]
            why = "".join(re.findall(r"^E +(\S.*)", text, re.M)[-1:])
            if lacking := NO_MODULE.search(why):
                check.skip(place, f"needs {lacking[1] or lacking[2]}")
            else:
                check.add(place, Ended(1, 0.0, ""), f"cannot be imported: {why}")
        if not of_folder or not names:
            break
    if not names:
        return
    if not parts and collected.status not in (0, 5):  # 5: there are none
        check.add("tests", collected, f"pytest cannot collect them: {collected.last_line}")
        return
    if check.no_gpu:
        check.skip("tests", f"no GPU: tests of {len(names)} files")
        return
    ended = check.run("tests", pytest_command(names, WORKERS))
    results = results_of(ended.output)
    failed = [test for test, result in results.items() if result in ("FAILED", "ERROR")]
    if results and ended.status == 1:
        ended.status = 0  # each failed test has a line of its own
    check.add("tests", ended, counted(results))
    if failed:
        ended = check.run("tests", pytest_command(failed, 1))
        results = results_of(ended.output)
    for test in failed:
        passed = results.get(test) == "PASSED"
        note = "passed alone" if passed else reason(ended.output, test)
        check.add(test, Ended(0, 0.0, ""), note, passed=passed)


def results_of(output: str) -> dict[str, str]:
    """PASSED, FAILED, … by test.

    What a process prints when it ends can break the line of a test, but not a line of the summary. That lists
    no skipped tests, and a run that was killed has none.
    """
    results = {one or other: how or how_other for one, how, how_other, other in RESULT.findall(output)}
    if summary := {test: how for how, test in SUMMARY.findall(output)}:
        results = {test: how for test, how in results.items() if how not in LISTED}
    return results | summary


def counted(results: Mapping[str, str]) -> str:
    counts = Counter(results.values())
    return ", ".join(f"{count} {result.lower()}" for result, count in sorted(counts.items()))


def reason(output: str, test: str) -> str:
    """Why a test failed, as pytest's summary says."""
    said = re.findall(rf"^(?:FAILED|ERROR) {re.escape(test)}(?: - (.*))?$", output, re.MULTILINE)
    return said[-1] if said and said[-1] else "see tests.log"


def sanitize(check: Check, tool: str) -> Ended | None:
    """Run small GPU tests under compute-sanitizer. None if there is none."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return None
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no"]
    if tool != "initcheck":  # which must see what writes memory: kernels of torch, too
        command += ["--kernel-name", "kns=gids_"]
    command += ["--error-exitcode", "86", *pytest_command(SANITIZED)]
    return check.run(tool, command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def add_sanitized(check: Check, tool: str, ended: Ended | None) -> None:
    if ended is None:
        check.skip(tool, "compute-sanitizer was not found on the PATH or in CUDA_HOME")
    elif (refused := NO_SANITIZER.search(ended.output)) and ended.status not in (0, None):
        check.skip(tool, f"this machine does not allow it: {refused[0]}")
    else:
        errors = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", ended.output)
        check.add(tool, ended, "; ".join([counted(results_of(ended.output)), *errors[-1:]]))


def run_tests_and_sanitizers(check: Check) -> None:
    """Beside each other: the sanitizers take their time on the CPU."""
    tools = () if check.no_gpu else SANITIZERS[:1] if check.small else SANITIZERS
    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        sanitized = {tool: pool.submit(sanitize, check, tool) for tool in tools}
        run_tests(check)
        for tool, ended in sanitized.items():
            add_sanitized(check, tool, ended.result())


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(home) / "bin") for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(folders)
    )


def benchmark(check: Check, step: str) -> None:
    """Run a question of bench/gpu.py. "streams-8" asks "streams" with 8 connections."""
    question, _, connections = step.partition("-")
    result = check.out / f"bench-{step}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "bench/gpu.py"), question, "--json", str(result)]
    command += ["--dir", str(check.scratch), *(["--small"] if check.small else [])]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
    ended = check.run(step, command, **environment)
    figures = []
    with contextlib.suppress(OSError, ValueError):
        figures = json.loads(result.read_text())["figures"]
    check.figures += [{"step": step, **figure} for figure in figures]
    missed = [figure["name"] for figure in figures if figure["passed"] is False]
    note = f"below its target: {', '.join(missed)}" if missed else ""
    if ended.status == 0 and not figures:
        note = "it wrote no results"
    check.add(step, ended, note, passed=not note)


def go(check: Check) -> int:
    """Run all steps. Returns the exit status."""
    usable = build(check)
    if usable:
        look_at_machine(check)
    for name in [name for name in check.limits_s if name not in FIRST_S]:
        if not usable:
            check.skip(name, "gids was not built")
        elif name == "tests":
            run_tests_and_sanitizers(check)
        elif check.no_gpu:
            check.skip(name, f"no GPU: {check.no_gpu}")
        else:
            benchmark(check, name)
    check.finished = True
    check.write()
    print(f"written to {check.path}")
    if check.no_gpu:
        print(f"no GPU: {check.no_gpu}")
    return check.status


def limits_of(part: str) -> dict[str, float]:
    """The steps of "checks", "figures", "papers" or "all" (all but papers), and the most seconds of each."""
    limits = dict(FIRST_S)
    for name in ("checks", "figures") if part == "all" else [part]:
        limits |= PARTS_S[name]
    return limits


def make_archive(archive: Path) -> int:
    try:
        size = gpu_pack.pack(ROOT, archive.resolve(), commit())
    except (gpu_pack.PackError, OSError) as error:
        print(f"--pack {archive}: {error}", file=sys.stderr)
        return 1
    folder = gpu_pack.FOLDER
    print(f"{archive}: {size / 1e6:.1f} MB. Run it: tar xf {archive.name} && {folder}/tools/gpu_check.sh")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = "directory for logs and gpu-check.json"
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check", help=out)
    scratch = "directory on the disk to measure, for up to 15 GB of temporary data (default: that of --out)"
    parser.add_argument("--scratch", type=Path, metavar="DIR", help=scratch)
    parser.add_argument(
        "--quick", action="store_true", help="small benchmarks; of compute-sanitizer only memcheck"
    )
    parser.add_argument("--no-build", action="store_true", help="check the installed gids")
    part = "steps to run: checks (tests, sanitizers), figures, papers (benchmarks), all but papers (default)"
    parser.add_argument("--part", choices=[*PARTS_S, "all"], default="all", help=part)
    pack = "make an archive that runs this check on an x86-64 machine without network, and exit"
    parser.add_argument("--pack", type=Path, metavar="FILE.tar", help=pack)
    args = parser.parse_args(arguments)
    if args.pack:
        return make_archive(args.pack)
    for folder in (args.out, args.scratch or args.out):
        folder.mkdir(parents=True, exist_ok=True)
    for log in args.out.glob("*.log"):
        log.unlink()
    out = args.out.resolve()
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=args.scratch or out) as made:
        return go(Check(limits_of(args.part), out, Path(made).resolve(), args.quick, not args.no_build))


if __name__ == "__main__":
    sys.exit(main())
