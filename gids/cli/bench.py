"""`gids bench QUESTION …`: measures what a machine, a cache size and a window give, before training is begun.

The questions are modules of gids.bench; this one reads the arguments, prints the table, writes JSON and PNG,
and keeps what was measured when the time is up or Ctrl-C comes.
"""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

QUESTIONS = {"bandwidth": "bandwidth", "epoch": "epoch", "hit-ratio": "hit_ratio", "sampling": "sampling"}
_INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure what a disk, a cache size and a window give",
        description="Measure, in minutes, what training would get of a disk, a cache size and a window.",
    )
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)
    for name, module_name in QUESTIONS.items():
        module = importlib.import_module(f"gids.bench.{module_name}")
        sub = questions.add_parser(
            name,
            help=module.HELP,
            description=f"Measure {module.HELP}.",
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        _add_common(sub)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of all random draws (default: 0)")
    add(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="measure all so often; medians and range (default: 1)",
    )
    add("--seconds", type=float, default=0, metavar="S", help="stop after so long with what was measured")
    add("--json", type=Path, metavar="FILE", help="write the figures, the machine and the command")
    add("--plot", type=Path, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    add("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from gids.bench.plot import require_matplotlib
    from gids.bench.report import Report
    from gids.bench.session import Session, TimeIsUp

    _check(args)
    if args.plot is not None:
        require_matplotlib()
    module = importlib.import_module(f"gids.bench.{QUESTIONS[args.question]}")
    report = Report(args.question, command=_command(), seed=args.seed, repeat=args.repeat)
    with Session(
        f"bench {args.question}", seconds=args.seconds, repeat=args.repeat, quiet=args.quiet
    ) as session:
        try:
            module.measure(args, session, report)
        except TimeIsUp:
            report.partial = "time"
        except KeyboardInterrupt:
            report.partial = "interrupted"
    _hand_over(args, module, report)
    return _INTERRUPTED if report.partial == "interrupted" else 0


def _check(args: argparse.Namespace) -> None:
    if args.repeat < 1:
        raise ValueError(f"--repeat {args.repeat}: give 1 or more")
    if not (args.seconds >= 0 and math.isfinite(args.seconds)):
        raise ValueError(f"--seconds {args.seconds}: give 0 (no bound) or more")
    for path in (args.json, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"no directory {path.absolute().parent} to write {path.name} in")


def _command() -> list[str]:
    return ["gids", *sys.argv[1:]]


def _hand_over(args: argparse.Namespace, module: Any, report: Any) -> None:
    """Print and write what there is."""
    measured = [figure for figure in report.figures if figure.values]
    try:
        if args.json is not None:
            report.write(args.json)
        if args.plot is not None and measured:
            module.plot(report, args.plot)
    except OSError:  # what was measured must not be lost with the file
        _print(module, report, measured)
        raise
    if report.partial is not None:
        reason = f"cut short by --seconds {args.seconds:g}" if report.partial == "time" else report.partial
        print(
            f"gids bench {report.question}: PARTIAL: {reason}; figures that are there: {len(measured)}",
            file=sys.stderr,
        )
    if args.quiet:
        return
    _print(module, report, measured)
    if args.json is not None:
        print(f"written: {args.json}")
    if args.plot is not None and measured:
        print(f"drawn: {args.plot}")


def _print(module: Any, report: Any, measured: list[Any]) -> None:
    from gids.bench.text import table

    settings, columns = module.columns(report)
    for line in subject_lines(report):
        print(line)
    if measured:
        print("\n" + table(report.figures, settings, columns) + "\n")
    for sentence in report.answers:
        print(textwrap.fill(sentence, 110, subsequent_indent="  "))
    for sentence in report.notes:
        print(textwrap.fill(f"note: {sentence}", 110, subsequent_indent="  "))


def subject_lines(report: Any) -> list[str]:
    """What was measured, in lines of words."""
    parts = [f"{key.replace('_', ' ')} {_word(value)}" for key, value in report.subject.items()]
    repeat = max((len(v) for figure in report.figures for v in figure.values.values()), default=0)
    repeats = f", {repeat} repeats: medians (range)" if repeat > 1 else ""
    return textwrap.wrap("; ".join([*parts, f"seed {report.seed}{repeats}"]), 110)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return shlex.quote(str(value))
