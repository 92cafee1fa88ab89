"""Kill every command that writes a dataset, at every call that changes a file, and look what is left.

    python tools/kill_writers                            # at every 5th call of every command
    python tools/kill_writers --every 1 --only "convert --stripe"

The commands are those of scenarios.py: convert, with and without --stripe, partition, heat and layerwise.

A command is killed (SIGKILL) when it makes its n-th call that creates, writes, syncs, renames or removes
something (of a write, half may be done). It is run again, and may be killed again. After each kill there must
be no dataset or a whole one (for heat: the old one or the new one); after the last run it must be there, with
the bytes of an undisturbed run, and nothing else may be left. A loss of power after n calls is simulated from
the log of an undisturbed run: what was not synced is gone, or has a name and zeros for data.

Needs a C++ compiler ($CXX or c++), glibc and Linux; no root. Exits with 1 and prints what went wrong when
anything did.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torture import Torture

LIBRARY = "GIDS_KILL_WRITERS"  # the environment variable that says that the library is preloaded
Job = Callable[[], None]


def points(calls: int, every: int, rng: random.Random) -> list[int]:
    """Every K-th of 1 … calls, from a random one on; at least one."""
    step = min(every, calls)
    first = rng.uniform(0, step)
    return [1 + int(first + step * i) for i in range(calls) if first + step * i < calls]


def jobs(torture: Torture, every: int, rng: random.Random) -> Iterator[tuple[str, Job]]:
    """What is tried on one command, each by its name."""
    for at in points(torture.calls, every, rng):
        yield f"kill at {at}", partial(torture.kill, at)
    for at in points(torture.calls, every, rng):
        yield f"loss at {at}", partial(torture.lose_power, at, rng.random() < 0.5)


def _fast_directory() -> Path:
    """A file system in memory, where there is one: a sync takes no time there, and none is needed."""
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
    text = "kill, and lose power, at every K-th call, and at least once per command (default: 5)"
    add("--every", type=int, default=5, metavar="K", help=text)
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
    return torture_all(args, parser)


def torture_all(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Kill and compare. Imports here what the process that compiles the library does not need."""
    import numpy.random  # noqa: F401 (so that no child imports it)
    import torch
    from scenarios import SCENARIOS, make_sources
    from torture import Failed, Torture, in_child

    from gids import cli

    titles = [title for title in SCENARIOS if args.only in title]
    if not titles:
        parser.error(f"--only {args.only!r}: no such command; there are {', '.join(SCENARIOS)}")
    torch.set_num_threads(1)
    cli._parser()  # so that no child imports every command
    gc.freeze()
    rng = random.Random(args.seed)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kill-writers-", dir=args.dir) as folder:
        root = Path(folder)
        status, said = in_child(lambda: make_sources(root / "sources"), log=root / "said")
        if status:
            raise SystemExit(f"no sources: {said}")
        tortures = []
        for number, title in enumerate(titles):
            (root / str(number)).mkdir()
            (root / str(number) / "sources").symlink_to(root / "sources")
            tortures.append(Torture(title, root / str(number), rng))
        for torture in tortures:
            for what, job in jobs(torture, args.every, rng):
                try:
                    job()
                except Failed as failed:
                    torture.count.faults.append(f"{what}: {failed}")
            count = torture.count
            print(
                f"{torture.title}: {torture.calls} calls, {count.kills} kills, {count.losses} losses of power"
            )
            for fault in count.faults[:20]:
                print(f"    {fault}", flush=True)
    counts = [t.count for t in tortures]
    faults = sum(len(c.faults) for c in counts)
    done = f"{sum(c.kills for c in counts)} kills, {sum(c.losses for c in counts)} losses of power"
    print(f"{done}, {len(titles)} commands: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
