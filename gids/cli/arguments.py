"""Argument types, options and texts that several subcommands have."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gids.sizes import parse_bytes

T = TypeVar("T")
Option = Callable[..., argparse.Action]
"""What adder() returns."""

READS = ("auto", "random", "pack")
"""The values of reads= of gids.open(), which this module must not import."""
FRAMEWORKS = ("dgl", "pyg", "torch")
"""Those of gids.bench.sides, in its order."""
SEEDS = ("train", "val", "test", "all")
_MOST_CHARS = 2000


def checked(parse: Callable[[str], T], accept: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """Return an argparse type that parses, and accepts some values only."""

    def convert(value: str) -> T:
        try:
            result = parse(value)
        except (ValueError, OverflowError):
            result = None
        if result is None or not accept(result):
            raise argparse.ArgumentTypeError(f"{value!r} is not {expected}")
        return result

    return convert


def integers(value: str) -> list[int]:
    return [int(part) for part in value.split(",")]


def numbers(least: int, most: float = math.inf) -> Callable[[str], list[int]]:
    """A type: a list of numbers such as `1,2,3`."""
    limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
    expected = f"a list of numbers {limits}, such as 4,8,16"
    return checked(integers, lambda n: least <= min(n) and max(n) <= most, expected)


words = checked(
    lambda value: [word.strip() for word in value.split(",") if word.strip()], bool, "a list such as a,b,c"
)
path = checked(lambda text: Path(text) if text else None, lambda _: True, "a path")
"""Not the empty text of a variable that the shell does not know: it would be the current directory."""
positive = checked(int, lambda n: n >= 1, "a whole number of 1 or more")
natural = checked(int, lambda n: n >= 0, "a whole number of 0 or more")
window = checked(int, lambda n: 0 <= n <= 22, "a whole number from 0 to 22")
seconds = checked(float, lambda n: 0 <= n < math.inf, "a number of seconds of 0 or more (0: no limit)")
writer_memory = checked(parse_bytes, lambda size: size >= 1 << 20, "a size of 1 MiB or more, such as 256MB")
device = checked(
    str, lambda s: bool(re.fullmatch(r"cpu|cuda(:\d+)?", s)), "a device; use cpu, cuda or cuda:N"
)
fanouts = checked(integers, lambda _: True, "a list of fanouts such as 10,5,5")
kappa = checked(
    lambda value: math.inf if value == "inf" else int(value),
    lambda n: n >= 1,
    "a whole number of 1 or more, or inf",
)


def adder(parser: argparse._ActionsContainer) -> Option:
    """Return a function that adds an option to parser; its help ends with the default, unless it names one.

    kind: the option's type, the sequence of its choices, True for a flag, or None for text.
    """

    def option(
        name: str,
        kind: Callable[[str], object] | Sequence[str] | bool | None,
        text: str,
        default: object = None,
        metavar: str | None = None,
        **more: Any,
    ) -> argparse.Action:
        if kind is True:
            return parser.add_argument(name, action="store_true", help=text)
        if default not in (None, []) and "(default: " not in text:
            shown = ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
            text += f" (default: {shown})".replace("%", "%%")
        if kind is not None:
            more["type" if callable(kind) else "choices"] = kind
        return parser.add_argument(name, default=default, metavar=metavar, help=text, **more)

    return option


def add_repeated(option: Option, name: str, text: str, metavar: str) -> argparse.Action:
    """Add an option with a list of values; it may be repeated."""
    return option(name, None, text, [], metavar, action="append")


def add_path(parser: argparse.ArgumentParser, metavar: str, text: str = "a dataset", **more: Any) -> None:
    """Add the positional argument `path`."""
    parser.add_argument("path", metavar=metavar, type=path, help=text, **more)


def add_allow_dir(parser: argparse._ActionsContainer) -> None:
    text = "allow shards in this directory outside the dataset; may be repeated"
    add_repeated(adder(parser), "--allow-dir", text, "DIR")


def add_minibatches(parser: argparse._ActionsContainer) -> None:
    """Add --fanouts and --batch-size."""
    option = adder(parser)
    text = "fanout per layer; as in DGL, the last one applies to the seeds"
    option("--fanouts", fanouts, text, [10, 10, 10], "N,…")
    option("--batch-size", positive, "seeds per minibatch", 1024, "N")


def add_framework(parser: argparse._ActionsContainer) -> None:
    text = "framework whose loader and model are used (default: the first that is installed, in this order)"
    adder(parser)("--with", FRAMEWORKS, text, dest="framework")


def add_workers(parser: argparse._ActionsContainer) -> None:
    adder(parser)("--workers", positive, "number of threads", min(4, os.cpu_count() or 1), "N")


def add_memory(
    parser: argparse._ActionsContainer,
    default: int = 256_000_000,
    kind: Callable[[str], int] = parse_bytes,
) -> None:
    what = f"limit of the memory for buffers (default: {default // 1_000_000}MB)"
    adder(parser)("--memory", kind, what, default, "BYTES")


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


@contextlib.contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Add to Ctrl-C how to resume the unfinished work for `path`."""
    from gids.write.workplace import partial_path

    try:
        yield
    except KeyboardInterrupt:
        partial = partial_path(path)
        if not partial.is_dir():  # nothing is on disk yet
            raise
        raise KeyboardInterrupt(f"interrupted; run the same command again to resume from {partial}") from None


def escaped(text: str) -> str:
    """The text with unprintable characters escaped, such as those that control a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable(text: str) -> str:
    """The text as one line of at most 2000 characters, with unprintable characters escaped."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = escaped(line[:_MOST_CHARS])
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]} …"
