"""Options and texts that several subcommands have. Called by the subcommands."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gids.bench.arguments import adder
from gids.sizes import parse_bytes

_MOST_CHARS = 2000


def add_workers(parser: argparse._ActionsContainer) -> None:
    adder(parser)("--workers", int, "number of threads", min(4, os.cpu_count() or 1), "N")


def add_memory(parser: argparse._ActionsContainer, default: int = 256_000_000) -> None:
    what = f"limit of the memory for buffers (default: {default // 1_000_000}MB)"
    adder(parser)("--memory", parse_bytes, what, default, "BYTES")


@contextlib.contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Add to Ctrl-C how to resume the unfinished work for `path`."""
    from gids.write.publish import partial_path

    try:
        yield
    except KeyboardInterrupt:
        partial = partial_path(path)
        if not partial.is_dir():  # nothing is on disk yet
            raise
        raise KeyboardInterrupt(f"interrupted; run the same command again to resume from {partial}") from None


def add_quiet(parser: argparse._ActionsContainer, what: str = "errors") -> None:
    parser.add_argument("--quiet", action="store_true", help=f"print {what} only")


def add_help(group: argparse._ActionsContainer, rare: Sequence[argparse.Action]) -> None:
    """Add --help, which leaves out these options, and --help-all, which prints every option."""
    texts = [(action, action.help) for action in rare]

    class HelpAll(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            """Print every option."""
            for action, text in texts:
                action.help = text
            parser.print_help()
            parser.exit()

    for action in rare:
        action.help = argparse.SUPPRESS
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    group.add_argument("--help-all", action=HelpAll, nargs=0, help="show the rare options too, and exit")


def printable(text: str) -> str:
    """The text as one line of at most 2000 characters, with unprintable characters escaped."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:_MOST_CHARS])
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]} …"
