"""What the questions of `gids bench` check in their arguments. Imports no framework."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gids.sizes import parse_bytes

if TYPE_CHECKING:
    from gids.store import FeatureStore, Table

SAMPLERS = ("neighbor", "labor", "labor-1", "labor-star", "ladies", "ladies-poisson", "walk")
DEPENDENT = SAMPLERS[:4]
"""The samplers that take a kappa."""


def check_known(option: str, name: str, known: tuple[str, ...], more: str = "") -> None:
    """Raise ValueError for an unknown name."""
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)} (got {name!r}){more}")


def check_sampler(name: str) -> None:
    check_known("--sampler", name, SAMPLERS)


def parse_cache_size(text: str, *, minibatches: bool = True) -> tuple[str, str, float]:
    """Parse a cache size: (text, unit "%", "x" or "B", number). Raises ValueError.

    minibatches: whether a number of them, such as 5x, is a size.
    """
    unit = text[-1:] if text[-1:] in ("%", "x") else "B"
    try:
        number = float(parse_bytes(text)) if unit == "B" else float(text[:-1])
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf or (unit == "x" and not minibatches):
        ways = "2% (of the pages), 4GB or 5x (minibatches)" if minibatches else "2% (of the pages) or 4GB"
        raise ValueError(f"--cache {text} is not a cache size: use {ways}")
    return text, unit, number / 100 if unit == "%" else number


def changed(args: argparse.Namespace, defaults: Mapping[str, object]) -> str:
    """The options that differ from their defaults, as `--a, --b`."""
    names = [name for name, default in defaults.items() if getattr(args, name) != default]
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def open_table(args: argparse.Namespace) -> tuple[FeatureStore, Table]:
    """Open the dataset, and find the table of --table, by default the largest table of nodes.

    Raises ValueError for a part of a dataset, and for one without a table of nodes.
    """
    from gids.store import FeatureStore
    from gids.store.part import refuse_part

    store = FeatureStore(Path(args.path), allow_dirs=args.allow_dir)
    refuse_part(store, f"gids {args.command}", "measure with the whole dataset")
    if args.table is not None:
        return store, store.table(args.table)
    node_tables = [t for t in store.tables.values() if t.kind == "node"]
    if not node_tables:
        raise ValueError(f"{store.name} has no table of nodes")
    return store, max(node_tables, key=lambda t: t.page_count * t.page_bytes)
