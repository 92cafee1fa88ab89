"""Sizes in bytes as people write and read them. Called by the subcommands."""

from __future__ import annotations

import argparse
import re

from gids.sizes import format_bytes

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1}
_UNITS |= {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}


def parse_bytes(text: str) -> int:
    """`4096`, `256MB` (powers of 1000) or `1.5GiB` (of 1024) in bytes; a type for argparse."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 256MB or 1.5GiB")
    return int(float(found[1]) * _UNITS[found[2]])
