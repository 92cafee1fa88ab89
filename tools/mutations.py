#!/usr/bin/env python3
"""Puts each fault of mutations.toml into the code and runs the tests: how many faults do they notice?

Run it in a clean clone with an editable installation (CONTRIBUTING.md): native code is then built again for
each fault that is in it. Prints a line for each fault, then the sum. Exits with 1 if one goes unnoticed.

    python tools/mutations.py                 # the tests near each fault, then the default ones
    python tools/mutations.py -m ""           # the slow tests too
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".toml")


def notices(paths: list[str], options: list[str]) -> str | None:
    """The first test that fails; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *options]
    run = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True)
    if run.returncode == 0:
        return None
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1] if failed else (run.stdout + run.stderr).strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", dest="marks", help="tests to run, as pytest's option")
    parser.add_argument("--only", help="faults whose description or file has this text")
    given = parser.parse_args()
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    if changed:
        print("the checkout has changes: use a clean clone", file=sys.stderr)
        return 2
    options = [] if given.marks is None else ["-m", given.marks]
    mutations = tomllib.loads(LIST.read_text())["mutation"]
    mutations = [m for m in mutations if not given.only or given.only in m["what"] + m["file"]]
    noticed = 0
    for mutation in mutations:
        path, begun = ROOT / mutation["file"], time.monotonic()
        text = path.read_text()
        if mutation["old"] not in text:
            print(
                f"{mutation['file']} has no {mutation['old']!r}: bring mutations.toml up to date",
                file=sys.stderr,
            )
            return 2
        path.write_text(text.replace(mutation["old"], mutation["new"]))
        try:
            subprocess.run([sys.executable, "-c", "import gids._core"], cwd=ROOT, check=True)  # it compiles
            test = notices(mutation["tests"], options) or notices([], options)
        finally:
            path.write_text(text)
        noticed += test is not None
        seconds = time.monotonic() - begun
        print(
            f"{mutation['file']:40} {mutation['what']}: {test or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True
        )
    print(f"{noticed} of {len(mutations)} faults were noticed")
    return int(noticed < len(mutations))


if __name__ == "__main__":
    sys.exit(main())
