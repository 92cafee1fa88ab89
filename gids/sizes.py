"""Sizes in bytes as people write and read them, and the control groups of memory. Used by every part."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

_UNITS = {"": 1}
_UNITS |= {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}


class SizeError(ValueError, argparse.ArgumentTypeError):
    """The value is not a size in bytes. argparse prints the message as it is."""


def parse_bytes(size: float | str, name: str | None = None) -> int:
    """Return a size in bytes: 4096, 16e9, "4096", "256MB" (powers of 1000) or "1.5GiB" (powers of 1024).

    name: the argument's name, for the error. Also a type for argparse. Fractions of a byte are dropped.
    Raises SizeError, a ValueError, if the value is not a size of 0 bytes, or of 1 byte or more.
    """
    match = (
        re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", size.lower())
        if isinstance(size, str)
        else None
    )
    number = size if match is None else Fraction(match[1]) * _UNITS[match[2]]
    try:
        if not isinstance(number, (str, bool)) and (number >= 1 or number == 0):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    what = f"{name}={size!r}" if name else repr(size)
    raise SizeError(f"{what} is not a size in bytes: use 4096, 256MB or 1.5GiB")


def format_bytes(size_bytes: int) -> str:
    """`4.1 GB`: about three digits, powers of 1000."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    digits = 0 if unit == "B" or size >= 99.95 else 1
    return f"{size:.{digits}f} {unit}"


def memory_groups(root: Path = Path("/")) -> Iterator[tuple[Path, str, str]]:
    """This process's memory control groups and their parents: (directory, limit file, usage file).

    root: contains proc and sys. A kernel may have no groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers == "":
            names = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(top):
                yield group, *names
