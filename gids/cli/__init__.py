"""The `gids` command. Each subcommand is a module here with `add_parser(subparsers)` and `run(args) -> int`.

A module imports what is slow (torch) inside `run`, so that `gids --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# A new subcommand adds its module.
COMMANDS = ("bench", "convert", "export", "generate", "heat", "info", "quickstart", "restripe", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gids ARGV`. Returns its exit status: 0, 1 (verify found faults), 2 (an error), 130 (Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="gids", description="Features of graph neural networks, on SSDs.")
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {name: importlib.import_module(f"gids.cli.{name}") for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status = modules[args.command].run(args)
        sys.stdout.flush()
        return int(status)
    except BrokenPipeError:  # `gids info … | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"\ngids {args.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("GIDS_TRACEBACK"):
            raise
        print(f"gids {args.command}: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    from gids.errors import NoDeviceError, StorageError

    text = " ".join(str(error).split())
    if isinstance(error, OSError) and not isinstance(error, StorageError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, (OSError, ValueError, KeyError, ImportError, NoDeviceError)) and text:
        return text
    return f"{type(error).__name__}: {text} (GIDS_TRACEBACK=1 shows where)"


class _Version(argparse.Action):
    """--version, looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"gids {version('gids')}")
        parser.exit()
