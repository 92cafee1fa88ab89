"""Runs every loader as numbers draw it, and compares each row with the dataset: see tests/torture.

    python tools/torture.py --seconds 600            # as many scenarios as fit; --ranks: of two processes
    python tools/torture.py --first 17 --count 1     # this one
    python tools/torture.py --gpu --seconds 60       # those on a device, on the GPU

They run in a process of its own, which may die or hang. Prints each failure with its scenario, and counts.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "graphbolt"), str(TESTS / "torture")]

import emulator  # noqa: E402
import torch  # noqa: E402
from rank_pool import RankPool  # noqa: E402
from torture_run import opened_data, torture, torture_ranks  # noqa: E402
from torture_scenario import draw  # noqa: E402

SLOW_S, HANGS_S = 8.0, 90.0


def _child(first: int, last: int, folder: Path, ranks: bool, gpu: bool) -> None:
    """Run scenarios; print a line of JSON for each."""
    emulator.folder = folder / "emulator"
    emulator.folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=folder) as made, opened_data(Path(made)) as data:
        gc.freeze()  # gc.collect() is fast then
        pool = RankPool(2) if ranks else None
        for number in range(first, last):
            if gpu and all(r.device != "cuda" for r in (draw(number).reading, draw(number).other)):
                print(json.dumps({"ends": number, "skipped": True}), flush=True)
                continue
            print(json.dumps({"begins": number}), flush=True)
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            begun, told = time.monotonic(), {}
            try:
                told["done"] = (
                    torture(number, data, gpu=gpu) if pool is None else torture_ranks(number, data, pool)
                )
            except BaseException as error:
                told["error"] = "".join(traceback.format_exception(error))
                told["brief"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps({"ends": number, "seconds": time.monotonic() - begun, **told}), flush=True)
            if pool is not None and not all(process.is_alive() for process in pool.processes):
                return  # a rank has died


def main() -> int:
    parser = argparse.ArgumentParser(description="draw scenarios and run them, in a process that may die")
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--count", type=int, default=1 << 30, help="number of scenarios")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no scenario after this time")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gids-torture")
    parser.add_argument("--ranks", action="store_true", help="scenarios of two processes")
    parser.add_argument("--gpu", action="store_true", help="scenarios on a device, on the GPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ranks and given.gpu:
        parser.error("scenarios of two processes are on the CPU")
    given.folder.mkdir(exist_ok=True)
    number, last = given.first, given.first + given.count
    if given.child:
        _child(number, last, given.folder, given.ranks, given.gpu)
        return 0
    done: Counter[str] = Counter()
    end, failed, skipped = time.monotonic() + given.seconds, 0, 0
    while number < last and time.monotonic() < end:
        command = [sys.executable, __file__, "--child", "--first", str(number), "--count", str(last - number)]
        command += ["--folder", str(given.folder)]
        command += [f"--{name}" for name in ("ranks", "gpu") if getattr(given, name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            assert child.stdout is not None
            noise, running, told = list[str](), False, {}
            for line in child.stdout:
                if not line.startswith("{"):
                    noise.append(line)
                    continue
                told = json.loads(line)
                running = "begins" in told
                if running:
                    number, noise = told["begins"], []
                    continue
                if "skipped" in told:
                    number, skipped = number + 1, skipped + 1
                    continue
                done.update(told.get("done", {}))
                if told["seconds"] > SLOW_S:
                    print(f"{number} took {told['seconds']:.0f} s", flush=True)
                if "error" in told:
                    failed += 1
                    print(f"--- {number}: {told['brief']}\n{told['error']}", flush=True)
                number += 1
                if time.monotonic() > end:
                    child.kill()
                    break
            else:
                child.wait()
        if not told:
            print(*noise, "the process ended before its first scenario", sep="\n")
            return 1
        if running and time.monotonic() < end:
            failed += 1
            print(f"--- {number}: the process died ({child.returncode})", flush=True)
            print(draw(number, ranks=given.ranks), *noise, sep="\n", flush=True)
            number += 1
    print(f"{number - given.first - skipped} scenarios, {failed} failed")
    for name, count in sorted(done.items()):
        print(f"{name}: {count}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
