"""The `gids` command. Each subcommand is a module here with `add_parser(subparsers)` and `run(args) -> int`.

Modules import torch inside `run`, so that `gids --help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import gids
from gids.cli.arguments import printable

# A new subcommand adds its module.
COMMANDS = (
    "bench",
    "convert",
    "export",
    "generate",
    "heat",
    "info",
    "partition",
    "quickstart",
    "verify",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gids ARGV`. Returns its exit status: 0, 1 (verify found faults), 2 (an error), 130 (Ctrl-C)."""
    _print_anywhere()
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else ""
    parser, status = _parser(), 0
    try:
        try:
            if command not in COMMANDS and command and not command.startswith("-"):
                similar = _did_you_mean(command, COMMANDS)
                parser.error(f"unknown command {command!r}{similar}; `gids --help` lists all")
            args = parser.parse_args(argv)
            status = int(importlib.import_module(f"gids.cli.{args.command}").run(args))
        finally:  # --list and --help raise SystemExit
            print(end="", flush=True)  # also without a stdout
        return status
    except BrokenPipeError:  # `gids info … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except KeyboardInterrupt as interrupted:  # the command may add what to do
        print(f"\ngids {command}: {str(interrupted) or 'interrupted'}", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("GIDS_TRACEBACK"):
            raise
        print(f"gids {command}: {_one_line(error)}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """A parser of a command, and of those within it, that takes whole names of options only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # Values, not options, such as `--shape -1,16`.
        self._negative_number_matcher = re.compile(r"-(\d+(,-?\d+)*|\d*\.\d+)$")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Called for each command within a command: refuses unknown words with the usage of the innermost."""
        args, unknown = super().parse_known_args(args, namespace)
        if unknown and not unknown[0].startswith("-"):
            takes = [f"{a.metavar or a.dest} ({a.help})" for a in self._actions if not a.option_strings]
            several = any(a.nargs == "+" and not a.option_strings for a in self._actions)
            self.error(
                f"one argument too many: {unknown[0]!r}; it takes {' and '.join(takes) or 'options only'}"
                + "; give all paths before the options" * several
            )
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            first = unknown[0].partition("=")[0]
            advice = _did_you_mean(first, options) if first.startswith("--") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return args, unknown


@functools.cache
def _parser() -> _Parser:
    """The parser of every command. A process that runs several commands makes it once."""
    parser = _Parser(
        prog="gids", description="Train graph neural networks on node features that are stored on SSDs."
    )
    parser.add_argument("--version", action="version", version=f"gids {gids.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"gids.cli.{name}").add_parser(subparsers)
    return parser


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def _print_anywhere() -> None:
    """Replace characters that the output's encoding lacks, instead of failing. Paths keep their bytes.

    A stream that the caller closed (`2>&-`) leads to nothing, and no file of a dataset gets its number.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(number, "w")  # 2 may be a file that the program opened
    else:
        os.close(number)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


def _one_line(error: Exception) -> str:
    from gids.errors import NoDeviceError, StorageError

    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, StorageError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = printable(text)
    if isinstance(error, (OSError, ValueError, KeyError, ImportError, NoDeviceError)) and text:
        return text
    return f"{type(error).__name__}: {text} (GIDS_TRACEBACK=1 shows where)"
