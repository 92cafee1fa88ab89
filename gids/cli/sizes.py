"""Sizes in bytes as people write and read them. Called by the subcommands."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1}
_UNITS |= {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}
    {"": 1}
    | {u: 1000**i for i, u in enumerate("kmgt", 1)}
    | {f"{u}i": 1024**i for i, u in enumerate("kmgt", 1)}
)


def parse_bytes(text: str) -> int:
    """`4096`, `256MB`, `1.5GiB` in bytes; K, M, G, T are powers of 1000 and Ki, Mi, … of 1024. For argparse."""
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
    return f"{size:.{0 if unit == 'B' or size >= 99.95 else 1}f} {unit}"
