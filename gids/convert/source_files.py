"""Opens the files of a source, and puts a file's name before the error of a library that reads it.

Called by everything in this package that reads files. Knows no format.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import reprlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gids.errors import FormatError, StorageError

_EXTRAS = {"pyarrow": "parquet", "scipy": "matlab", "yaml": "graphbolt", "h5py": "hdf5"}
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2


@contextlib.contextmanager
def reading(path: os.PathLike[str] | str) -> Iterator[None]:
    """Turn an error of a library into FormatError: "PATH cannot be read: message".

    FormatError, ImportError and errors that name a file pass.
    """
    try:
        yield
    except (FormatError, StorageError, ImportError):
        raise
    except Exception as error:  # libraries raise many kinds for damaged files
        if isinstance(error, OSError) and error.filename is not None:
            raise
        message = next(iter(str(error).strip().splitlines()), "")
        if not message or isinstance(error, KeyError):
            message = f"{type(error).__name__} {message}".strip()
        raise FormatError(f"{path} cannot be read: {message}") from error


def starts_with(path: Path, *magics: bytes) -> bool:
    """Whether a file begins with one of these bytes. False for a directory."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(max(map(len, magics))).startswith(magics)


@contextlib.contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file to read. Raises FormatError for damage, also within the block."""
    with reading(path), zipfile.ZipFile(path) as archive:
        yield archive


def import_library(path: Path, module: str) -> Any:
    """A module that reading a path needs. Raises ImportError, which says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{path} needs {package}: pip install 'gids-loader[{_EXTRAS.get(package, package)}]' ({error})"
        ) from None


def shown(value: object) -> str:
    """repr(value) of a value from a source, cut to about a line."""
    return _short.repr(value)
