"""`gids convert SRC DST`: makes a dataset from the formats that features come in."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.allow_dirs import how_to_open
from gids.cli.progress import Progress
from gids.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gids.convert.table_orders import ReadRows

_EPILOG = """\
The format of SRC is found out; where it could be several, say --from NAME.
`gids convert --list` explains them all.
A conversion that was killed resumes when the same command is given again.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        usage="gids convert SRC DST [option ...]",
        help="make a dataset from the formats that graphs come in",
        description="Make a dataset directory DST (NAME.gids) from SRC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("path", metavar="DST", type=Path)
    parser.add_argument("--list", action=_List, help="explain the formats of SRC and exit")
    parser.add_argument(
        "--from", dest="reader", metavar="NAME", help="the format of SRC (default: found out)"
    )
    parser.add_argument(
        "--labels", metavar="NAME", help="which labels, of a source with several (IGB: 19 or 2K)"
    )
    parser.add_argument(
        "--num-nodes", type=int, metavar="N", help="of an edge list (default: the largest id plus 1)"
    )
    parser.add_argument(
        "--table", default="feat", metavar="[TYPE.]KEY", help="name of a single array (default: feat)"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="ARRAY", help="leave out an array of that name; repeat"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[TABLE=]TYPE,...",
        help="store tables as (b)float16, float32, float64, (u)int8, int32, int64; floating ones as int8 "
        "with a --scale. With --shape and no TABLE: of raw binary",
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="[TABLE=]KIND",
        help="of floating features stored as int8: one per row or per column (default: row)",
    )
    parser.add_argument(
        "--shape", type=parse_shape, metavar="N,DIM,...", help="of raw binary (N = -1: as many as there are)"
    )
    parser.add_argument(
        "--page-bytes",
        type=parse_bytes,
        default=4096,
        metavar="BYTES",
        help="unit of reading (default: 4096)",
    )
    parser.add_argument(
        "--stripe",
        nargs="+",
        default=[],
        metavar="DIR",
        help="spread the pages over directories, one per SSD; give it after SRC and DST",
    )
    parser.add_argument(
        "--order",
        default="original",
        metavar="ORDER",
        help="of rows of nodes that share pages: original, degree (much-used rows together), community (rows "
        "of one neighbourhood together), or trace:FILE (rows that a recorded run read together); ids stay as "
        "they are (default: original)",
    )
    parser.add_argument(
        "--index-dtype",
        choices=("int64", "int32", "auto"),
        default="int64",
        help="of graph indices; auto: int32 where they fit (default: int64)",
    )
    parser.add_argument(
        "--reverse-edges",
        action="store_true",
        help="add the reverse of every edge: to the relation itself, or as rev_RELATION between two types",
    )
    parser.add_argument(
        "--self-loops",
        action="store_true",
        help="give every node one edge to itself, in relations of one type",
    )
    parser.add_argument("--dedup", action="store_true", help="of equal edges keep one; sorts neighbors")
    parser.add_argument(
        "--sort-neighbors", action="store_true", help="sort the in-edges of every node by source"
    )
    parser.add_argument("--no-edge-ids", action="store_true", help="drop the original order of edges")
    parser.add_argument(
        "--split",
        type=_split,
        default=(0.6, 0.2, 0.2),
        metavar="F,F,F",
        help="train, val, test fractions of labels that come without; or none (default: 0.6,0.2,0.2)",
    )
    parser.add_argument(
        "--split-column", type=int, metavar="K", help="which split, of masks of shape (nodes, splits), from 0"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --split (default: 0)")
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--workers", type=int, default=workers, metavar="N", help=f"threads (default: {workers})"
    )
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default=256_000_000,
        metavar="BYTES",
        help="bound on buffers (default: 256MB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST, in one step at the end")
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from gids.cache.budget import available_bytes
    from gids.convert import Options, convert
    from gids.convert.readers import READER_BYTES, Choices, find_reader, open_source
    from gids.write.publish import partial_path

    # The C library's allocator, so that the bound on what a batch takes sees what Arrow allocates.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    order, _, trace = args.order.partition(":")
    read_rows = _read_rows(order, trace)
    reader = find_reader(args.source, args.reader)
    casts = _casts(args.dtype)
    is_raw = args.shape or reader.is_raw(args.source)
    choices = Choices(
        table=args.table,
        dtype=casts.pop("", None) if is_raw else None,
        shape=args.shape,
        labels=args.labels,
        num_nodes=args.num_nodes,
        skip=tuple(args.skip),
        load_graphs=load_graphs,
        memory_bytes=available_bytes() if reader.may_crash else args.memory + READER_BYTES,
    )
    options = Options(
        page_bytes=args.page_bytes,
        stripe=tuple(args.stripe),
        dtypes=casts,
        scales=_casts(args.scale),
        order=order,
        read_rows=read_rows,
        index_dtype=args.index_dtype,
        keep_edge_ids=not args.no_edge_ids,
        reverse_edges=args.reverse_edges,
        self_loops=args.self_loops,
        sort_neighbors=args.sort_neighbors,
        dedup=args.dedup,
        split=args.split or None,
        split_column=args.split_column,
        seed=args.seed,
        workers=args.workers,
        memory_bytes=args.memory,
        overwrite=args.overwrite,
    )
    try:
        with Progress("convert", quiet=args.quiet) as progress:
            convert(
                [*reader.files(args.source), *([Path(trace)] if trace else [])],
                lambda scratch: open_source(reader, args.source, scratch, choices),
                args.path,
                options,
                key={
                    "--from": reader.name,
                    "--table": args.table,
                    "--shape": args.shape,
                    "--dtype of raw data": choices.dtype,
                    "--labels": args.labels,
                    "--num-nodes": args.num_nodes,
                    "--skip": args.skip,
                },
                say=_ignore if args.quiet else progress.say,
                warn=progress.say,
                on_total=progress.total,
                on_bytes=progress.add,
            )
    except KeyboardInterrupt:
        partial = partial_path(args.path)
        if not partial.is_dir():  # nothing was on disk yet
            raise
        raise KeyboardInterrupt(f"interrupted; the same command resumes, from {partial}") from None
    if not args.quiet:
        _report(args)
    return 0


def _read_rows(order: str, trace: str) -> ReadRows | None:
    """The recorded rows that --order trace:FILE goes by."""
    if order != "trace":
        if trace:
            raise ValueError(f"--order {order}:{trace}: a file goes with trace only, as trace:{trace}")
        return None
    if not trace:
        raise ValueError(
            "--order trace needs a file, as trace:FILE; `gids bench hit-ratio --record FILE --rows` or "
            "gids.trace.record(loader, FILE, rows=True) makes it"
        )
    from gids.trace.row_trace import RowTrace

    return RowTrace(trace)


def load_graphs(path: str) -> Any:
    """dgl.load_graphs."""
    try:
        importlib.import_module("gids.dgl")  # makes DGL importable under a current torch
        import dgl
    except ImportError as error:
        raise ImportError(f"{path} is a DGL graph file, and DGL is missing ({error})") from None
    return dgl.load_graphs(path)


class _List(argparse.Action):
    """--list: explains the readers, which are imported only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from gids.convert.readers import READERS

        for reader in READERS:
            layout = textwrap.indent(reader.layout, "    ")
            print(f"{reader.name}: {reader.summary}\n{layout}\n")
        parser.exit()


def _report(args: argparse.Namespace) -> None:
    from gids.store import FeatureStore

    store = FeatureStore(args.path, allow_dirs=args.stripe)
    size = sum(t.page_count * t.page_bytes for t in store.tables.values())
    print(f"{args.path}: {len(store.tables)} table{'s' * (len(store.tables) != 1)}, {format_bytes(size)}")
    if args.stripe:
        print(how_to_open(args.path, args.stripe))


def _casts(texts: Sequence[str]) -> dict[str, str]:
    """["float16", "a=int8,b=int32"] -> {"": "float16", "a": "int8", "b": "int32"}."""
    return dict(_cast(part) for text in texts for part in re.split(r",(?=[^,]*=)", text))


def _cast(text: str) -> tuple[str, str]:
    table, _, dtype = text.rpartition("=")
    return table, dtype


def parse_shape(text: str) -> tuple[int, ...]:
    """ "1000000,128" -> (1000000, 128)."""
    try:
        return tuple(int(n) for n in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write 1000000,128") from None


def _split(text: str) -> tuple[float, ...]:
    if text == "none":
        return ()
    try:
        return tuple(float(f) for f in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a split; write 0.6,0.2,0.2 or none") from None


def _ignore(_: str) -> None:
    pass
