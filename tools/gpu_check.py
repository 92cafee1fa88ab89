"""Builds gids in a temporary directory, and runs its GPU tests, compute-sanitizer and the GPU benchmarks.

Every test file runs in its own process, and every step has a time limit. Writes a table and a JSON file.
Called by gpu_check.sh. Needs only Python. `--pack FILE.tar` makes an archive that runs elsewhere.

A step that takes too long is killed with its children, and the next step starts. Exit status: 0 all steps
passed, 1 a step failed or was killed, 2 no GPU (steps that need none are run).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import gpu_pack

ROOT = Path(__file__).resolve().parents[1]
PART_S = 575.0  # the most that the steps of a part take together, with machine and build
FILE_S = 90.0  # for the tests of one file
TEST_S = 45  # for one test; beyond it pytest prints the stacks and ends the file's process
GRACE_S = 3.0  # between asking a step to end and killing it
PYTHON = [sys.executable, "-P"]
NO_SANITIZER = re.compile(
    r"device (is )?not supported|unable to (find|load)|insufficient permissions", re.IGNORECASE
)

NAMES_DEVICE = re.compile("gpu|device", re.IGNORECASE)  # a file without it has no GPU tests
NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")

MACHINE = r"""
import ctypes, importlib.metadata as metadata, json, os, platform
found = {"python": platform.python_version(), "kernel": platform.release()}
found["cores"] = len(os.sched_getaffinity(0))
for line in open("/proc/meminfo"):
    if line.startswith("MemTotal"):
        found["memory_bytes"] = int(line.split()[1]) * 1024
for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "kvikio-cu13", "kvikio-cu12", "numpy", "pytest"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    found["driver_cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    import torch
    found["toolkit_cuda"] = torch.version.cuda
    torch.ones(1, device="cuda").sum().item()
    properties = torch.cuda.get_device_properties(0)
    found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory,
              "compute_capability": f"{properties.major}.{properties.minor}"}
except Exception as error:
    found["no_gpu"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
print(json.dumps(found))
"""


@dataclass
class Step:
    """A line of the table. result: "passed", "failed", "overran", "skipped". note: why, or counts."""

    name: str
    result: str
    seconds: float = 0.0
    note: str = ""


@dataclass
class Ended:
    """A command that has ended.

    status: None if it took too long and was killed. output: all its output. begun: False if there was no time
    to start it.
    """

    status: int | None
    seconds: float
    output: str
    begun: bool = True

    @property
    def last_line(self) -> str:
        """The last line; if pip quotes the output of a command, the last line of that output."""
        quoted = self.output.partition("[end of output]")[0]
        return (quoted.strip().splitlines() or [""])[-1].strip()


@dataclass(frozen=True)
class Plan:
    """The steps and their time limits. small: use the benchmarks' small sizes. 0: skip the step."""

    shares_s: Mapping[str, float]
    small: bool

    def part(self, name: str) -> Plan:
        """The steps of "checks" or "figures" only; of "all", every step."""
        chosen = {"machine", "build", *PARTS.get(name, self.shares_s)}
        return Plan({step: share for step, share in self.shares_s.items() if step in chosen}, self.small)


SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
TRANSFERS = {  # figures: what transfer= does to training
    "rows/s": "training rows/s, transfer copy over kernel",
    "kernel": "training beside reads, wait stream, over alone",
    "copy": "training beside reads, transfer copy, over alone",
}
ALIKE = 0.03  # ratios that differ by less are alike
BENCHMARKS: Mapping[str, tuple[str, Mapping[str, str]]] = {  # step -> question of bench/gpu.py, environment
    "bus": ("bus", {}),
    "streams-8": ("streams", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    "streams-32": ("streams", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    "gather": ("gather", {}),
    "planning": ("planning", {}),
    "queue": ("queue", {}),
    "extents": ("extents", {}),
    "packs": ("packs", {}),
    "sampling": ("sampling", {}),
    "overlap": ("overlap", {}),
    "life": ("life", {}),
    "large": ("large", {}),
    "training": ("training", {}),
}
_CHECKS = ("tests", *SANITIZERS, "life", "large")
PARTS = {"checks": _CHECKS, "figures": tuple(step for step in BENCHMARKS if step not in _CHECKS)}
FULL = Plan(
    {
        "machine": 20,
        "build": 100,
        "tests": 230,
        "memcheck": 45,
        "racecheck": 45,
        "synccheck": 30,
        "initcheck": 30,
        "life": 25,
        "large": 50,
        "bus": 20,
        "streams-8": 20,
        "streams-32": 20,
        "gather": 25,
        "planning": 25,
        "queue": 40,
        "extents": 25,
        "packs": 45,
        "sampling": 40,
        "overlap": 90,
        "training": 100,
    },
    small=False,
)
QUICK = Plan(
    {**FULL.shares_s, "memcheck": 30, **dict.fromkeys(("racecheck", "synccheck", "initcheck"), 0.0)},
    small=True,
)
SANITIZED = (  # small, and between them every kernel
    "tests/io/test_device_queue.py::test_every_page_comes_back",
    "tests/io/test_device_queue.py::test_tiny_rings_go_round_many_times",
    "tests/io/test_device_queue.py::test_without_a_waiting_stream_a_kernel_polls",
    "tests/cache/test_device_cache.py::test_rows_equal_the_source_when_a_minibatch_takes_many_rounds",
    "tests/cache/test_cache_contract.py::test_rows_equal_the_source_for_every_geometry",
    "tests/cache/test_cache_contract.py::test_converted_rows_equal_torch_bit_for_bit",
    "tests/cache/test_device_cache.py::test_several_tables_share_one_queue_with_wait_warp",
    "tests/packs/test_packs_on_a_device.py::test_a_run_resumes_inside_a_pack",
    "tests/sampler/test_neighbor.py::test_minibatches_of_a_device_equal_the_model",
    "tests/sampler/test_neighbor.py::test_relations_are_sampled_as_in_the_model",
    "tests/sampler/test_labor_on_device.py::test_relations_are_sampled_as_on_the_cpu",
    "tests/sampler/test_weighted_on_device.py::test_relations_are_sampled_as_on_the_cpu",
)


@dataclass
class Check:
    """One run of the check. site: the directory into which gids is built."""

    plan: Plan
    out: Path
    scratch: Path
    wheels: Path | None = None
    build: bool = True
    steps: list[Step] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        return self.scratch / "site"

    @property
    def no_gpu(self) -> str:
        """Why there is no GPU, or ""."""
        return str(self.machine.get("no_gpu", ""))

    def run(
        self, name: str, command: Sequence[str], *, limit_s: float = float("inf"), **environment: str
    ) -> Ended:
        """Run a command in the time left of its step, limit_s at most. Its output goes to OUT/NAME.log."""
        left = self.plan.shares_s[name] - self.spent.get(name, 0.0)
        allowed = sum(self.plan.shares_s.values())
        limit = min(left, limit_s, allowed - (time.monotonic() - self.begun))
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # streams do not share a hardware channel
        env |= {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **environment}
        ended = run_within(limit, command, self.out / f"{name}.log", env)
        self.spent[name] = self.spent.get(name, 0.0) + ended.seconds
        return ended

    def add(
        self,
        name: str,
        ended: Ended,
        note: str = "",
        *,
        passed: bool | None = None,
        seconds: float | None = None,
    ) -> None:
        """Add a line. seconds: if they are not those of the whole step."""
        seconds = self.spent[name] if seconds is None else seconds
        if ended.status is None:
            how = f"killed after {seconds:.0f} s" if ended.begun else "not begun: no time is left"
            result, note = "overran", f"{how}{note and f'; {note}'}"
        elif (ended.status == 0) if passed is None else passed:
            result = "passed"
        else:
            result, note = "failed", note or ended.last_line
        self._tell(Step(name, result, seconds, note[:300]))

    def skip(self, name: str, why: str) -> None:
        self._tell(Step(name, "skipped", self.spent.get(name, 0.0), why[:300]))

    def _tell(self, step: Step) -> None:
        self.steps.append(step)
        print(f"  {step.name}: {step.result} in {step.seconds:.0f} s  {step.note}", flush=True)


def run_within(limit_s: float, command: Sequence[str], log: Path, env: Mapping[str, str]) -> Ended:
    """Run a command in its own session; if it takes too long, kill the whole session."""
    begun = time.monotonic()
    status: int | None = None
    with open(log, "ab") as sink:
        sink.write(f"$ {shlex.join(command)}\n".encode())
        sink.flush()
        start = sink.tell()
        if limit_s > 1.0:
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
                status = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                end_session(child)
    with open(log, "rb") as source:
        source.seek(start)
        output = source.read().decode(errors="replace")
    return Ended(status, time.monotonic() - begun, output, limit_s > 1.0)


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the processes of a child's session; some may survive if the kernel does not release them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


# --- the steps ---


def look_at_machine(check: Check) -> None:
    ended = check.run("machine", [*PYTHON, "-c", MACHINE])
    with contextlib.suppress(ValueError):
        check.machine = json.loads(ended.last_line if ended.status == 0 else "")
    if not check.machine:
        check.machine = {"no_gpu": f"the Python interpreter fails: {ended.last_line or 'no output'}"}
    check.machine |= nvidia_smi() | commit()
    check.add("machine", ended, check.machine.get("gpu") or f"no GPU: {check.no_gpu}")


def nvidia_smi() -> dict[str, str]:
    """The driver, and the maximum of the PCIe link, which is slower when idle."""
    fields = ["driver_version", "pcie.link.gen.max", "pcie.link.width.max"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    said = output_of(command)
    values = [value.strip() for value in said.split(",")]
    names = ["driver", "pcie_generation", "pcie_lanes"]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def commit() -> dict[str, str]:
    with contextlib.suppress(OSError):  # in an archive of --pack
        return dict(json.loads((ROOT / "wheels/commit.json").read_text()))
    found = output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": found + (" with changes" if changed else "")} if found else {}


def output_of(command: Sequence[str]) -> str:
    """stdout of a short command; "" if it does not exist or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def build_commands(check: Check) -> list[list[str]]:
    pip = [*PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    target = ["--target", str(check.site)]
    packed = ROOT / "wheels"
    if packed.is_dir():  # made by --pack
        found = f"[n for n, m in {gpu_pack.NEEDED}.items() if not importlib.util.find_spec(m)]"
        missing = output_of([*PYTHON, "-c", f"import importlib.util; print(*{found})"]).split()
        return [[*pip, "--no-index", "--find-links", str(packed), *target, "gids", *missing]]
    commands = []
    if check.wheels:
        wheels = sorted(str(path) for path in check.wheels.glob("*.whl"))
        commands.append([*pip, "--no-index", *target, *wheels])
    has_backend = output_of([*PYTHON, "-c", "import nanobind_backend; print('yes')"])
    brought = check.wheels and list(check.wheels.glob("nanobind_backend-*.whl"))
    if not has_backend and not brought:
        commands.append([*pip, *target, "nanobind-backend>=1.0"])
    folder = f"-Cbuild-dir={check.scratch / 'build'}"
    commands.append([*pip, "--no-build-isolation", *target, folder, str(ROOT)])
    return commands


def build(check: Check) -> bool:
    if not check.build:
        check.skip("build", "--no-build: the installed gids is used")
        return True
    for command in build_commands(check):
        ended = check.run("build", command)
        if ended.status != 0:
            note = ended.last_line
            if "nanobind-backend" in command[-1]:
                note = (
                    "nanobind-backend cannot be installed: give a directory with its wheel by --wheels DIR "
                    f"({note})"
                )
            check.add("build", ended, note)
            return False
    found = check.run("build", [*PYTHON, "-c", "import gids._core; print(gids.__file__)"])
    built = found.last_line.startswith(str(check.site))
    hidden = f"{found.last_line} hides it: uninstall that, or check it with --no-build"
    check.add("build", found, "" if built else hidden, passed=built)
    return built


def pytest_command(check: Check, tests: Sequence[str]) -> list[str]:
    """The pytest command. With -v the log of a killed run shows the test that was running."""
    command = [*PYTHON, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", f"--timeout={TEST_S}", "--timeout-method=thread"]  # no other plugin
    return [*command, *tests]


def gpu_tests(check: Check) -> tuple[Ended, Counter[str], dict[str, str]]:
    """The collection; the number of GPU tests by file; the files that cannot be imported, and why."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if NAMES_DEVICE.search(path.read_text())]
    if not output_of([*PYTHON, "-c", "import importlib.util as u; print(u.find_spec('dgl') or '')"]):
        files = [path for path in files if path.parent.name not in ("dgl", "graphbolt")]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    command = [*pytest_command(check, names), "--collect-only", "-qq", "--continue-on-collection-errors"]
    ended = check.run("tests", command)
    counts = Counter({file: int(n) for file, n in re.findall(r"^(\S+\.py): (\d+)$", ended.output, re.M)})
    parts = re.split(r"^_+ ERROR collecting (\S+\.py) _+$", ended.output, flags=re.M)
    faults = dict(zip(parts[1::2], parts[2::2], strict=True))
    why = {file: re.findall(r"^E +(\S.*)", text, re.M)[-1:] for file, text in faults.items()}
    return ended, counts, {file: "".join(last) for file, last in why.items()}


def run_tests(check: Check) -> None:
    """One process per file: a hang, or an error after which CUDA refuses everything, costs that file only.

    A file that needs a module which this machine lacks is skipped.
    """
    collected, counts, faults = gpu_tests(check)
    note = f"{sum(counts.values())} GPU tests in {len(counts)} files"
    if not counts:
        check.add("tests", collected, passed=False)
    elif check.no_gpu:
        check.skip("tests", f"no GPU: {note}")
    else:
        check.add("tests", collected, note, passed=True)
    for file, why in faults.items():
        if (lacking := NO_MODULE.search(why)) and lacking[1] not in ("gids", "tests"):
            check.skip(file, f"needs {lacking[1]}")
        else:
            check.add(file, collected, f"cannot be imported: {why}", passed=False, seconds=0.0)
    for file in counts if not check.no_gpu else ():
        ended = check.run("tests", pytest_command(check, ["-v", file]), limit_s=FILE_S)
        check.add(file, ended, summary(ended.output) if ended.begun else "", seconds=ended.seconds)


def summary(output: str) -> str:
    """pytest's counts; of a killed run, the counts so far and the test that was running."""
    counts = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    if counts:
        return str(counts[-1])
    line = r"^(\S+::.*?) ?(?:(PASSED|FAILED|ERROR|SKIPPED)\b.*)?$"
    ends = re.findall(line, output, re.MULTILINE)
    if not ends:
        return Ended(None, 0.0, output).last_line
    passed, failed = (sum(word == end for _, end in ends) for word in ("PASSED", "FAILED"))
    where = "" if ends[-1][1] else f", in {re.sub('[+]{3,}', '', ends[-1][0]).strip()}"
    return f"{passed} passed, {failed} failed{where}"


def sanitize(check: Check, tool: str) -> None:
    """Run the small GPU tests under compute-sanitizer, which checks the kernels of gids only."""
    sanitizer = find_sanitizer()
    if not check.plan.shares_s[tool]:
        check.skip(tool, "--quick")
        return
    if sanitizer is None:
        check.skip(tool, "compute-sanitizer was not found on the PATH or in CUDA_HOME")
        return
    command = [sanitizer, "--tool", tool, "--kernel-name", "kns=gids_", "--report-api-errors", "no"]
    command += ["--error-exitcode", "86", *pytest_command(check, ["-v", *SANITIZED])]
    ended = check.run(tool, command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    refused = NO_SANITIZER.search(ended.output)
    if ended.status not in (0, None) and refused:
        check.skip(tool, f"this machine does not allow it: {refused[0]}")
        return
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", ended.output)
    check.add(tool, ended, "; ".join([summary(ended.output), *found[-1:]]))


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home) / "bin") for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def benchmark(check: Check, step: str) -> None:
    question, environment = BENCHMARKS[step]
    result = check.out / f"bench-{step}.json"
    result.unlink(missing_ok=True)
    command = [*PYTHON, str(ROOT / "bench/gpu.py"), question, "--json", str(result)]
    command += ["--dir", str(check.scratch), *(["--small"] if check.plan.small else [])]
    ended = check.run(step, command, **environment)
    figures = []
    with contextlib.suppress(OSError, ValueError):
        figures = json.loads(result.read_text())["figures"]
    check.figures += [{"step": step, **figure} for figure in figures]
    missed = [f["name"] for f in figures if f.get("passed") is False]
    note = f"below its target: {', '.join(missed)}" if missed else ""
    if ended.status == 0 and not figures:
        missed, note = ["all"], "it wrote no results"
    check.add(step, ended, note, passed=ended.status == 0 and not missed)


# --- the report ---


def passed(check: Check) -> bool:
    return all(step.result in ("passed", "skipped") for step in check.steps)


def status(check: Check) -> int:
    if check.no_gpu:
        return 2
    return 0 if passed(check) else 1


def report(check: Check) -> str:
    """Two tables in Markdown: steps and results."""
    machine = check.machine
    names = [
        "gpu",
        "driver",
        "driver_cuda",
        "toolkit_cuda",
        "pcie_generation",
        "torch",
        "python",
        "kernel",
        "commit",
    ]
    lines = [", ".join(f"{name} {machine[name]}" for name in names if machine.get(name)), ""]
    lines += ["| step | result | seconds | |", "|---|---|---|---|"]
    lines += [
        f"| {s.name} | {s.result} | {s.seconds:.0f} | {s.note.replace('|', '/')} |" for s in check.steps
    ]
    if check.figures:
        lines += ["", "| figure | measured | target | |", "|---|---|---|---|"]
        for f in check.figures:
            bar = "" if f.get("bar") is None else f"≥ {f['bar']:,.6g} {f['unit']}".strip()
            verdict = {True: "passed", False: "failed"}.get(f.get("passed"), "")
            lines.append(f"| {f['name']} | {f['value']:,.4g} {f['unit']} | {bar} | {verdict} |")
    if (better := better_transfer(check.figures)) and not check.plan.small:
        lines += ["", f"Better default for transfer=: {better[0]!r}. {better[1]}."]
    return "\n".join(lines)


def better_transfer(figures: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The value of transfer= that should be the default here, and why. None without all of its figures.

    That with which GraphSAGE trains faster; if both are alike, that with which training keeps more of its
    speed beside reads; else "kernel", which needs no device memory.
    """
    values = {f["name"]: float(f["value"]) for f in figures}
    if any(name not in values for name in TRANSFERS.values()):
        return None
    rows, kernel, copy = (values[TRANSFERS[key]] for key in ("rows/s", "kernel", "copy"))
    found = (
        f"GraphSAGE trains {rows:.2f} times as many rows/s with 'copy' as with 'kernel'; beside reads, "
        f"training keeps {copy:.0%} of its speed with 'copy', {kernel:.0%} with 'kernel'"
    )
    copy_wins = rows >= 1 + ALIKE or (rows > 1 - ALIKE and copy >= kernel + ALIKE)
    return ("copy" if copy_wins else "kernel"), found


def write_json(check: Check, path: Path) -> None:
    content = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": check.machine,
        "small": check.plan.small,
        "passed": passed(check) and not check.no_gpu,
        "no_gpu": check.no_gpu,
        "seconds": round(time.monotonic() - check.begun, 1),
        "steps": [asdict(step) for step in check.steps],
        "figures": check.figures,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def go(check: Check) -> int:
    """Run all steps, print and write the report. Returns the exit status."""
    look_at_machine(check)
    usable = build(check)
    for name in [step for step in check.plan.shares_s if step not in ("machine", "build")]:
        if not usable:
            check.skip(name, "gids was not built")
        elif check.no_gpu and name != "tests":
            check.skip(name, f"no GPU: {check.no_gpu}")
        elif name == "tests":
            run_tests(check)
        elif name in SANITIZERS:
            sanitize(check, name)
        else:
            benchmark(check, name)
    path = check.out / "gpu-check.json"
    write_json(check, path)
    print(f"\n{report(check)}\n\nwritten to {path}")
    if check.no_gpu:
        print(f"no GPU: {check.no_gpu}")
    return status(check)


def dry_run(plan: Plan) -> None:
    for name, share in plan.shares_s.items():
        if name in BENCHMARKS:
            question, environment = BENCHMARKS[name]
            settings = "".join(f"{key}={value} " for key, value in environment.items())
            what = f"{settings}bench/gpu.py {question}{' --small' if plan.small else ''}"
        else:
            what = {
                "machine": "versions of driver, CUDA, torch, CuPy; is there a GPU?",
                "build": "pip install --no-build-isolation --no-deps --target (scratch) .",
                "tests": "pytest -m gpu, one process per file",
            }.get(name, f"compute-sanitizer --tool {name}, on some tests")
        print(f"{name:<10} {f'at most {share:.0f} s' if share else 'skipped':<14} {what}")
    print(f"{'':<10} at most {sum(plan.shares_s.values()):.0f} s in all")


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
    out = "directory on the disk to measure, for logs, gpu-check.json and up to 10 GB of temporary data"
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check", help=out)
    parser.add_argument(
        "--wheels", type=Path, help="directory of wheels to install first (nanobind-backend, …)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small benchmarks; of compute-sanitizer only memcheck"
    )
    parser.add_argument("--no-build", action="store_true", help="check the installed gids")
    parser.add_argument("--dry-run", action="store_true", help="list the steps and exit")
    part = "steps to run: checks (tests, compute-sanitizer), figures (benchmarks) or all (default)"
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help=part)
    pack = "make an archive that runs this check on an x86-64 machine without network, and exit"
    parser.add_argument("--pack", type=Path, metavar="FILE.tar", help=pack)
    args = parser.parse_args(arguments)
    if args.pack:
        return make_archive(args.pack)
    plan = (QUICK if args.quick else FULL).part(args.part)
    if args.dry_run:
        dry_run(plan)
        return 0
    if args.wheels and not args.wheels.is_dir():
        parser.error(f"--wheels {args.wheels}: no such directory")
    args.out.mkdir(parents=True, exist_ok=True)
    for log in args.out.glob("*.log"):
        log.unlink()
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=args.out.resolve()) as scratch:
        wheels = args.wheels.resolve() if args.wheels else None
        return go(Check(plan, args.out.resolve(), Path(scratch), wheels, not args.no_build))


if __name__ == "__main__":
    assert platform.system() == "Linux", "gids runs on Linux"
    sys.exit(main())
