"""Converts hostile sources, each in a forked child with limited memory, and checks how each conversion ends.

    python tests/convert/hostile_runner.py --cases 5000 --seed 1

Called by test_hostile_sources.py, in a process of its own: the child inherits no threads. A line of JSON per
failure, and a last one with the outcomes. A conversion must succeed, or end with one line of error and
nothing left behind, within its time and memory, and run no code of the source. Random cases are sources of
drawn_sources.py, of which one file is damaged or replaced.
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
import socket
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the command sets it too late for this process
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import drawn_sources
import torch

from gids import cli
from gids.convert import readers
from gids.convert.untrusted import allocated_bytes
from gids.errors import FormatError, StorageError
from gids.store import verify

TIME_S = 120  # a longer conversion counts as hanging
PEAK_BYTES = (256 + 300) << 20  # default of --memory plus the allowance in docs/datasets.md
DATA_BYTES = 2 << 30  # limit for allocations of the child, to protect the machine
OPEN_FILES = 128  # at a time
FILE_BYTES = 100 << 20  # limit for one file that it writes
EXPECTED = (FormatError, StorageError, FileNotFoundError, FileExistsError, ImportError)
IN_THIS_PROCESS = [name for name in drawn_sources.READERS if name not in ("dgl", "matlab")]
REPLACEMENTS = ["fifo", "socket", "directory", "link to itself", "/dev/zero", "/etc/passwd", "empty", "big"]


def convert(source: Path, arguments: tuple[str, ...]) -> dict[str, object]:
    """Run the command on a source. Returns its status, its error and whether its class is expected."""
    target = source.parent / "x.gids"
    errors, raised = io.StringIO(), []
    one_line = cli._one_line

    def noted(error: Exception) -> str:
        raised.append(error)
        return one_line(error)

    os.chdir(source.parent)  # code of the source would leave its mark here
    cli._one_line = noted
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        status = cli.main(["convert", str(source), str(target), "--quiet", *arguments])
        faults = list(verify(target)) if status == 0 else []
    result: dict[str, object] = {"status": status, "faults": faults, "error": errors.getvalue()[-3000:]}
    for error in raised:
        where = traceback.extract_tb(error.__traceback__)
        result["at"] = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(where))[:400]
        named = isinstance(error, OSError) and error.filename is not None
        result["expected"] = isinstance(error, EXPECTED) or named
    return result


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
            result = convert(source, arguments)
        except BaseException:
            result = {"status": "raised", "error": traceback.format_exc()[-2000:]}
        os.write(writing, json.dumps(result).encode()[:60_000])
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
    result = {"status": "killed after its time" if left <= 0 else f"died of signal {os.WTERMSIG(status)}"}
    before, _, said = data.partition(b"\n")
    with contextlib.suppress(ValueError):
        result = json.loads(said)
    return result | {"peak": (usage.ru_maxrss << 10) - int(before)}


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def faults_of(result: dict[str, object], before: list[str], after: list[str]) -> list[str]:
    """The faults of a conversion: a wrong status, error, memory or leftover."""
    faults = []
    status, peak = result["status"], result["peak"]
    if status not in (0, 2):
        faults.append(f"status {status}")
    if status == 2:
        text = str(result["error"])
        lines = [line for line in text.splitlines() if line.startswith("gids convert: ")]
        if len(lines) != 1 or not text.endswith(lines[0] + "\n") or len(lines[0]) > 2000:
            faults.append("not one line")
        if not result["expected"]:
            faults.append("unexpected class")
    is_resumable = "File too large" in str(result.get("error"))  # larger than the child may write
    if status != 0 and before != after and not is_resumable:
        faults.append(f"left behind {sorted(set(after) - set(before))[:5]}")
    strays = [path for path in set(after) - set(before) if not path.startswith("x.gids")]
    if strays:
        faults.append(f"wrote {strays[:5]}")
    if status == 0 and result["faults"]:
        faults.append("verify finds faults")
    if isinstance(peak, int) and peak > PEAK_BYTES:
        faults.append(f"peak of {peak >> 20} MiB")
    return faults


def judge(source: Path, arguments: tuple[str, ...], work: Path) -> dict[str, object]:
    """Convert a source, which is alone in a directory, and check the result and the directory."""

    def listed() -> list[str]:
        return sorted(str(p.relative_to(work)) for p in work.rglob("*"))

    before = listed()
    result = in_child(source, arguments)
    return {"faults": faults_of(result, before, listed()), **result}


def bind(path: Path) -> None:
    """Make a socket. Its path may be too long for bind()."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(path.name)
    finally:
        os.chdir(here)


def replace_file(rng: random.Random, path: Path) -> str:
    kind = rng.choice(REPLACEMENTS)
    if kind == "big":
        os.truncate(path, 3 << 30)
        return kind
    path.unlink()
    make = {"fifo": os.mkfifo, "socket": bind, "directory": Path.mkdir, "empty": Path.touch}
    make.get(kind, lambda p: p.symlink_to(p.name if kind == "link to itself" else kind))(path)
    return kind


def change_bytes(rng: random.Random, path: Path) -> str:
    """Cut, flip, insert or repeat bytes, or overwrite some with a large number."""
    data = bytearray(path.read_bytes())
    near = rng.choice([slice(0, None), slice(0, 300), slice(-300, None)])
    at = rng.choice(range(len(data))[near])
    kind = rng.choice(["cut", "flip", "flip", "insert", "repeat", "number", "number"])
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        data[at] = rng.randrange(256)
    elif kind == "insert":
        data[at:at] = rng.choice([rng.randbytes(8), b"\0" * 100, b"-", b"\n", b"1e999"])
    elif kind == "repeat":
        data[at:at] = data[at : at + rng.choice([10, 1000])] * rng.choice([1, 50])
    else:
        size = rng.choice([1, 2, 4, 8])
        value = rng.choice([-1, 0, 1, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62]) % (1 << 8 * size)
        at -= at % size
        data[at : at + size] = value.to_bytes(size, "little")
    path.write_bytes(data)
    return f"{kind} at {at}"


def convert_random(cases: range, seed: int, root: Path) -> collections.Counter[str]:
    """Convert damaged sources and print a line per failure. Returns the number of each outcome."""
    outcomes: collections.Counter[str] = collections.Counter()
    for case in cases:
        rng = random.Random(f"{seed} {case}")
        name = rng.choice(IN_THIS_PROCESS)
        work = root / f"case {case}"
        work.mkdir()
        written = drawn_sources.READERS[name][0](work, drawn_sources.draw(case, name))
        files = [p for p in written.path.rglob("*") if p.is_file()] or [written.path]
        file = rng.choice(sorted(files))
        change = replace_file if rng.random() < 0.15 else change_bytes
        changed = f"{file.name}: {change(rng, file)}"
        result = judge(written.path, written.options, work)
        failed = bool(result["faults"])
        outcomes["failed" if failed else "converted" if result["status"] == 0 else "refused"] += 1
        if failed:
            print(json.dumps({"case": case, "source": name, "changed": changed, **result}), flush=True)
        shutil.rmtree(work)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="number of sources to damage")
    parser.add_argument("--first", type=int, default=0, help="number of the first, to repeat it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--listed", type=Path, help="JSON file of sources to convert first")
    args = parser.parse_args()
    # Done once, so that no child does it again.
    torch.set_num_threads(1)  # a child would wait for threads that it does not have
    os.fsync = os.fdatasync = lambda _: None  # no case tests a power cut
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["convert", "--list"])  # imports every subcommand and every reader
    gc.collect()
    gc.freeze()  # so that collections in a child do not copy these pages
    if args.listed:
        for path, arguments in json.loads(args.listed.read_text()):
            print(json.dumps(judge(Path(path), tuple(arguments), Path(path).parent)), flush=True)
    readers.try_to_read = lambda *_: None
    with tempfile.TemporaryDirectory() as root:
        cases = range(args.first, args.first + args.cases)
        print(json.dumps(convert_random(cases, args.seed, Path(root))), flush=True)


if __name__ == "__main__":
    main()
