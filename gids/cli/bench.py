"""`gids bench QUESTION …`: measures a disk, a cache size and a window before training.

Each question is a module of gids.bench, which run() imports. This module has the options, prints the table
and writes JSON. After Ctrl-C it reports what was measured so far.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli import arguments
from gids.cli.arguments import (
    READS,
    SEEDS,
    Option,
    adder,
    kappas,
    natural,
    numbers,
    positive,
    rate,
    seconds,
    window,
    words,
)
from gids.sizes import parse_bytes

if TYPE_CHECKING:
    from gids.bench.report import Report

_INTERRUPTED = 130
_SAMPLING = ("fanouts", "batch_size", "seeds")
"""The options of _add_sampling."""

_BANDWIDTH = """\
Minibatches are sampled before the measurement. With --rows, or if the dataset has no topology, they are
uniform random rows. Each run starts with an empty cache. Some rows from each engine are first compared with
the dataset. The line `raw probe` is the disk's ceiling.
"""
_EPOCH = """\
Trains GraphSAGE on the train split of the node type that has classes as labels; with several relations,
R-GCN on the features of all node types. DGL's NeighborSampler samples. Stock DGL maps the tables' shards, so
each table needs one shard without padding. It runs twice: at most a minute with MADV_RANDOM (no read-ahead),
and 15 seconds without. If stock DGL fails, for example because it needs more memory, a note says so. Some of
the rows that the model gets are compared with the dataset.
"""
_HIT_RATIO = """\
SIZE is a cache size: a share of the table's pages (2%), bytes (4GB), or a number of average minibatches
(5x). WANTED is a hit ratio (60%), or the time that an epoch may take to read the missing pages (30s). The
speed of the disk is measured on the dataset, or given by --pages-per-s.
"""
_SAMPLES = """\
Nodes are the unique input nodes of the minibatches: training reads their features. The edges of some
minibatches are compared with the graph before the measurement.
"""


def _add_bandwidth(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    _add_table(parser, option)
    _add_sampling(parser, option, batch_sizes=True)
    _keep_defaults(parser, _SAMPLING)
    option("--rows", numbers(1), "read N uniform random rows per minibatch", metavar="N,…")
    text = "I/O engines: uring, threads, mmap (default: those that work here)"
    option("--engines", words, text, metavar="NAME,…")
    option("--depth", numbers(1), "requests in flight", [256], "N,…")
    option("--cache", None, "cache size: share of the table or bytes, such as 4GB", "10%", "SIZE")
    option("--window", natural, "minibatches sampled ahead, 0 to 23", 16, "N")
    option("--iterations", positive, "minibatches per run", 40, "N")
    option("--threads", positive, "threads that copy rows (default: torch's number)", metavar="N")
    option("--device", arguments.device, "device of cache and rows: cpu or cuda", "cpu", "NAME")


def _add_epoch(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    _add_table(parser, option)
    arguments.add_minibatches(parser)
    option("--batches", natural, "minibatches to train on; 0: the whole epoch", 40, "N")
    option("--window", window, "minibatches sampled ahead, 0 to 22", 16, "N")
    text = "how gids reads: one read per missing page (random), many minibatches by one pass over the table, "
    text += "through a scratch file (pack), or the faster one by prediction"
    option("--reads", READS, text, "auto")
    text = "directory for scratch files, on a disk (default: that of the dataset); may be repeated, for "
    text += "several disks that work at the same time"
    option("--scratch", Path, text, [], "DIR", action="append")
    text = "memory of each side for features, with the page cache; the memory of training is measured and "
    text += "added (default: a quarter of the features, or more if the minibatches in flight need more)"
    option("--memory-limit", parse_bytes, text, metavar="BYTES")
    option("--sides", words, "sides to run (default: gids,stock-random,stock)", metavar="NAME,…")
    text = "stop after about S seconds and report what was measured so far (default: 0, no limit)"
    option("--seconds", seconds, text, 0, "S")


def _add_hit_ratio(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    _add_table(parser, option)
    _add_samplers(option)
    _add_sampling(parser, option)
    text = "number of minibatches over which draws stay correlated, 1 (independent) or more, or inf; for "
    option("--kappa", kappas, f"{text}neighbor and labor (default: 1)", metavar="N,…")
    option("--batches", positive, "minibatches to sample", 200, "N")
    text = "cache policies (default: random,lru,static,window-pin,lookahead)"
    option("--policies", words, text, metavar="NAME,…")
    text = "minibatches sampled ahead, 0 to 22 (default: 0,4,8,16,22)"
    option("--windows", numbers(0, 22), text, metavar="N,…")
    option("--cache", words, "cache sizes (default: 1%%,2%%,5%%,10%%)", metavar="SIZE,…")
    text = "orders of rows to try, without changing the dataset: stored, original, degree, community, as in "
    text += "`gids convert --order` (default: stored)"
    option("--order", words, text, metavar="ORDER,…")
    option("--advise", None, "find the smallest cache and window that reach WANTED", metavar="WANTED")
    option("--plot", Path, "draw hits by window to FILE, as PNG", metavar="FILE")
    option("--pages-per-s", rate, "disk speed for --advise (default: measured)", metavar="N")


def _add_sampled(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    arguments.add_allow_dir(parser)
    _add_samplers(option)
    _add_sampling(parser, option, batch_sizes=True)
    text = "threads of sampling on the CPU (default: 1, and torch's number)"
    option("--threads", numbers(1), text, metavar="N,…")
    option("--device", arguments.device, "device that samples: cpu or cuda", "cpu", "NAME")
    text = "minibatches per call (default: 1; gids.NodeLoader uses two per thread)"
    option("--bulk", numbers(1), text, [1], "N,…")
    option("--batches", positive, "minibatches per run", 50, "N")


def _add_table(parser: argparse.ArgumentParser, option: Option) -> None:
    option("--table", None, "table to read (default: the largest table of nodes)", metavar="NAME")
    arguments.add_allow_dir(parser)


def _add_samplers(option: Option) -> None:
    text = "sampler: neighbor, labor, labor-1 or labor-star (both with importance sampling), ladies or "
    text += "ladies-poisson (batch size x fanout nodes per layer), walk"
    option("--sampler", words, text, ["neighbor"], "NAME,…")


def _add_sampling(parser: argparse.ArgumentParser, option: Option, *, batch_sizes: bool = False) -> None:
    """batch_sizes: whether --batch-size is a list."""
    arguments.add_minibatches(parser, several=batch_sizes)
    option("--seeds", SEEDS, "seed nodes: a split, or all nodes", "train")


def _keep_defaults(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Store the options' defaults in args.sampling_defaults."""
    parser.set_defaults(sampling_defaults={name: parser.get_default(name) for name in names})


QUESTIONS = {
    "bandwidth": ("how fast rows are read and gathered, by engine, batch size and depth", _BANDWIDTH),
    "epoch": ("where an epoch's time goes, with gids and with stock DGL on memory-mapped features", _EPOCH),
    "hit-ratio": (
        "the share of pages that a cache finds, by policy, window and size, compared with Belady's MIN",
        _HIT_RATIO,
    ),
    "sampling": ("nodes and edges sampled per second, by sampler, batch size, threads and device", _SAMPLES),
}
"""What each question measures, and the end of its help."""
_ADD = {
    "bandwidth": _add_bandwidth,
    "epoch": _add_epoch,
    "hit-ratio": _add_hit_ratio,
    "sampling": _add_sampled,
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a disk, a cache size and a window",
        description="Measure in minutes how a disk, a cache size and a window affect training.",
    )
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)
    for name, (text, epilog) in QUESTIONS.items():
        sub = questions.add_parser(
            name,
            help=text,
            description=f"Measure {text}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        option = adder(sub)
        sub.set_defaults(plot=None)
        _ADD[name](sub, option)
        option("--seed", natural, "random seed", 0, "N")
        text = "repeat each measurement N times; report the median and the range"
        option("--repeat", positive, text, 1, "N")
        text = "write the results, the machine and the command to FILE"
        option("--json", Path, text, metavar="FILE")
        arguments.add_quiet(sub)


def run(args: argparse.Namespace) -> int:
    from gids.bench.report import Report, Session, check_writable
    from gids.cli.progress import Progress

    for path in (args.json, args.plot):
        if path is not None:
            check_writable(path)
    if args.plot is not None:
        from gids.bench.plot import check_plotting

        check_plotting()
    module = importlib.import_module(f"gids.bench.{args.question.replace('-', '_')}")
    report = Report(args.question, command=["gids", *sys.argv[1:]], seed=args.seed, repeat=args.repeat)
    with Progress(f"bench {args.question}", quiet=args.quiet, unit=" runs") as progress:
        try:
            module.measure(Session(args, report, progress))
        except KeyboardInterrupt:
            report.partial = "interrupted"
    _hand_over(args, module, report)
    return _INTERRUPTED if report.partial == "interrupted" else 0


def _hand_over(args: argparse.Namespace, module: Any, report: Report) -> None:
    """Print the table; write the files."""
    try:
        if args.json is not None:
            report.write(args.json)
    except OSError:  # the table shows the results that the file lost
        _print(module, report)
        raise
    if report.partial is not None:
        reason = f"stopped by --seconds {args.seconds:g}" if report.partial == "time" else report.partial
        count = len(report.measured)
        print(f"gids bench {report.question}: PARTIAL: {reason}; number of results: {count}", file=sys.stderr)
    written = [] if args.json is None else [args.json]
    if not args.quiet:
        _print(module, report)
    if args.plot is not None and report.measured:
        module.plot(report, args.plot)
        written.append(args.plot)
    if not args.quiet:
        for path in written:
            print(f"written: {path}")


def _print(module: Any, report: Report) -> None:
    from gids.bench.text import shared, table

    settings: dict[str, str] = module.SETTINGS
    common = shared(report.measured, settings)
    facts = {key.replace("_", " "): value for key, value in report.subject.items()}
    facts |= {settings[key]: value for key, value in common.items()}
    parts = [f"{key} {_word(value)}" for key, value in facts.items()]
    repeat = max((len(v) for figure in report.figures for v in figure.values.values()), default=0)
    repeats = f", {repeat} repeats: medians (range)" if repeat > 1 else ""
    print("\n".join(textwrap.wrap("; ".join([*parts, f"seed {report.seed}{repeats}"]), 110)))
    for sentence in report.notes_above:
        print("\n" + _paragraph(f"note: {sentence}"))
    if report.measured:
        shown = {key: title for key, title in settings.items() if key not in common}
        # The sides of an epoch are few, and have many figures.
        print("\n" + table(report.figures, shown, module.COLUMNS, upright=len(settings) == 1) + "\n")
    for sentence in [*report.answers, *(f"note: {note}" for note in report.notes)]:
        print(_paragraph(sentence))


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 110, subsequent_indent="  ")


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
