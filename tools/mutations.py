#!/usr/bin/env python3
"""Puts each fault of mutations.toml into the code and runs the tests: how many faults do they notice?

Run it in a clean clone with an editable installation (CONTRIBUTING.md): native code is then built again for
each fault that is in it. Prints a line for each fault, then the sum. Exits with 1 if one goes unnoticed.

    python tools/mutations.py                 # the test that noticed it last, those near it, all default ones
    python tools/mutations.py -m ""           # the slow tests too
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).with_suffix(".txt")
OF_THE_TABLE = "tests/test_docs.py::test_the_table_of_faults_is_of_the_present_code"  # notices every fault
BUILD = f"{sys.executable} -c 'import gids._core'"  # an editable installation builds what changed


def last_tests() -> dict[str, str]:
    """The functions that noticed faults at the last run, by the faults' descriptions."""
    lines = re.findall(r"^\S+ +(.*?): (tests/(\S+)\.py::\w+)", RESULTS.read_text(), re.MULTILINE)
    return {what: test for what, test, file in lines if (ROOT / f"tests/{file}.py").exists()}


def noticing_test(paths: list[str], options: list[str]) -> str | None:
    """The first test that fails; None if all pass, or if there is none."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--deselect", OF_THE_TABLE]
    run = subprocess.run([*pytest, *options, *paths], cwd=ROOT, capture_output=True, text=True)
    failures = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode in (0, 4, 5):  # 4: no such test, 5: none is left
        return None
    lines = (run.stdout + run.stderr).strip().splitlines()
    return [*failures, *lines[-1:], f"pytest ended with {run.returncode}"][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", dest="marks", help="tests to run, as pytest's option")
    parser.add_argument("--only", help="faults whose description or file has this text")
    parser.add_argument(
        "--build", default=BUILD, help="shell command that builds native code (default: %(default)s)"
    )
    args = parser.parse_args()
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True).stdout:
        print("the checkout has changes: use a clean clone", file=sys.stderr)
        return 2
    options = [] if args.marks is None else ["-m", args.marks]
    mutations = tomllib.loads(FAULTS.read_text())["mutation"]
    mutations = [m for m in mutations if not args.only or args.only in m["what"] + m["file"]]
    if outdated := [m for m in mutations if m["old"] not in (ROOT / m["file"]).read_text()]:
        for mutation in outdated:
            print(
                f"{mutation['file']} has no {mutation['old']!r}: bring mutations.toml up to date",
                file=sys.stderr,
            )
        return 2
    last, noticed = last_tests(), 0
    for mutation in mutations:
        path, begin = ROOT / mutation["file"], time.monotonic()
        text = path.read_text()
        path.write_text(text.replace(mutation["old"], mutation["new"]))
        try:
            subprocess.run(args.build, shell=True, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            places = [["-n", "0", last[mutation["what"]]]] if mutation["what"] in last else []
            places += [mutation["tests"], []]
            test = next(filter(None, (noticing_test(paths, options) for paths in places)), None)
        finally:
            path.write_text(text)
        noticed += test is not None
        seconds = time.monotonic() - begin
        print(
            f"{mutation['file']:40} {mutation['what']}: {test or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True
        )
    print(f"{noticed} of {len(mutations)} faults were noticed")
    return int(noticed < len(mutations))


if __name__ == "__main__":
    sys.exit(main())
