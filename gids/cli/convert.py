"""`gids convert SRC DST`: convert graphs and features to a dataset."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.arguments import (
    Option,
    add_help,
    add_memory,
    add_path,
    add_quiet,
    add_repeated,
    add_workers,
    adder,
    checked,
    integers,
    path,
    resumable,
    writer_memory,
)
from gids.cli.progress import Progress
from gids.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gids.convert.readers import Choices
    from gids.store import FeatureStore

_MOST_NAMES = 3
_CHANGES = ("reverse_edges", "self_loops", "sort_neighbors", "dedup", "split", "split_column", "seed")
_OPTIONS = (*_CHANGES, "page_bytes", "index_dtype", "workers", "overwrite")
"""Fields of Options."""

parse_shape = checked(integers, lambda _: True, "a list of integers such as 1000000,128")

_EPILOG = """\
`gids convert --list` describes every input format. If several formats match SRC, choose one with --from.
If a conversion is interrupted or killed, run the same command again to resume it.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        usage="gids convert SRC [SRC ...] DST [option ...]",
        help="convert graphs and features to a gids dataset",
        description="Convert SRC to a gids dataset, the directory DST (NAME.gids).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    text = "a file, a directory, or tables: nodes.csv edges.csv"
    parser.add_argument("source", metavar="SRC", type=path, nargs="+", help=text)
    add_path(parser, "DST", "the dataset to make")
    rare = [
        *_add_input(parser.add_argument_group("input")),
        *_add_storage(adder(parser.add_argument_group("storage"))),
        *_add_graph(adder(parser.add_argument_group("graph"))),
        *_add_splits(adder(parser.add_argument_group("splits"))),
    ]
    run_group = parser.add_argument_group("run")
    add_workers(run_group)
    add_memory(run_group, kind=writer_memory)
    text = "replace the dataset DST when the conversion is done"
    run_group.add_argument("--overwrite", action="store_true", help=text)
    add_quiet(run_group)
    add_help(run_group, rare)


def _add_input(group: argparse._ActionsContainer) -> list[argparse.Action]:
    """Add the options; return those that --help leaves out. So do the others."""
    option = adder(group)
    group.add_argument("--list", action=_List, help="describe the input formats and exit")
    option("--from", None, "input format (default: detected)", metavar="NAME", dest="reader")
    option("--shape", parse_shape, "shape of raw binary; N = -1: as many as there are", metavar="N,DIM,...")
    option("--table", None, "table name of a single array", "feat", "[TYPE.]KEY")
    ids = "number of nodes of an edge list (default: the largest id plus 1)"
    allow = "if SRC is a dataset, allow its shards in this directory; may be repeated"
    return [
        *add_table_input(option),
        add_repeated(option, "--skip", "skip this array; may be repeated", "ARRAY"),
        option("--labels", None, "labels to use, if SRC has several (IGB: 19 or 2K)", metavar="NAME"),
        option("--num-nodes", int, ids, metavar="N"),
        add_repeated(option, "--allow-dir", allow, "DIR"),
    ]


def add_table_input(option: Option) -> list[argparse.Action]:
    """Add the options of tables of nodes and edges with ids; return them."""
    ids = "column of ids in tables of nodes, text or whole numbers (default: id, node_id or nid)"
    src = "column of sources in tables of edges (default: src, source, src_id, u or from)"
    dst = "column of destinations in tables of edges (default: dst, destination, target, dst_id, v or to)"
    drop = "leave out edges with an id that no node has, and print their number"
    apart = "store this column of numbers of nodes as a table of its own, not in x; may be repeated"
    return [
        add_repeated(option, "--id-column", ids, "[TYPE=]NAME"),
        add_repeated(option, "--src-column", src, "[RELATION=]NAME"),
        add_repeated(option, "--dst-column", dst, "[RELATION=]NAME"),
        option("--drop-unknown", True, drop),
        add_repeated(option, "--separate", apart, "COLUMN"),
    ]


def has_columns(args: argparse.Namespace) -> bool:
    """Whether an option chooses a column of tables."""
    return bool(args.id_column or args.src_column or args.dst_column)


def choices_of(args: argparse.Namespace, others: Sequence[Path], **more: Any) -> Choices:
    """What the options say to a reader. others: SRC after the first. more: fields of Choices."""
    from gids.convert.readers import Choices

    return Choices(
        table=args.table,
        shape=args.shape,
        skip=tuple(args.skip),
        others=tuple(others),
        id_column=_casts(args.id_column),
        src_column=_casts(args.src_column),
        dst_column=_casts(args.dst_column),
        drop_unknown=args.drop_unknown,
        separate=tuple(args.separate),
        **more,
    )


def _add_storage(option: Option) -> list[argparse.Action]:
    text = "type to store, such as float32, float16, bfloat16, int64 or int8; of raw binary: its type"
    add_repeated(option, "--dtype", text, "[TABLE=]TYPE")
    text = "size of all pages, a multiple of 512 (default: chosen)"
    option("--page-bytes", parse_bytes, text, metavar="BYTES")
    option("--stripe", None, "distribute the pages over these, one per SSD", [], "DIR", nargs="+")
    text = "order of the rows on disk: original, degree or community (neighbors together). Ids do not change "
    option("--order", None, f"{text}(default: as in SRC)", metavar="ORDER")
    text = "one scale per row or per column, for floating values stored as int8 (default: row)"
    return [add_repeated(option, "--scale", text, "[TABLE=]KIND")]


def _add_graph(option: Option) -> list[argparse.Action]:
    option("--reverse-edges", True, "add the reverse of every edge")
    option("--self-loops", True, "give every node exactly one edge to itself")
    text = (
        "type of node ids in the graph; auto: int32 where it is large enough (default: int64; or as in SRC)"
    )
    return [
        option("--index-dtype", ("int64", "int32", "auto"), text),
        option("--dedup", True, "remove duplicate edges; also sorts neighbors"),
        option("--sort-neighbors", True, "sort the in-edges of every node by source"),
        option("--no-times", True, "do not store times of nodes and edges, and do not sort edges by them"),
        option("--no-edge-ids", True, "do not store the original positions of the edges"),
    ]


def _add_splits(option: Option) -> list[argparse.Action]:
    fractions = checked(_fractions, lambda _: True, "a list of numbers such as 0.6,0.2,0.2")
    text = "train, val and test fractions of labeled nodes, if SRC has no split; 'none': no split (default: "
    option("--split", fractions, f"{text}0.6,0.2,0.2)", metavar="F,F,F")
    text = "split to use from masks of shape (nodes, splits), from 0"
    return [
        option("--split-column", int, text, metavar="K"),
        option("--seed", int, "seed of the random split", 0),
    ]


def run(args: argparse.Namespace) -> int:
    from gids.convert import Options, convert
    from gids.convert.readers import find_reader, open_source

    begun = time.monotonic()
    path, *others = args.source
    reader = find_reader(path, args.reader, others, by_column=has_columns(args))
    casts = _casts(args.dtype)
    choices = choices_of(
        args,
        others,
        dtype=casts.pop("", None) if reader.name == "raw" else None,
        allow_dirs=tuple(args.allow_dir),
        labels=args.labels,
        num_nodes=args.num_nodes,
    )
    options = Options(
        stripe=tuple(args.stripe),
        dtypes=casts,
        scales=_casts(args.scale),
        order=args.order,
        keep_edge_ids=not args.no_edge_ids,
        times=not args.no_times,
        memory_bytes=args.memory,
        **{name: getattr(args, name) for name in _OPTIONS},
    )
    with resumable(args.path), Progress("convert", quiet=args.quiet) as progress:
        convert(
            [f for p in args.source for f in reader.files(p)],
            lambda scratch: open_source(reader, path, scratch, choices),
            args.path,
            options,
            key={"--from": reader.name, **choices.key()},
            say=(lambda _: None) if args.quiet else progress.say,
            warn=progress.say,
            on_stage=progress.stage,
            on_total=progress.total,
            on_bytes=progress.add,
        )
    if not args.quiet:
        _report(args, time.monotonic() - begun)
    return 0


class _List(argparse.Action):
    """--list: print the formats. Imports the readers only when used."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from gids.convert.readers import READERS

        for reader in READERS:
            layout = textwrap.indent(reader.layout, "    ")
            print(f"{reader.name}: {reader.summary}\n{layout}\n")
        parser.exit()


def _report(args: argparse.Namespace, taken_s: float) -> None:
    """Print what was made, and what to type next."""
    from gids.store import FeatureStore

    store = FeatureStore(args.path, allow_dirs=args.stripe)
    size = sum(t.page_count * t.page_bytes for t in store.tables.values())
    said = f"{args.path}: {len(store.tables)} table{'s' * (len(store.tables) != 1)}, {format_bytes(size)}"
    print("; ".join([f"{said}, in {taken_s:.1f} s", *([] if args.page_bytes else _pages(store))]))
    directories = [os.path.abspath(directory) for directory in args.stripe]
    words = shlex.join([str(args.path), *(w for d in directories for w in ("--allow-dir", d))])
    print(f"next:\n    gids info {words}")
    if store.tables:
        print(f"    gids bench bandwidth {words}")
    allowed = f", allow_dirs={directories}" if directories else ""
    print(f"and in Python:\n    import gids\n    source = gids.open({str(args.path)!r}{allowed})")


def _pages(store: FeatureStore) -> list[str]:
    """The page sizes that were chosen, and why: a clause for each, with the names of its tables."""
    from gids.convert.layout import explain_pages

    named: dict[str, list[str]] = {}
    for table in store.tables.values():
        pages = f"in pages of {table.page_bytes} B: {explain_pages(table)}"
        named.setdefault(pages, []).append(table.name)
    return [
        f"{', '.join(names[:_MOST_NAMES])}{' and others' * (len(names) > _MOST_NAMES)} {pages}"
        for pages, names in named.items()
    ]


def _casts(texts: Sequence[str]) -> dict[str, str]:
    """["float16", "a=int8,b=int32"] -> {"": "float16", "a": "int8", "b": "int32"}."""
    parts = (part.rpartition("=") for text in texts for part in re.split(r",(?=[^,]*=)", text))
    return {table: value for table, _, value in parts}


def _fractions(text: str) -> tuple[float, ...]:
    return () if text == "none" else tuple(map(float, text.split(",")))
