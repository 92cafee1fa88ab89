"""What is wrong with a source, in one line, whatever a library raised. Called by the readers and run.py."""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gids.errors import FormatError, StorageError

MAX_MESSAGE_CHARS = 300  # of what a library says
_LIBRARIES = ("bz2", "dgl", "gzip", "lzma", "numpy", "pickle", "pyarrow", "scipy", "torch", "yaml", "zipfile")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2


def shown(value: object) -> str:
    """repr(value), cut to about a line: for values from a source in messages."""
    return _short.repr(value)


def shortened(text: str, most: int = 60) -> str:
    """A name from a source for a message, cut to a length that can be read."""
    return text if len(text) <= most else f"{text[:most]}…"


@contextlib.contextmanager
def parsing(path: Path | str, fault: str) -> Iterator[None]:
    """Within it a library parses a file: whatever it raises for damage becomes a FormatError.

    fault: "is damaged", or what else the message says of the file. FormatError, ImportError and errors of the
    file system pass.
    """
    try:
        yield
    except (FormatError, StorageError, ImportError):
        raise
    except Exception as error:  # libraries raise many kinds for damaged files
        if isinstance(error, OSError) and error.errno:
            raise
        raise FormatError(f"{path} {fault}: {said_by(error)}") from error


def said_by(error: BaseException) -> str:
    """The first line of what a library says, cut to a length that can be read."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it is nested too deeply, or needs more memory than there is"
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return shortened(text, MAX_MESSAGE_CHARS)


def from_library(error: BaseException, files: Sequence[Path]) -> FormatError | None:
    """A FormatError for what a parser library raised where no reader expected it; None for other errors.

    files: what the source consists of.
    """
    if isinstance(error, (FormatError, ImportError, OSError)):
        return None
    library = _library_of(error.__traceback__)
    if library is None:
        return None
    place = os.path.commonpath(files) if files else "the source"
    return FormatError(f"{place} cannot be read: {library} says {type(error).__name__}: {said_by(error)}")


def _library_of(trace: TracebackType | None) -> str | None:
    """The library whose code raised, called by gids."""
    library: str | None = None
    while trace is not None:
        name: Any = trace.tb_frame.f_globals.get("__name__")
        package = str(name).partition(".")[0].lstrip("_")
        if package == "gids":
            library = None
        elif library is None and package in _LIBRARIES:
            library = package
        trace = trace.tb_next
    return library
