"""fio's opinion of a disk: random reads of pages, where fio is installed. Called by bandwidth.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence

_GROUPS = ["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=16", "--iodepth_batch_complete_max=256"]


def fio_reads_per_s(
    paths: Sequence[str | os.PathLike[str]],
    *,
    page_bytes: int,
    depth: int,
    seconds: float,
    passes: int = 1,
    seed: int = 0,
) -> float | None:
    """Random pages per second, past the page cache, each once in a pass; None without fio or if it fails.

    Blocks for at most so many seconds and a little. Reads only.
    """
    fio = shutil.which("fio")
    names = [os.fspath(path) for path in paths]
    if fio is None or any(":" in name for name in names):  # fio splits names there
        return None
    command = [
        fio,
        "--name=random",
        "--rw=randread",
        "--readonly",
        "--ioengine=io_uring",
        "--direct=1",
        "--thread",
        "--fixedbufs=1",
        "--registerfiles=1",
        "--gtod_reduce=1",
        "--output-format=json",
        f"--bs={page_bytes}",
        f"--iodepth={depth}",
        f"--runtime={max(1, round(seconds))}",
        f"--loops={passes}",
        f"--randseed={seed + 1}",
        f"--filename={':'.join(names)}",
        *(_GROUPS if depth >= 32 else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30)
        read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
        return float(read["total_ios"]) / (float(read["runtime"]) * 1e-3) if read["runtime"] else None
    except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired):
        return None
