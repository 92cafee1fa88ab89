"""Converts hostile sources, each in a forked child with bounded memory, and judges how each conversion ends.

    python tests/store/readers/hostile_runner.py --cases 5000 --seed 1

Called by test_hostile_sources.py, in a process of its own: the child inherits no threads. A line of JSON per
failure, and a last one with the outcomes. A conversion must succeed, or end with one line of error and
nothing left behind, within its time and memory, and run no code of the source.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import hostile_changes
import hostile_formats
import hostile_templates
import torch

from gids import cli
from gids.errors import FormatError, StorageError
from gids.store import verify

TIME_S = 60
PEAK_BYTES = (256 + 300) << 20  # the default of --memory, and what docs/datasets.md allows beyond it
DATA_BYTES = 2 << 30  # what the child may allocate, so that a failure does not take the machine's memory
OPEN_FILES = 128  # at a time
FILE_BYTES = 100 << 20  # what it may write to one file
EXPECTED = (FormatError, StorageError, FileNotFoundError, FileExistsError, ImportError)


def convert(source: Path, arguments: tuple[str, ...]) -> dict[str, object]:
    """What the command does with a source: its status, its error and of which class that is."""
    target = source.parent / "x.gids"
    errors = io.StringIO()
    os.chdir(source.parent)  # where code of the source would leave its mark
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


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))


def in_child(source: Path, arguments: tuple[str, ...]) -> dict[str, object]:
    """Convert in a forked child; what it did, and its peak of memory above that of its parent."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, f"{resident()}\n".encode())
            limit = anonymous_bytes() + DATA_BYTES
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


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def faults_of(found: dict[str, object], before: list[str], after: list[str]) -> list[str]:
    """What is wrong with how a conversion ended."""
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
    is_resumable = "File too large" in str(found.get("error"))  # it grew beyond what the child may write
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="sources whose name has this")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a child would wait for threads that it has not
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        sources = hostile_templates.write_all(Path(root) / "valid")
        names = [name for name in sorted(sources) if args.only in name]
        for case in range(args.first, args.first + args.cases):
            rng = random.Random(f"{args.seed} {case}")
            name = rng.choice(names)
            work = Path(root) / f"case {case}"
            work.mkdir()
            source = hostile_changes.copy(Path(root) / "valid" / name, work / name)
            try:
                said = hostile_changes.spoil(rng, source, hostile_formats.WAYS)
            except Exception:
                print(
                    json.dumps({"case": case, "source": name, "not made": traceback.format_exc()[-900:]}),
                    flush=True,
                )
                shutil.rmtree(work)
                continue
            before = listed(work)
            found = in_child(source, sources[name])
            faults = faults_of(found, before, listed(work))
            outcomes["converted" if found["status"] == 0 else "refused" if not faults else "failed"] += 1
            if faults or args.verbose:
                print(
                    json.dumps({"case": case, "source": name, "did": said, "faults": faults, **found}),
                    flush=True,
                )
            shutil.rmtree(work)
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
