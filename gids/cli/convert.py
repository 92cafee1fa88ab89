"""`gids convert SRC DST`: makes a dataset from the formats that features come in."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.progress import Progress
from gids.cli.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gids.store.convert import Source

_EPILOG = """\
SRC is one of
  features.npy      an array of one row per node (--table names it; default feat of node type _N)
  data.npz          features (attr_* CSR, or dense), graph (adj_* CSR, edge_index, or indptr and indices),
                    labels, train/val/test_idx or _mask
  features.bin      raw binary, with --dtype and --shape
  DIRECTORY         those arrays as files; or nodes/TYPE/ and edges/SOURCE.RELATION.DESTINATION/ of them
  graph.dgl         a file of dgl.save_graphs with one graph (needs gids[dgl])

A conversion that was killed resumes when the same command is given again.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a dataset from .npy, .npz, raw binary, a directory or a DGL graph file",
        description="Make a dataset directory DST (NAME.gids) from SRC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("path", metavar="DST", type=Path)
    parser.add_argument(
        "--table", default="feat", metavar="[TYPE.]KEY", help="name of a single array (default: feat)"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[TABLE=]TYPE",
        help="cast tables: (b)float16, float32, float64, (u)int8, int32, int64; with --shape: of raw binary",
    )
    parser.add_argument(
        "--shape", type=_shape, metavar="N,DIM,…", help="of raw binary (-1: as many as there are)"
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
        help="spread the pages over directories, one per SSD",
    )
    parser.add_argument(
        "--index-dtype", choices=("int64", "int32"), default="int64", help="of graph indices (default: int64)"
    )
    parser.add_argument("--no-edge-ids", action="store_true", help="drop the original order of edges")
    parser.add_argument(
        "--split",
        type=_split,
        default=(0.6, 0.2, 0.2),
        metavar="F,F,F",
        help="train, val, test fractions of labels that come without; or none (default: 0.6,0.2,0.2)",
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
    from gids.store.convert import Options, convert, source_kind
    from gids.store.convert.source import source_files

    kind = source_kind(args.source)
    casts = dict(_cast(text) for text in args.dtype)
    raw_dtype = casts.pop("", None) if args.shape else None
    options = Options(
        page_bytes=args.page_bytes,
        stripe=tuple(args.stripe),
        dtypes=casts,
        index_dtype=args.index_dtype,
        keep_edge_ids=not args.no_edge_ids,
        split=args.split or None,
        seed=args.seed,
        workers=args.workers,
        memory_bytes=args.memory,
        overwrite=args.overwrite,
    )
    with Progress("convert", quiet=args.quiet) as progress:
        convert(
            source_files(args.source),
            _opener(args, kind, raw_dtype),
            args.path,
            options,
            key={"--table": args.table, "--shape": args.shape, "--dtype of raw data": raw_dtype},
            say=_ignore if args.quiet else progress.say,
            on_total=progress.total,
            on_bytes=progress.add,
        )
    if not args.quiet:
        _report(args)
    return 0


def _opener(args: argparse.Namespace, kind: str, raw_dtype: str | None) -> Callable[[Path], Source]:
    from gids.store.convert.dgl_graph import read_dgl_graph
    from gids.store.convert.readers import read_source

    def open_dgl(_: Path) -> Source:
        graph, notes = _load_dgl(args.source)
        source = read_dgl_graph(graph)
        source.notes += notes
        return source

    def open_arrays(scratch: Path) -> Source:
        return read_source(args.source, scratch, table=args.table, dtype=raw_dtype, shape=args.shape)

    return open_dgl if kind == "dgl" else open_arrays


def _load_dgl(path: Path) -> tuple[Any, list[str]]:
    """The one graph of a file of dgl.save_graphs, and what to tell the user. Loads it whole, as DGL does."""
    from gids.errors import FormatError

    try:
        importlib.import_module("gids.dgl")  # makes DGL importable under a current torch
        import dgl
    except ImportError as error:
        raise ImportError(
            f"{path} is a DGL graph file, and DGL is missing: pip install 'gids[dgl]' ({error})"
        ) from None
    graphs, labels = dgl.load_graphs(str(path))
    if len(graphs) != 1:
        raise FormatError(f"{path} holds {len(graphs)} graphs; save the one to convert in a file of its own")
    return graphs[0], [f"left out {name!r}: a label of the whole graph" for name in labels]


def _report(args: argparse.Namespace) -> None:
    from gids.store import FeatureStore

    store = FeatureStore(args.path, allow_dirs=args.stripe)
    size = sum(t.page_count * t.page_bytes for t in store.tables.values())
    print(f"{args.path}: {len(store.tables)} table{'s' * (len(store.tables) != 1)}, {format_bytes(size)}")


def _cast(text: str) -> tuple[str, str]:
    table, _, dtype = text.rpartition("=")
    return table, dtype


def _shape(text: str) -> tuple[int, ...]:
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
