"""`gids partition DATASET OUT --parts P`: divide a dataset among processes or machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.arguments import (
    add_allow_dir,
    add_memory,
    add_quiet,
    add_repeated,
    add_workers,
    adder,
    writer_memory,
)
from gids.cli.progress import Progress
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.write.partition import Report

_EPILOG = """\
Each part is a dataset, OUT/part-000.gids, OUT/part-001.gids and so on. It has the rows of the
nodes that it owns and their in-edges, and all labels, splits, times and heat. Ids do not change.
OUT appears when all parts are complete. After a kill, run the command again: it starts again.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "partition",
        usage="gids partition DATASET OUT --parts P [option ...]",
        help="divide a dataset into parts, one per process or machine",
        description="Divide DATASET into parts. Every node gets an owner, which holds its features and\n"
        "in-edges. Prints the size of each part, and how many edges lead from one part to another.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = adder(parser)
    parser.add_argument("dataset", metavar="DATASET", type=Path, help="a dataset")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to make")
    option("--parts", int, "number of parts, 1 to 4096", metavar="P", required=True)
    option("--by", ("hash", "range"), "hash: at random. range: equal ranges of ids", "hash")
    text = ".npy file with the part of each node, 0 to P - 1, such as METIS computes, in place of --by; "
    text += "TYPE=FILE.npy, repeated, if there are several node types"
    add_repeated(option, "--owners", text, "FILE")
    option("--seed", int, "seed of --by hash", 0)
    add_allow_dir(parser)
    add_workers(parser)
    add_memory(parser, kind=writer_memory)
    option("--json", True, "print one JSON object")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.write.partition import partition

    by_type = (text.partition("=") if "=" in text else ("", "", text) for text in args.owners)
    owners = {ntype: file for ntype, _, file in by_type}
    with Progress("partition", quiet=args.quiet) as progress:
        report = partition(
            args.dataset,
            args.out,
            args.parts,
            method=args.by,
            owners=owners or None,
            seed=args.seed,
            allow_dirs=args.allow_dir,
            workers=args.workers,
            memory_bytes=args.memory,
            on_total=progress.total,
            on_bytes=progress.add,
        )
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    elif not args.quiet:
        print(_text(args.out, report))
    return 0


def _text(out: Path, report: Report) -> str:
    from gids.bench.text import aligned

    names = {"rows": "rows", "seeds": "training seeds", "in_edges": "in-edges", "bytes": "size"}
    table = [["", *names.values()]]
    for index, part in enumerate(report.parts):
        numbers = [str(part.rows), str(part.seeds), str(part.in_edges), format_bytes(part.bytes)]
        table.append([f"part {index}", *numbers])
    table.append(["largest / mean", *(f"{report.balance(name):.3f}" for name in names)])
    share = f"{report.cut_edges} of {report.edges} edges ({report.cut_share:.1%})"
    return (
        f"{out}: {len(report.parts)} parts by {report.method}\n\n{aligned(table, left=1)}\n\n"
        f"{share} lead from one part to another"
    )
