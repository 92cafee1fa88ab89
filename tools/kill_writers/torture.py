"""Kills one command again and again, and compares what is left with what an undisturbed run leaves."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disk import Call, Disk
from scenarios import SCENARIOS, Place, Step, prepare, state

TIMEOUT_S = 120  # of one command
KILLED = -signal.SIGKILL


@dataclass
class Count:
    """What happened to one command."""

    kills: int = 0
    losses: int = 0
    faults: list[str] = field(default_factory=list)


class Failed(Exception):
    """A dataset was lost, or something else that must not be; in one line."""


def in_child(work: Callable[[], Any], *, log: Path, arm: Callable[[], None] | None = None) -> tuple[int, Any]:
    """Run work() in a forked process: (exit status, or minus the signal; its result, which must be JSON).

    log: a file for what it prints. arm: is called in that process first.
    """
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
        self._old = self._state()
        self._trace = self._undisturbed(self.scenario.command)
        self.calls = len(self._trace)
        self._new, self._new_files = self._state(), self._files()
        self._last, self._last_files, self.then_calls = self._new, self._new_files, self.calls
        if self.scenario.then is not None:
            self.then_calls = len(self._undisturbed(self.scenario.then))
            self._last, self._last_files = self._state(), self._files()
        for name in (self._new, self._last, *([self._old] if self.scenario.before else [])):
            if name == "nothing" or name.startswith("fault"):
                raise Failed(f"{title}: undisturbed it leaves {name}")

    def kill(self, at: int) -> None:
        """Kill the command at a call, and perhaps the runs after it; compare each time."""
        self._restore()
        when, seen = f"after a kill at call {at}", 0  # seen: how far along old, new, last
        step, again = self.scenario.command, self.scenario.then or self.scenario.command
        for number in range(self.scenario.kills):
            if not self._is_killed(when, step, at, seen):
                break
            self.count.kills += 1
            seen = self._check_state(f"kill {number + 1} at call {at}", seen)
            step, at = again, self._rng.randint(1, 2 * self.then_calls)
        else:
            self._is_killed(when, again, 0, seen)
        self._compare(when)

    def lose_power(self, at: int, names: bool) -> None:
        """Simulate a loss of power after a number of calls; names: see Disk.write_survivors."""
        disk = self._disk()
        for call in self._trace[:at]:
            disk.apply(call)
        shutil.rmtree(self._place.work)
        disk.write_survivors(self._place.work, names=names)
        what = f"a loss of power after {at} calls ({'names stay' if names else 'names go, too'})"
        self.count.losses += 1
        seen = self._check_state(what, 0)
        self._is_killed(f"after {what}", self.scenario.then or self.scenario.command, 0, seen)
        self._compare(f"after {what}")

    def _undisturbed(self, step: Step) -> list[Call]:
        """Run a command to its end; the calls that it made."""
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
        return trace

    def _disk(self) -> Disk:
        """A disk that holds what is there before the command."""
        return Disk(self._place.work, self._template)

    def _run(self, step: Step, at: int = 0, log: Path | None = None) -> tuple[int, Any]:
        half = self._rng.random() < 0.5

        def arm() -> None:
            log_fd = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            directory = os.fsencode(self._place.work)
            ctypes.CDLL(None).kill_writers_arm(directory, ctypes.c_long(at), half, log_fd)

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
        if found == "nothing" and self._old == "nothing" and not seen:
            return seen
        if found not in states[seen:]:
            raise Failed(f"{when}: {found}, not {' or '.join(states[seen:])} (old, new, last)")
        return max(seen, states.index(found))

    def _is_killed(self, when: str, step: Step, at: int, seen: int) -> bool:
        """Run a command; whether it was killed. Raises Failed when it ended otherwise than it should."""
        status, said = self._run(step, at)
        if at and status == KILLED:
            return True
        is_refused = str(said).startswith(FileExistsError.__name__)
        if status and not (seen > 0 and is_refused and not self.scenario.changes):
            raise Failed(f"{when}: run again, it ended with {status}: {said}")
        return False

    def _compare(self, when: str) -> None:
        """Raise Failed unless what is there is what an undisturbed run leaves.

        It is that of the first command, if that was through and another one was refused.
        """
        found = self._state()
        wanted, wanted_files = self._last, self._last_files
        if found == self._new and not self.scenario.changes:
            wanted, wanted_files = self._new, self._new_files
        if found != wanted:
            raise Failed(f"{when}: run again, it leaves {found}, not {wanted}")
        files = self._files()
        if files != wanted_files:
            lost = sorted(wanted_files.keys() - files.keys())
            left = sorted(files.keys() - wanted_files.keys())
            other = sorted(n for n in files if wanted_files.get(n, files[n]) != files[n])
            raise Failed(f"{when}: run again, it lacks {lost}, leaves {left}, and has other bytes in {other}")

    def _everything(self) -> dict[str, bytes]:
        files = (p for p in sorted(self._place.work.rglob("*")) if p.is_file())
        return {str(p.relative_to(self._place.work)): p.read_bytes() for p in files}

    def _files(self) -> dict[str, str]:
        """A digest of every file, directories too, with a fixed text for what is random in names."""
        found: dict[str, str] = {}
        for path in sorted(self._place.work.rglob("*")):
            name = plain = _plain(str(path.relative_to(self._place.work)))
            while plain in found:  # two names that differ in what is random only
                plain += "+"
            data = path.read_bytes() if path.is_file() else b"a directory"
            if name.endswith("manifest.json"):
                data = re.sub(rb'"checksum": "crc32c:[0-9a-f]{8}"\n}', b"", _plain(data.decode()).encode())
            found[plain] = hashlib.sha256(data).hexdigest()
        return found


def _plain(text: str) -> str:
    """A text without the random parts of names."""
    text = re.sub(r"(\.shards-|\.)[0-9a-f]{8}(?=[/\"]|$)", r"\1X", text)
    return re.sub(r"-[0-9a-f]{8}(?=\.bin)|\.1(?=\.npy)", "", text)
