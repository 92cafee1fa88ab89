"""Turns the errors of libraries into one line about a damaged source. Called by the readers and run.py."""

from __future__ import annotations

import contextlib
import os
import reprlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from gids.errors import FormatError, StorageError

MAX_MESSAGE_CHARS = 300  # of a library's message
_LIBRARIES = ("bz2", "dgl", "gzip", "lzma", "numpy", "pickle", "pyarrow", "scipy", "torch", "yaml", "zipfile")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2


def shown(value: object) -> str:
    """repr(value) of a value from a source, cut to about a line."""
    return _short.repr(value)


def shortened(text: str, most: int = 60) -> str:
    """A text from a source, cut for a message."""
    return text if len(text) <= most else f"{text[:most]}…"


@contextlib.contextmanager
def parsing(path: Path | str, fault: str) -> Iterator[None]:
    """Turn the errors of a library that parses a file into FormatError: "PATH FAULT: message".

    fault: such as "is damaged". FormatError, ImportError and errors of the file system pass.
    """
    try:
        yield
    except (FormatError, StorageError, ImportError):
        raise
    except Exception as error:  # libraries raise many kinds for damaged files
        if isinstance(error, OSError) and error.errno:
            raise
        raise FormatError(f"{path} {fault}: {message_of(error)}") from error


def message_of(error: BaseException) -> str:
    """The first line of a library's message, cut for a message of ours."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it is nested too deeply, or needs too much memory"
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return shortened(text, MAX_MESSAGE_CHARS)


def from_library(error: BaseException, files: Sequence[Path]) -> FormatError | None:
    """A FormatError for an unexpected error of a library, None for other errors. files: of the source."""
    if isinstance(error, (FormatError, ImportError, OSError)) or not isinstance(error, Exception):
        return None
    library = ""  # the one that gids called and that raised
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0].lstrip("_")
        if package == "gids":
            library = ""
        elif not library and package in _LIBRARIES:
            library = package
    if not library:
        return None
    root = os.path.commonpath(files) if files else "the source"
    return FormatError(f"{root} cannot be read: {library} raised {type(error).__name__}: {message_of(error)}")
