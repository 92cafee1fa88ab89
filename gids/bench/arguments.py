"""Argument types and options that several bench commands share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gids.store import FeatureStore, Table


def words(value: str) -> list[str]:
    """`a,b,c`."""
    found = [word.strip() for word in value.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("the list is empty; separate names by commas")
    return found


def numbers(least: int) -> Callable[[str], list[int]]:
    """Return a type: a list such as `1,2,3` of numbers of `least` or more."""

    def parse(value: str) -> list[int]:
        try:
            found = [int(number) for number in value.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is not a list of numbers such as 4,8,16") from None
        if min(found) < least:
            raise argparse.ArgumentTypeError(f"{value!r}: each number must be {least} or more")
        return found

    return parse


def positive(value: str) -> int:
    """A whole number, 1 or more."""
    return _at_least(1, value)


def natural(value: str) -> int:
    """A whole number, 0 or more."""
    return _at_least(0, value)


def _at_least(least: int, value: str) -> int:
    try:
        found = int(value)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of {least} or more")
    return found


def device(value: str) -> str:
    """`cpu`, `cuda` or `cuda:1`."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not a device; use cpu, cuda or cuda:N")
    return value


def share(value: str) -> float:
    """`40%` or `0.4`: from 0 to 1."""
    try:
        found = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a share; use 40% or 0.4")
    return found


def fanouts(value: str) -> list[int]:
    """`10,5,5`. As in DGL, the last fanout applies to the seeds; -1 takes all neighbours."""
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of fanouts such as 10,5,5") from None


def kappas(value: str) -> list[float]:
    """`1,16,inf`."""
    try:
        found = [math.inf if part.strip() == "inf" else int(part) for part in value.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a list of numbers of 1 or more, or inf, such as 1,16,inf"
        )
    return list(dict.fromkeys(found))


def add_dataset(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--table", metavar="NAME", help="table to read (default: the largest table of nodes)")
    add(
        "--allow-dir", action="append", default=[], metavar="DIR", help="allow shards in DIR, outside DATASET"
    )


def given(args: argparse.Namespace, defaults: Mapping[str, object]) -> list[str]:
    """Return the options that differ from their defaults, as `--name`."""
    return [
        f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(args, name) != default
    ]


OF_MINIBATCHES = ("sampler", "fanouts", "batch_size", "seeds")
"""The options of add_sampling."""


def add_minibatches(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add --fanouts and --batch-size. several: --batch-size is a list."""
    add = parser.add_argument
    add(
        "--fanouts",
        type=fanouts,
        default=[10, 10, 10],
        metavar="N,…",
        help="fanout per layer; as in DGL, the last one applies to the seeds (default: 10,10,10)",
    )
    add(
        "--batch-size",
        type=numbers(1) if several else positive,
        default=[1024] if several else 1024,
        metavar="N,…" if several else "N",
        help="seeds per minibatch (default: 1024)",
    )


def add_sampling(
    parser: argparse.ArgumentParser, *, several: bool = False, several_samplers: bool = False
) -> None:
    """Add the options of minibatches. several: --batch-size is a list. several_samplers: --sampler is one."""
    add = parser.add_argument
    add(
        "--sampler",
        type=words if several_samplers else str,
        default=["neighbor"] if several_samplers else "neighbor",
        metavar="NAME,…" if several_samplers else "NAME",
        help="sampler: neighbor, labor, labor-1 or labor-star (both with importance sampling), ladies or "
        "ladies-poisson (batch size x fanout nodes per layer), walk (default: neighbor)",
    )
    add_minibatches(parser, several=several)
    add(
        "--seeds",
        choices=["train", "val", "test", "all"],
        default="train",
        help="split to take the seeds from (default: train)",
    )
    keep_defaults(parser, OF_MINIBATCHES)


def keep_defaults(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Store the options' defaults in args.sampling_defaults, for given()."""
    parser.set_defaults(sampling_defaults={name: parser.get_default(name) for name in names})


def open_table(args: argparse.Namespace) -> tuple[FeatureStore, Table]:
    """Open the dataset, and find the table of --table, by default the largest table of nodes."""
    from gids.store import FeatureStore

    store = FeatureStore(Path(args.path), allow_dirs=args.allow_dir)
    if args.table is not None:
        return store, store.table(args.table)
    of_nodes = [t for t in store.tables.values() if t.kind == "node"]
    if not of_nodes:
        raise ValueError(f"{store.name} has no table of nodes")
    return store, max(of_nodes, key=lambda t: t.page_count * t.page_bytes)
