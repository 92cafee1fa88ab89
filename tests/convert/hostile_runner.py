"""Converts hostile sources, each in a forked child with limited memory, and checks how each conversion ends.

    python tests/convert/hostile_runner.py --cases 5000 --seed 1

Called by test_hostile_sources.py, in a process of its own: the child inherits no threads. A line of JSON per
failure, and a last one with the outcomes. A conversion must succeed, or end with one line of error and
nothing left behind, within its time and memory, and run no code of the source.
"""

import argparse
import collections
import contextlib
import gc
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the command sets it too late for this process
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import hostile_changes
import hostile_formats
import hostile_templates
import torch

from gids import cli
from gids.convert import trial
from gids.convert.memory_guard import allocated_bytes
from gids.errors import FormatError, StorageError
from gids.store import verify

TIME_S = 120  # a longer conversion counts as hanging
PEAK_BYTES = (256 + 300) << 20  # default of --memory plus the allowance in docs/datasets.md
DATA_BYTES = 2 << 30  # limit for allocations of the child, to protect the machine
OPEN_FILES = 128  # at a time
FILE_BYTES = 100 << 20  # limit for one file that it writes
EXPECTED = (FormatError, StorageError, FileNotFoundError, FileExistsError, ImportError)


def convert(source: Path, arguments: tuple[str, ...]) -> dict[str, object]:
    """Run the command on a source. Returns its status, its error and the class of the error."""
    target = source.parent / "x.gids"
    errors = io.StringIO()
    os.chdir(source.parent)  # code of the source would leave its mark here
    with (
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        raised: list[BaseException] = []
        one_line = cli._one_line

        def noted(error: Exception) -> str:
            raised.append(error)
            return one_line(error)

        cli._one_line = noted
        status = cli.main(["convert", str(source), str(target), "--quiet", *arguments])
        faults = list(verify(target)) if status == 0 else []
    found: dict[str, object] = {"status": status, "faults": faults, "error": errors.getvalue()[-3000:]}
    if raised:
        error = raised[0]
        found["class"] = type(error).__name__
        where = traceback.extract_tb(error.__traceback__)
        found["at"] = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(where))[:400]
        named = isinstance(error, OSError) and error.filename is not None
        found["expected"] = isinstance(error, EXPECTED) or named
    return found


def in_child(source: Path, arguments: tuple[str, ...]) -> dict[str, object]:
    """Convert in a forked child. Returns the result and the peak of memory above its parent's."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, f"{resident()}\n".encode())
            limit = allocated_bytes() + DATA_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
            found = convert(source, arguments)
        except BaseException as error:
            found = {
                "status": "raised",
                "class": type(error).__name__,
                "error": traceback.format_exc()[-2000:],
            }
        os.write(writing, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    data, deadline = b"", time.monotonic() + TIME_S
    with open(reading, "rb", buffering=0) as pipe:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                piece = pipe.read(1 << 16)
                if not piece:
                    break
                data += piece
        else:
            os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    found = {"status": "killed after its time" if left <= 0 else f"died of signal {os.WTERMSIG(status)}"}
    before, _, result = data.partition(b"\n")
    with contextlib.suppress(ValueError):
        found = json.loads(result)
    found["peak"] = (usage.ru_maxrss << 10) - int(before)
    found["seconds"] = round(TIME_S - left, 1)
    return found


def start_fast(*, fork_trials: bool) -> None:
    """Do once what every child would otherwise do again.

    fork_trials: fork also the process that tries DGL or SciPy before a conversion. The command starts a new
    Python for it, which takes seconds to import torch.
    """
    torch.set_num_threads(1)  # a child would wait for threads that it does not have
    os.fsync = os.fdatasync = lambda _: None  # no case tests a power cut
    if fork_trials:
        trial.subprocess = types.SimpleNamespace(run=run_forked, DEVNULL=None, PIPE=None)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["convert", "--list"])  # imports every subcommand and every reader
    gc.collect()
    gc.freeze()  # so that collections in a child do not copy these pages


def run_forked(command: list[str], *, input: bytes, **_: object) -> subprocess.CompletedProcess[bytes]:
    """subprocess.run of the command of a trial, in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1  # for what trial.main does not catch
        try:
            with open(writing, "w") as sys.stdout:
                status = trial.main(input)
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return subprocess.CompletedProcess(command, status, said)


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def faults_of(found: dict[str, object], before: list[str], after: list[str]) -> list[str]:
    """The faults of a conversion: a wrong status, error, memory or leftover."""
    faults = []
    status, peak = found["status"], found["peak"]
    if status not in (0, 2):
        faults.append(f"status {status}")
    if status == 2:
        text = str(found["error"])
        lines = [line for line in text.splitlines() if line.startswith("gids convert: ")]
        if len(lines) != 1 or not text.endswith(lines[0] + "\n") or len(lines[0]) > 2000:
            faults.append("not one line")
        if not found["expected"]:
            faults.append("unexpected class")
    is_resumable = "File too large" in str(
        found.get("error")
    )  # the dataset is larger than the child may write
    if status != 0 and before != after and not is_resumable:
        faults.append(f"left behind {sorted(set(after) - set(before))[:5]}")
    strays = [path for path in set(after) - set(before) if not path.startswith("x.gids")]
    if strays:
        faults.append(f"wrote {strays[:5]}")
    if status == 0 and found["faults"]:
        faults.append("verify finds faults")
    if isinstance(peak, int) and peak > PEAK_BYTES:
        faults.append(f"peak of {peak >> 20} MiB")
    if any(path.endswith("executed") for path in after):
        faults.append("executed code")
    return faults


def listed(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def judge(source: Path, arguments: tuple[str, ...], work: Path) -> dict[str, object]:
    """Convert a source, which is alone in a directory, and check the result and the directory."""
    before = listed(work)
    found = in_child(source, arguments)
    return {"faults": faults_of(found, before, listed(work)), **found}


def convert_random(cases: range, seed: int, only: str, root: Path) -> collections.Counter[str]:
    """Convert damaged sources and print a line per failure. Returns the number of each outcome."""
    outcomes: collections.Counter[str] = collections.Counter()
    sources = hostile_templates.write_all(root / "valid")
    names = [name for name in sorted(sources) if only in name]
    for case in cases:
        rng = random.Random(f"{seed} {case}")
        name = rng.choice(names)
        work = root / f"case {case}"
        work.mkdir()
        source = hostile_changes.copy(root / "valid" / name, work / name)
        said = hostile_changes.spoil(rng, source, hostile_formats.WAYS)
        found = judge(source, sources[name], work)
        failed = bool(found["faults"])
        outcomes["failed" if failed else "converted" if found["status"] == 0 else "refused"] += 1
        if failed:
            print(json.dumps({"case": case, "source": name, "did": said, **found}), flush=True)
        shutil.rmtree(work)
    return outcomes


def convert_listed(sources: list[tuple[str, list[str]]]) -> None:
    """Convert sources, each in its own directory, and print a line for each."""
    for path, arguments in sources:
        print(json.dumps(judge(Path(path), tuple(arguments), Path(path).parent)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="number of sources to spoil")
    parser.add_argument("--first", type=int, default=0, help="number of the first, to repeat it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="spoil sources with this in their name")
    parser.add_argument("--listed", type=Path, help="JSON file of sources to convert instead")
    args = parser.parse_args()
    start_fast(fork_trials=not args.listed)
    if args.listed:
        convert_listed(json.loads(args.listed.read_text()))
        return
    with tempfile.TemporaryDirectory() as root:
        cases = range(args.first, args.first + args.cases)
        print(json.dumps(convert_random(cases, args.seed, args.only, Path(root))), flush=True)


if __name__ == "__main__":
    main()
