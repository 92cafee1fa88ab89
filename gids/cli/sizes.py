"""Sizes in bytes as people write and read them. Called by the subcommands."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1}
_UNITS |= {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}


def parse_bytes(text: str) -> int:
    """`4096`, `256MB` (powers of 1000) or `1.5GiB` (of 1024) in bytes; a type for argparse."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 256MB or 1.5GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def format_bytes(size_bytes: int) -> str:
    """`4.1 GB`: three digits or so, powers of 1000."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    digits = 0 if unit == "B" or size >= 99.95 else 1
    return f"{size:.{digits}f} {unit}"
