"""`gids bench bandwidth --memory-limit`: the measurement in a new process with bounded memory.

Called by bandwidth.py, which also runs in that process. The limit includes the page cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gids.bench.report import Figure, Report
from gids.bench.session import Session, TimeIsUp
from gids.measure.isolation import FreshProcessError, FreshProcessOutOfMemory, run_fresh, serve
from gids.measure.memory_group import MemoryGroup
from gids.measure.sides import why_no_limit

_LISTS = ("notes", "notes_above", "series", "answers")


def measure_limited(args: argparse.Namespace, session: Session, report: Report) -> None:
    """Run bandwidth.measure(args, …) in a memory control group. Blocks.

    Raises OSError if memory cannot be limited, FreshProcessError if the process fails.
    """
    if reason := why_no_limit():
        raise OSError(f"--memory-limit cannot limit memory here: {reason}; try as root")
    left_s = session.left_s()
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    values |= {"seconds": left_s if args.seconds else 0, "in_group": True}
    try:
        with MemoryGroup("gids-bench") as group:
            found = run_fresh("gids.bench.limited", values, group=group, timeout_s=24 * 3600)
    except FreshProcessOutOfMemory as error:
        cure = "give a larger --memory-limit, or a smaller --cache or --batch-size"
        raise FreshProcessError(f"the measurement {error.reason}: {cure}") from error
    except FreshProcessError as error:
        raise FreshProcessError(f"the measurement {error.reason}") from error
    report.subject.update(found["subject"])
    report.partial = found["partial"]
    for name in _LISTS:
        getattr(report, name).extend(found[name])
    report.figures.extend(Figure(setting, metrics) for setting, metrics in found["figures"])


def _work(config: dict[str, Any]) -> dict[str, Any]:
    from gids.bench import bandwidth

    args = argparse.Namespace(**config)
    report = Report("bandwidth", command=[], seed=args.seed, repeat=args.repeat)
    try:
        bandwidth.measure(args, Session(seconds=args.seconds, repeat=args.repeat), report)
    except TimeIsUp:
        report.partial = "time"
    figures = [(dict(figure.setting), figure.values) for figure in report.figures]
    return {
        "subject": report.subject,
        "partial": report.partial,
        "figures": figures,
        **{name: getattr(report, name) for name in _LISTS},
    }


if __name__ == "__main__":
    sys.exit(serve(_work))
