"""Makes text from files safe for a terminal. Called by the command and its progress bar."""

from __future__ import annotations

_MOST_CHARS = 2000


def printable(text: str) -> str:
    """The text as one line of at most 2000 characters, with unprintable characters escaped."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:_MOST_CHARS])
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]} …"
