"""Sizes in bytes as people read them. Called by every part; knows none of them."""

from __future__ import annotations


def format_bytes(size_bytes: int) -> str:
    """`4.1 GB`: three digits or so, powers of 1000."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    digits = 0 if unit == "B" or size >= 99.95 else 1
    return f"{size:.{digits}f} {unit}"
