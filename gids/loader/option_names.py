"""Errors for argument names that a function does not have. Used by gids.open, the loaders and layerwise.

The error says that an option belongs to gids.open(), or suggests the name that is meant.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import ParamSpec, TypeVar

from gids.loader.options import Options, Tuning

_TUNING = "gids.Tuning"
P = ParamSpec("P")
R = TypeVar("R")

TUNING = tuple(f.name for f in fields(Tuning))
OPTIONS = (*(f.name for f in fields(Options) if f.name not in TUNING), "allow_dirs", "tuning")
"""Keyword arguments of gids.open(); those of gids.Tuning apart."""


def check_names(caller: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a given name that is not known. caller: as the user writes it."""
    known = list(known)
    for name in names:
        if name in known:
            continue
        if name in OPTIONS and caller == _TUNING:
            raise TypeError(f"{caller} has no argument {name!r}: write gids.open(PATH, {name}=...)")
        if name in TUNING:
            raise TypeError(
                f"{caller} has no argument {name!r}: write gids.open(PATH, tuning=gids.Tuning({name}=...))"
            )
        if name in OPTIONS:
            raise TypeError(
                f"{caller} has no argument {name!r}: it is an option of gids.open(). Give this loader "
                f"gids.open(PATH, {name}=...) instead of the path"
            )
        close = difflib.get_close_matches(name, [*known, *OPTIONS, *TUNING], n=1)
        if not close:
            raise TypeError(f"{caller} has no argument {name!r} (it has {', '.join(known)})")
        home = "" if close[0] in known else " of gids.open()" if close[0] in OPTIONS else " of gids.Tuning()"
        raise TypeError(f"{caller} has no argument {name!r}; did you mean {close[0]!r}{home}?")


def explain_names(caller: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: check_names for a function's keyword arguments. The typed signature stays as it is."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [
            p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.POSITIONAL_ONLY
        ]
        known = [name for name in known if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_names(caller, kwargs, known)
            return function(*args, **kwargs)

        return checked

    return decorate


Tuning.__init__ = explain_names(_TUNING)(Tuning.__init__)  # type: ignore[method-assign]  # a dataclass made it
