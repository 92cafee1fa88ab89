"""`gids bench QUESTION …`: measures a disk, a cache size and a window before training.

Each question is a module of gids.bench. This module parses the arguments, prints the table and writes JSON.
After Ctrl-C, or when the time is up, it reports what was measured so far.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

from gids.bench.arguments import adder, natural, positive, seconds

QUESTIONS = {"bandwidth": "bandwidth", "epoch": "epoch", "hit-ratio": "hit_ratio", "sampling": "sampling"}
_INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a disk, a cache size and a window",
        description="Measure in minutes how a disk, a cache size and a window affect training.",
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
    option = adder(parser)
    option("--seed", natural, "random seed", 0, "N")
    option("--repeat", positive, "repeat each measurement N times; report the median and the range", 1, "N")
    option(
        "--seconds",
        seconds,
        "stop after about S seconds and report what was measured so far (default: 0, no limit)",
        0,
        "S",
    )
    option("--json", Path, "write the results, the machine and the command to FILE", metavar="FILE")
    option("--plot", Path, "draw the results to FILE, as PNG", metavar="FILE")
    add("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from gids.bench.report import Report, check_writable
    from gids.bench.session import Session, TimeIsUp
    from gids.cli.progress import Progress

    for path in (args.json, args.plot):
        if path is not None:
            check_writable(path)
    if args.plot is not None:
        from gids.bench.plot import check_plotting

        check_plotting()
    module = importlib.import_module(f"gids.bench.{QUESTIONS[args.question]}")
    report = Report(args.question, command=["gids", *sys.argv[1:]], seed=args.seed, repeat=args.repeat)
    with Progress(f"bench {args.question}", quiet=args.quiet, unit=" runs") as progress:
        session = Session(seconds=args.seconds, repeat=args.repeat, progress=progress)
        try:
            module.measure(args, session, report)
        except TimeIsUp:
            report.partial = "time"
        except KeyboardInterrupt:
            report.partial = "interrupted"
    _hand_over(args, module, report)
    return _INTERRUPTED if report.partial == "interrupted" else 0


def _hand_over(args: argparse.Namespace, module: Any, report: Any) -> None:
    """Print the table; write the files."""
    measured = [figure for figure in report.figures if figure.values]
    try:
        if args.json is not None:
            report.write(args.json)
    except OSError:  # the table shows the results that the file lost
        _print(module, report, measured)
        raise
    if report.partial is not None:
        reason = f"stopped by --seconds {args.seconds:g}" if report.partial == "time" else report.partial
        print(
            f"gids bench {report.question}: PARTIAL: {reason}; number of results: {len(measured)}",
            file=sys.stderr,
        )
    written = [] if args.json is None else [args.json]
    if not args.quiet:
        _print(module, report, measured)
    if args.plot is not None:
        from gids.bench.plot import plot_report

        settings, columns = module.columns(report)
        if plot_report(report, settings, columns, args.plot):
            written.append(args.plot)
        else:
            print(f"gids bench {report.question}: no results to draw to {args.plot}", file=sys.stderr)
    if not args.quiet:
        for path in written:
            print(f"written: {path}")


def _print(module: Any, report: Any, measured: list[Any]) -> None:
    from gids.bench.text import shared, table

    settings, columns = module.columns(report)
    common = shared(measured, settings)
    for line in _subject_lines(report, {settings[key]: value for key, value in common.items()}):
        print(line)
    for sentence in report.notes_above:
        print("\n" + textwrap.fill(f"note: {sentence}", 110, subsequent_indent="  "))
    if measured:
        shown = {key: title for key, title in settings.items() if key not in common}
        # The sides of an epoch are few, and have many figures.
        print("\n" + table(report.figures, shown, columns, upright=len(settings) == 1) + "\n")
    for sentence in report.answers:
        print(textwrap.fill(sentence, 110, subsequent_indent="  "))
    for sentence in report.notes:
        print(textwrap.fill(f"note: {sentence}", 110, subsequent_indent="  "))


def _subject_lines(report: Any, shared: dict[str, Any]) -> list[str]:
    """The subject of the measurement, in lines. shared: settings that all figures share."""
    facts = {key.replace("_", " "): value for key, value in report.subject.items()} | shared
    parts = [f"{key} {_word(value)}" for key, value in facts.items()]
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
    return str(value)
