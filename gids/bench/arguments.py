"""Argument types and options that several bench commands share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gids.sizes import parse_bytes

if TYPE_CHECKING:
    from gids.store import FeatureStore, Table

T = TypeVar("T")

SAMPLERS = ("neighbor", "labor", "labor-1", "labor-star", "ladies", "ladies-poisson", "walk")
DEPENDENT = SAMPLERS[:4]
"""The samplers that take a kappa."""


def check_sampler(name: str) -> None:
    """Raise ValueError for an unknown name."""
    if name not in SAMPLERS:
        raise ValueError(f"--sampler must be one of {', '.join(SAMPLERS)} (got {name!r})")


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


def _share(value: str) -> float:
    return float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)


def _kappas(value: str) -> list[float]:
    parts = [math.inf if part.strip() == "inf" else int(part) for part in value.split(",")]
    return list(dict.fromkeys(parts))


def numbers(least: int) -> Callable[[str], list[int]]:
    """A type: a list of numbers such as `1,2,3`."""
    return checked(
        integers, lambda n: min(n) >= least, f"a list of numbers of {least} or more, such as 4,8,16"
    )


words = checked(
    lambda value: [word.strip() for word in value.split(",") if word.strip()], bool, "a list such as a,b,c"
)
positive = checked(int, lambda n: n >= 1, "a whole number of 1 or more")
natural = checked(int, lambda n: n >= 0, "a whole number of 0 or more")
window = checked(int, lambda n: 0 <= n <= 22, "a whole number from 0 to 22")
rate = checked(float, lambda n: 0 < n < math.inf, "a number greater than 0")
seconds = checked(float, lambda n: 0 <= n < math.inf, "a number of seconds of 0 or more (0: no limit)")
share = checked(_share, lambda n: 0 <= n <= 1, "a share; use 40% or 0.4")
device = checked(
    str, lambda s: bool(re.fullmatch(r"cpu|cuda(:\d+)?", s)), "a device; use cpu, cuda or cuda:N"
)
fanouts = checked(integers, lambda _: True, "a list of fanouts such as 10,5,5")
kappas = checked(_kappas, lambda n: min(n) >= 1, "a list of numbers of 1 or more, or inf, such as 1,16,inf")


def parse_cache_size(text: str) -> tuple[str, str, float]:
    """Parse a cache size: (text, unit "%", "x" or "B", number). Raises ValueError."""
    unit = text[-1:] if text[-1:] in ("%", "x") else "B"
    try:
        number = float(parse_bytes(text)) if unit == "B" else float(text[:-1])
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ValueError(
            f"--cache {text} is not a cache size: use 2% (of the pages), 4GB or 5x (minibatches)"
        )
    return text, unit, number / 100 if unit == "%" else number


def adder(parser: argparse._ActionsContainer) -> Callable[..., argparse.Action]:
    """Return a function that adds an option to parser; its help ends with the default, unless it names one.

    kind: the option's type, or the sequence of its choices.
    """

    def option(
        name: str,
        kind: Callable[[str], object] | Sequence[str],
        text: str,
        default: object = None,
        metavar: str | None = None,
    ) -> argparse.Action:
        if default is not None and "(default: " not in text:
            shown = ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
            text += f" (default: {shown})".replace("%", "%%")
        values: dict[str, Any] = {"type": kind} if callable(kind) else {"choices": kind}
        return parser.add_argument(name, default=default, metavar=metavar, help=text, **values)

    return option


def add_dataset(parser: argparse.ArgumentParser) -> None:
    option = adder(parser)
    option("--table", str, "table to read (default: the largest table of nodes)", metavar="NAME")
    add_allow_dir(parser)


def add_allow_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="allow shards in this directory outside the dataset; may be repeated",
    )


READS = ("auto", "random", "pack")
"""The values of reads= of gids.open(), which this module must not import."""


def add_reads(parser: argparse.ArgumentParser) -> None:
    """Add --reads, --scratch and --scratch-bytes, as gids.open() takes them."""
    option = adder(parser)
    option(
        "--reads",
        READS,
        "how gids reads: one read per missing page (random), many minibatches by one pass over the table, "
        "through a scratch file (pack), or the faster one by prediction",
        "auto",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="directory for scratch files, on a disk (default: that of the dataset); may be repeated, for "
        "several disks that work at the same time",
    )
    option(
        "--scratch-bytes",
        parse_bytes,
        "size limit of all scratch files together (default: half of the free space)",
        metavar="BYTES",
    )


def changed(args: argparse.Namespace, defaults: Mapping[str, object]) -> list[str]:
    """Return the options that differ from their defaults, as `--name`."""
    return [
        f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(args, name) != default
    ]


SAMPLING_OPTIONS = ("sampler", "fanouts", "batch_size", "seeds")
"""The options of add_sampling."""


def add_minibatches(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add --fanouts and --batch-size. several: --batch-size is a list."""
    option = adder(parser)
    option(
        "--fanouts",
        fanouts,
        "fanout per layer; as in DGL, the last one applies to the seeds",
        [10, 10, 10],
        "N,…",
    )
    option(
        "--batch-size",
        numbers(1) if several else positive,
        "seeds per minibatch",
        [1024] if several else 1024,
        "N,…" if several else "N",
    )


def add_sampling(
    parser: argparse.ArgumentParser, *, several: bool = False, several_samplers: bool = False
) -> None:
    """Add the options of minibatches. several: --batch-size is a list. several_samplers: --sampler is one."""
    option = adder(parser)
    option(
        "--sampler",
        words if several_samplers else str,
        "sampler: neighbor, labor, labor-1 or labor-star (both with importance sampling), ladies or "
        "ladies-poisson (batch size x fanout nodes per layer), walk",
        ["neighbor"] if several_samplers else "neighbor",
        "NAME,…" if several_samplers else "NAME",
    )
    add_minibatches(parser, several=several)
    option("--seeds", ["train", "val", "test", "all"], "seed nodes: a split, or all nodes", "train")
    keep_defaults(parser, SAMPLING_OPTIONS)


def keep_defaults(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Store the options' defaults in args.sampling_defaults, for changed()."""
    parser.set_defaults(sampling_defaults={name: parser.get_default(name) for name in names})


def open_table(args: argparse.Namespace) -> tuple[FeatureStore, Table]:
    """Open the dataset, and find the table of --table, by default the largest table of nodes."""
    from gids.store import FeatureStore
    from gids.store.part import refuse_part

    store = FeatureStore(Path(args.path), allow_dirs=args.allow_dir)
    refuse_part(store, "gids bench", "measure with the whole dataset")
    if args.table is not None:
        return store, store.table(args.table)
    node_tables = [t for t in store.tables.values() if t.kind == "node"]
    if not node_tables:
        raise ValueError(f"{store.name} has no table of nodes")
    return store, max(node_tables, key=lambda t: t.page_count * t.page_bytes)
