"""The command `gids`, run in this process."""

from __future__ import annotations

from gids.cli import main


def gids(*words: object) -> None:
    """Run a command that must end well."""
    assert main([str(word) for word in words]) == 0
