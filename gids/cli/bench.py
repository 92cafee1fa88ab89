"""`gids bench QUESTION …`: measures a disk, a cache size and a window before training.

Each question is a module of gids.bench, which run() imports. This module has the options.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from gids.cli import arguments
from gids.cli.arguments import (
    READS,
    SEEDS,
    Option,
    adder,
    kappa,
    natural,
    numbers,
    positive,
    seconds,
    window,
    words,
)
from gids.sizes import parse_bytes

_BANDWIDTH = """\
Each I/O engine that works here reads minibatches of random rows, without a cache. Some rows are first
compared with the dataset. The line `raw probe` is the disk's ceiling.
"""
_EPOCH = """\
Trains GraphSAGE on the train split of a dataset with one node type, one relation, and classes as labels.
The stock side is the framework's own loader over the table's mapped shard, so the table needs one shard
without padding. It runs twice: at most a minute with MADV_RANDOM (no read-ahead), and 15 seconds without. If
it fails, for example because it needs more memory, a note says so. Some of the rows that the model gets are
compared with the dataset.
"""
_HIT_RATIO = """\
SIZE is a cache size: a share of the table's pages (2%), bytes (4GB), or a number of average minibatches
(5x).
"""


def _add_bandwidth(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    _add_table(parser, option)
    option("--rows", positive, "random rows per minibatch", 8192, "N")
    option("--depth", positive, "requests in flight", 256, "N")
    option("--iterations", positive, "minibatches per engine", 40, "N")
    option("--device", arguments.device, "device of the rows: cpu or cuda", "cpu", "NAME")


def _add_epoch(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    _add_table(parser, option)
    arguments.add_framework(parser)
    arguments.add_minibatches(parser)
    option("--batches", natural, "minibatches to train on; 0: the whole epoch", 40, "N")
    option("--window", window, "minibatches sampled ahead, 0 to 22", 16, "N")
    option("--reads", READS, "how gids reads, as reads= of gids.open()", "auto")
    text = "directory for scratch files, as scratch= of gids.open(); may be repeated"
    option("--scratch", Path, text, [], "DIR", action="append")
    text = "memory for features of each side, page cache included (default: a quarter of the features)"
    option("--memory-limit", parse_bytes, text, metavar="BYTES")
    text = "stop training after about S seconds in all, and compare rows/s (default: 0, no limit)"
    option("--seconds", seconds, text, 0, "S")


def _add_hit_ratio(parser: argparse.ArgumentParser, option: Option) -> None:
    arguments.add_path(parser, "DATASET", "dataset, written by gids convert")
    _add_table(parser, option)
    arguments.add_minibatches(parser)
    option("--seeds", SEEDS, "seed nodes: a split, or all nodes", "train")
    text = "sampler: neighbor, labor, labor-1 or labor-star (both with importance sampling), ladies or "
    text += "ladies-poisson (batch size x fanout nodes per layer), walk"
    option("--sampler", None, text, "neighbor", "NAME")
    text = "number of minibatches over which draws stay correlated, 1 (independent) or more, or inf; for "
    option("--kappa", kappa, f"{text}neighbor and labor", 1, "N")
    option("--batches", positive, "minibatches to sample", 200, "N")
    option(
        "--policies",
        words,
        "cache policies",
        ["random", "lru", "static", "window-pin", "lookahead"],
        "NAME,…",
    )
    text = "minibatches sampled ahead, 0 to 22"
    option("--windows", numbers(0, 22), text, [0, 4, 8, 16, 22], "N,…")
    option("--cache", words, "cache sizes", ["1%", "2%", "5%", "10%"], "SIZE,…")
    text = "order of rows to try, without changing the dataset: stored, original, degree, community, as in "
    text += "`gids convert --order`"
    option("--order", None, text, "stored", "ORDER")


def _add_table(parser: argparse.ArgumentParser, option: Option) -> None:
    option("--table", None, "table to read (default: the largest table of nodes)", metavar="NAME")
    arguments.add_allow_dir(parser)


QUESTIONS = {
    "bandwidth": ("how fast rows are read and gathered, by engine", _BANDWIDTH),
    "epoch": (
        "where an epoch's time goes, with gids and with a stock loader on memory-mapped features",
        _EPOCH,
    ),
    "hit-ratio": (
        "the share of pages that a cache finds, by policy, window and size, compared with Belady's MIN",
        _HIT_RATIO,
    ),
}
"""What each question measures, and the end of its help."""
_ADD = {"bandwidth": _add_bandwidth, "epoch": _add_epoch, "hit-ratio": _add_hit_ratio}


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
        _ADD[name](sub, option)
        option("--seed", natural, "random seed", 0, "N")
        text = "write the results, the machine and the command to FILE"
        option("--json", Path, text, metavar="FILE")
        option("--plot", Path, "draw the results to FILE, as PNG", metavar="FILE")
        arguments.add_quiet(sub)


def run(args: argparse.Namespace) -> int:
    from gids.bench.plot import check_plotting
    from gids.bench.report import Report, Session, check_writable
    from gids.cli.progress import Progress

    for path in (args.json, args.plot):
        if path is not None:
            check_writable(path)
    if args.plot is not None:
        check_plotting()
    question = importlib.import_module(f"gids.bench.{args.question.replace('-', '_')}")
    report = Report(args.question, command=["gids", *sys.argv[1:]], seed=args.seed)
    with Progress(f"bench {args.question}", quiet=args.quiet, unit=" runs") as progress:
        question.measure(Session(args, report, progress))
    if not args.quiet:
        print(report.as_text(question.SETTINGS, question.COLUMNS), flush=True)
    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        question.plot(report, args.plot)
    return 0
