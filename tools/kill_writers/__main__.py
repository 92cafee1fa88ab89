"""End every command that writes a dataset at every call that changes a file: is the old dataset there, or the new?

    python tools/kill_writers                       # a kill at every 5th call of every command
    python tools/kill_writers --every 1 --only restripe
    python tools/kill_writers --kills 500 --losses 500

A command is killed (SIGKILL) when it makes its n-th call that creates, writes, syncs, renames or removes
something (of a write, half may be done), and run again, where it may be killed again. After each kill the
dataset must be whole, the old one or the new one; after the last run it must be the new one, with the bytes of
an undisturbed run, and nothing else may be left. A loss of power at the n-th call is simulated from the log of
an undisturbed run: what was not synced is gone, or has a name and zeros for data. Last, the log itself is
checked: everything new is synced before it is published, and nothing old goes before that is durable.

Needs a C++ compiler ($CXX or c++), glibc and Linux; no root. Exits with 1 and prints what went wrong when
anything did.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from disk import Call, Disk
from scenarios import SCENARIOS, Place, Scenario, Step, make_sources, prepare, shards, state

LIBRARY = "GIDS_KILL_WRITERS"  # the environment variable that says that the library is preloaded
TIMEOUT_S = 120  # of one command
KILLED = -signal.SIGKILL


@dataclass
class Count:
    """What happened to one command."""

    calls: int = 0
    kills: int = 0
    losses: int = 0
    old: int = 0
    new: int = 0
    nothing: int = 0
    faults: list[str] = field(default_factory=list)


class Failed(Exception):
    """A dataset was lost, or something else that must not be; in one line."""


def in_child(work: Callable[[], Any], *, log: Path, arm: Callable[[], None] | None = None) -> tuple[int, Any]:
    """(exit status, or minus the signal; result as JSON) of work() in a forked process. log: of what it says."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    if not (pid := os.fork()):
        status = 1
        with contextlib.suppress(BaseException):
            os.close(reader)
            said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(said, 1)
            os.dup2(said, 2)
            signal.alarm(TIMEOUT_S)
            try:
                if arm is not None:
                    arm()
                os.write(writer, json.dumps(work()).encode())
                status = 0
            except BaseException as error:
                os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(data) if data else None


class Torture:
    """Kills one scenario again and again.

    Attributes: calls (how many the command makes), then_calls (how many what runs after it makes); count.
    """

    def __init__(self, title: str, root: Path, rng: random.Random) -> None:
        self.title, self.scenario = title, SCENARIOS[title]
        self._root, self._rng = root, rng
        self._place = Place(root / "work", root / "sources")
        self._template = root / "template"
        self.count = Count()
        shutil.rmtree(self._template, ignore_errors=True)
        prepare(self._place)
        for step in self.scenario.before:
            self._must(step)
        shutil.copytree(self._place.work, self._template)
        self._old, self._old_files = self._state(), self._files()
        self._trace, self._new_paths = self._undisturbed(self.scenario.command)
        self.calls = self.count.calls = len(self._trace)
        self._new, self._new_files = self._state(), self._files()
        self._last, self._last_files, self.then_calls = self._new, self._new_files, self.calls
        if self.scenario.then is not None:
            self.then_calls = len(self._undisturbed(self.scenario.then)[0])
            self._last, self._last_files = self._state(), self._files()
        for name in (self._new, self._last, *([self._old] if self.scenario.replaces else [])):
            if name == "nothing" or name.startswith("fault"):
                raise Failed(f"{title}: undisturbed it leaves {name}")

    def kill(self, at: int) -> None:
        """Kill the command at a call, and perhaps the runs after it; compare each time."""
        self._restore()
        first, seen = at, 0  # seen: how far along old, new, last
        step, again = self.scenario.command, self.scenario.then or self.scenario.command
        status, said = KILLED, None
        for number in range(self.scenario.kills):
            status, said = self._run(step, at)
            if status != KILLED:
                break
            self.count.kills += 1
            seen = self._check_state(f"kill {number + 1} at call {at}", seen)
            step, at = again, self._rng.randint(1, 2 * self.then_calls)
        if status == KILLED or step is not again:
            status, said = self._run(again)
        self._check_end(f"after a kill at call {first}", status, said, seen)

    def lose_power(self, at: int, names: bool) -> None:
        """Simulate a loss of power after a number of calls; names: see Disk.write_survivors."""
        disk = self._replay(at)
        shutil.rmtree(self._place.work)
        disk.write_survivors(self._place.work, names=names)
        what = f"a loss of power after {at} calls ({'names stay' if names else 'names go, too'})"
        self.count.losses += 1
        seen = self._check_state(what, 0)
        status, said = self._run(self.scenario.then or self.scenario.command)
        self._check_end(f"after {what}", status, said, seen)

    def check_order(self) -> None:
        """Check the log of an undisturbed run: what is synced when."""
        dataset, manifest = str(self._place.dataset), f"{self._place.dataset}/manifest.json"
        work, before = self._place.work, self._template
        old = {str(work / p.relative_to(before)) for p in before.rglob("*") if p.is_file()}
        disk = self._disk()
        published: dict[str, Any] = {}  # what was published at a name, and is not known to survive there
        for number, call in enumerate(self._trace, 1):
            where = f"call {number} ({call.name} {call.path})"
            is_publishing = call.name in ("rename", "exchange") and call.second in (dataset, manifest)
            if is_publishing:
                for lost in self._not_synced(disk, call):
                    raise Failed(f"{where} publishes before {lost} is synced")
            elif call.name in ("unlink", "rmdir", "rename", "exchange", "write", "truncate"):
                for name, node in published.items():
                    if disk.at(name) is node and not disk.survives(name):
                        raise Failed(f"{where} comes before the new name {name} is synced")
                touched = {call.path, call.second} & old
                if touched and not published and not self._sets_aside(call):
                    raise Failed(f"{where} changes old data before the new is published")
            disk.apply(call)
            if is_publishing:
                published[call.second] = disk.at(call.second)
        if not published:
            raise Failed("it never published")
        for name in published:
            if not disk.survives(name):
                raise Failed(f"it ended before the name {name} was synced")

    def _sets_aside(self, call: Call) -> bool:
        """Whether a call only gives the old dataset another name, as is done without an exchange."""
        return self.scenario.old_kernel and call.name == "rename" and call.path == str(self._place.dataset)

    def _not_synced(self, disk: Disk, call: Call) -> Iterator[str]:
        """What the dataset that is being published has, and a loss of power would take."""
        source = call.path
        if call.second.endswith("manifest.json"):
            for path in self._new_paths:
                if path.startswith(f"{self._place.dataset}/") and path != call.second:
                    yield from disk.not_synced(path)
        for lost in disk.not_synced(source):
            if lost != f"the name {source}":
                yield lost
        for path in self._new_paths:
            if not path.startswith(f"{self._place.dataset}/"):
                yield from disk.not_synced(path)

    def _undisturbed(self, step: Step) -> tuple[list[Call], list[str]]:
        """Run a command to its end; the calls that it made, and the files of the dataset that there is then."""
        self._restore()
        log = self._root / "calls"
        log.unlink(missing_ok=True)
        status, said = self._run(step, log=log)
        if status:
            raise Failed(f"{self.title}: undisturbed it ended with {status}: {said}")
        trace = [Call.parse(line) for line in log.read_text().splitlines()]
        disk, found = self._disk(), self._everything()
        for call in trace:
            disk.apply(call)
        if disk.contents() != found:
            wrong = sorted(n for n in {*found, *disk.contents()} if found.get(n) != disk.contents().get(n))
            raise Failed(f"{self.title}: calls were not seen, of {wrong}")
        return trace, self._shard_paths() + self._dataset_paths()

    def _replay(self, calls: int) -> Disk:
        disk = self._disk()
        for call in self._trace[:calls]:
            disk.apply(call)
        return disk

    def _disk(self) -> Disk:
        """A disk that holds what is there before the command."""
        return Disk(self._place.work, self._template)

    def _run(self, step: Step, at: int = 0, log: Path | None = None) -> tuple[int, Any]:
        half = self._rng.random() < 0.5

        def arm() -> None:
            log_fd = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            directory = os.fsencode(self._place.work)
            ctypes.CDLL(None).kill_writers_arm(
                directory, ctypes.c_long(at), half, self.scenario.old_kernel, log_fd
            )

        status, said = in_child(lambda: step(self._place), log=self._root / "said", arm=arm)
        if status not in (0, KILLED) and not said:
            said = (self._root / "said").read_text()[-400:]
        return status, said

    def _must(self, step: Step) -> None:
        status, said = in_child(lambda: step(self._place), log=self._root / "said")
        if status:
            raise Failed(f"{self.title}: making what is there ended with {status}: {said}")

    def _restore(self) -> None:
        shutil.rmtree(self._place.work, ignore_errors=True)
        shutil.copytree(self._template, self._place.work)

    def _state(self) -> str:
        status, found = in_child(lambda: state(self._place), log=self._root / "said")
        return str(found) if not status else f"fault: it cannot be read: {found}"

    def _check_state(self, when: str, seen: int) -> int:
        found = self._state()
        states = [self._old, self._new, self._last]
        if found == "nothing" and (self.scenario.old_kernel or (self._old == "nothing" and not seen)):
            self.count.nothing += 1
            return seen
        if found not in states[seen:]:
            raise Failed(f"{when}: {found}, not {' or '.join(states[seen:])} (old, new, last)")
        after = max(seen, states.index(found))
        self.count.new += after > 0
        self.count.old += after == 0
        return after

    def _check_end(self, when: str, status: int, said: Any, seen: int) -> None:
        done = self.scenario.done
        if status and not (seen and done is not None and str(said).startswith(done.__name__)):
            raise Failed(f"{when}: the command, run again, ended with {status}: {said}")
        found = self._state()
        if found != self._last:
            raise Failed(f"{when}: run again, it leaves {found}, not {self._last}")
        files = self._files()
        if files != self._last_files:
            lost = sorted(self._last_files.keys() - files.keys())
            left = sorted(files.keys() - self._last_files.keys())
            other = sorted(n for n in files if self._last_files.get(n, files[n]) != files[n])
            raise Failed(f"{when}: run again, it lacks {lost}, leaves {left}, and has other bytes in {other}")

    def _everything(self) -> dict[str, bytes]:
        files = (p for p in sorted(self._place.work.rglob("*")) if p.is_file())
        return {str(p.relative_to(self._place.work)): p.read_bytes() for p in files}

    def _files(self) -> dict[str, str]:
        """A digest of every file, directories too, with a fixed text for what is random in names."""
        found = {}
        for path in sorted(self._place.work.rglob("*")):
            name = str(path.relative_to(self._place.work))
            data = path.read_bytes() if path.is_file() else b"a directory"
            if name.endswith("manifest.json"):
                data = re.sub(rb'"checksum": "crc32c:[0-9a-f]{8}"\n}', b"", _plain(data.decode()).encode())
            found[_plain(name)] = hashlib.sha256(data).hexdigest()
        return found

    def _shard_paths(self) -> list[str]:
        return list(in_child(lambda: [str(p) for p in shards(self._place)], log=self._root / "said")[1])

    def _dataset_paths(self) -> list[str]:
        return [str(p) for p in self._place.dataset.rglob("*") if p.is_file()]


def _plain(text: str) -> str:
    """A text without the random parts of names."""
    text = re.sub(r"(\.shards-|\.)[0-9a-f]{8}(?=[/\"]|$)", r"\1X", text)
    return re.sub(r"-[0-9a-f]{8}(?=\.bin)|\.1(?=\.npy)", "", text)


def points(calls: int, wanted: float, rng: random.Random) -> list[int]:
    """About so many of 1 … calls, evenly spread, from a random one on."""
    step = max(1.0, calls / max(wanted, 1e-9))
    first = rng.uniform(0, step)
    return [1 + int(first + step * i) for i in range(int(calls / step) + 1) if int(first + step * i) < calls]


def tortured(tortures: list[Torture], kills: int | None, losses: int | None, every: int, rng: random.Random) -> bool:
    """Kill all scenarios, print a line for each; whether nothing went wrong."""
    total = sum(t.calls for t in tortures)
    good = True
    print(f"{'command':<50} {'calls':>6} {'kills':>6} {'losses':>6} {'old':>5} {'new':>5} {'none':>5} faults")
    for torture in tortures:
        count, share = torture.count, torture.calls / total
        wanted = (kills * share if kills is not None else torture.calls / every) / 1.5  # some are killed twice
        jobs: list[tuple[str, Callable[[], None]]] = [("order of syncs", torture.check_order)]
        jobs += [(f"kill at {at}", lambda at=at: torture.kill(at)) for at in points(torture.calls, wanted, rng)]  # type: ignore[misc]
        wanted = losses * share if losses is not None else torture.calls / every
        for at in points(torture.calls, wanted, rng):
            names = rng.random() < 0.5
            jobs.append((f"loss at {at}", lambda at=at, names=names: torture.lose_power(at, names)))  # type: ignore[misc]
        for what, job in jobs:
            try:
                job()
            except Failed as failed:
                count.faults.append(f"{what}: {failed}")
        numbers = (count.calls, count.kills, count.losses, count.old, count.new, count.nothing)
        print(f"{torture.title:<50} " + " ".join(f"{n:>{w}}" for n, w in zip(numbers, (6, 6, 6, 5, 5, 5), strict=True)) + f" {len(count.faults)}", flush=True)
        for fault in count.faults[:20]:
            print(f"    {fault}", flush=True)
        good = good and not count.faults
    return good


def _fast_directory() -> Path:
    """Memory, where there is a file system of it: syncs take no time there, and power is lost in a simulation."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def build(folder: Path) -> Path:
    """Compile the library that is preloaded."""
    library = folder / "calls.so"
    compiler = os.environ.get("CXX", "c++")
    source = Path(__file__).with_name("calls.cpp")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="kill_writers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, metavar="N", help="about how many kills in all (default: see --every)")
    add("--losses", type=int, metavar="N", help="about how many losses of power in all (default: see --every)")
    add("--every", type=int, default=5, metavar="K", help="kill at every K-th call (default: 5)")
    add("--only", metavar="TEXT", default="", help="commands whose title contains TEXT")
    add("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of what is drawn")
    add("--dir", type=Path, default=_fast_directory(), help="where to work (default: %(default)s)")
    args = parser.parse_args()
    if LIBRARY not in os.environ:  # once more, with the library
        with tempfile.TemporaryDirectory(prefix="kill-writers-", dir=args.dir) as folder:
            library = build(Path(folder))
            environment = {**os.environ, LIBRARY: str(library), "LD_PRELOAD": str(library)}
            return subprocess.run(
                [sys.executable, *sys.orig_argv[1:]], env=environment, check=False
            ).returncode
    titles = [title for title in SCENARIOS if args.only in title]
    if not titles:
        parser.error(f"--only {args.only!r}: no such command; there are {', '.join(SCENARIOS)}")
    torch.set_num_threads(1)
    gc.freeze()
    rng = random.Random(args.seed)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kill-writers-", dir=args.dir) as folder:
        root = Path(folder)
        make_sources(root / "sources")
        tortures = []
        for number, title in enumerate(titles):
            (root / str(number)).mkdir()
            (root / str(number) / "sources").symlink_to(root / "sources")
            tortures.append(Torture(title, root / str(number), rng))
        good = tortured(tortures, args.kills, args.losses, args.every, rng)
        counts = [t.count for t in tortures]
        lost = sum(len(c.faults) for c in counts)
        kills, losses = sum(c.kills for c in counts), sum(c.losses for c in counts)
        print(f"{kills} kills, {losses} losses of power, {len(titles)} commands: {lost} faults")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
