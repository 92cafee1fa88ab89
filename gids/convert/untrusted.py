"""Reads files of a source, which may be damaged or hostile. Called by the readers and run.py.

Opens regular files only: a FIFO or a device may block or never end. Turns the errors of libraries into one
line. Limits the memory of a library that decodes a part of a source, because a few compressed bytes may
become gigabytes. Runs a library that may crash in a process of its own first.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import reprlib
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.errors import FormatError, StorageError

if TYPE_CHECKING:
    from gids.convert.source import Choices, Reader

MAX_MESSAGE_CHARS = 300  # of a library's message
_ZIP_MEMORY_BYTES = 128 << 20  # for the directory of a zip file: of about 100,000 members
_LIBRARIES = ("bz2", "dgl", "gzip", "lzma", "numpy", "pickle", "pyarrow", "scipy", "torch", "yaml", "zipfile")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# Files


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file to read. Raises FormatError for anything else, and OSError."""
    check_file(path)
    return open(path, "rb")


def check_file(path: Path) -> None:
    """Raise FormatError unless a path is a regular file: opening a FIFO waits, and some devices never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        raise FormatError(f"{path} is {kind}; it must be a regular file")


def starts_with(path: Path, *magics: bytes) -> bool:
    """Whether a file begins with one of these bytes. False for a directory."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return file.read(max(map(len, magics))).startswith(magics)


@contextlib.contextmanager
def open_zip(path: Path, fault: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file to read. fault: such as "is not a valid .npz file".

    Raises FormatError for damage, also within the block, for two members of one name, and for too many.
    """
    with open_file(path) as file, parsing(path, fault):
        with at_most(_ZIP_MEMORY_BYTES):
            archive = zipfile.ZipFile(file)
        with archive:
            (name, count), *_ = Counter(archive.namelist()).most_common(1) or [("", 1)]
            if count > 1:
                raise FormatError(f"{path} has two members {shown(name)}")
            yield archive


# Messages

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
    packages = [
        str(frame.f_globals.get("__name__")).partition(".")[0].lstrip("_")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    library = next((p for p in reversed(packages) if p == "gids" or p in _LIBRARIES), "gids")
    if library == "gids":
        return None
    root = os.path.commonpath(files) if files else "the source"
    return FormatError(f"{root} cannot be read: {library} raised {type(error).__name__}: {message_of(error)}")


# Memory

_limiting = threading.RLock()


@contextlib.contextmanager
def at_most(memory_bytes: int | None) -> Iterator[None]:
    """Let allocations fail that add more than memory_bytes to the process (None: no limit).

    Libraries then raise MemoryError or an error of their own. Applies to all threads; one at a time sets it.
    """
    if memory_bytes is None:
        yield
        return
    with _limiting:
        before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = allocated_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if soft < 0 else min(limit, soft), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)  # allocates nothing


def allocated_bytes() -> int:
    """Private memory of this process in bytes, used or not."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


# Libraries


def import_library(path: Path, package: str, module: str) -> Any:
    """A module of a package that reading a path needs. Raises ImportError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{path} needs {package}: pip install {package}") from None


_REFUSED = 3  # exit status of a trial that printed an error to stdout
_RUN = "import sys; from gids.convert.untrusted import try_here; sys.exit(try_here(sys.stdin.buffer.read()))"


def try_to_read(reader: Reader, path: Path, choices: Choices) -> None:
    """Read a path in another process. DGL and SciPy load whole files in native code.

    Raises FormatError if that crashes, needs too much memory or fails.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUN],
        input=pickle.dumps((reader.name, path, choices)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    status = done.returncode
    if status == _REFUSED:
        raise FormatError(done.stdout.decode(errors="replace").rpartition("\0")[2])
    if status:
        how = f"crashed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
        raise FormatError(f"{path} is damaged or needs too much memory: the library that reads it {how}")


def try_here(pickled: bytes) -> int:
    """Read a source as try_to_read asks, within choices.memory_bytes. Returns the exit status."""
    from gids.convert.readers import READERS

    name, path, choices = pickle.loads(pickled)
    (reader,) = (r for r in READERS if r.name == name)
    with tempfile.TemporaryDirectory() as scratch, at_most(choices.memory_bytes):
        try:
            reader.read(path, Path(scratch), choices)
        except ImportError:
            pass  # the conversion reports the missing library
        except Exception as error:
            message = shortened(f"{type(error).__name__}: {message_of(error)}", MAX_MESSAGE_CHARS)
            is_ours = isinstance(error, FormatError)
            print(f"\0{error}" if is_ours else f"\0{path} is damaged: {message}", end="", flush=True)
            return _REFUSED
        return 0
