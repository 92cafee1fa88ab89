"""Reads files of a source, which may be damaged or hostile. Called by the readers and run.py.

Opens regular files only: a FIFO or a device may block or never end. Turns the errors of libraries into one
line. Limits the memory of a library that decodes a part of a source, because a few compressed bytes may
become gigabytes. Runs a library that may crash in a process of its own first.
"""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING

from gids.errors import FormatError, StorageError

if TYPE_CHECKING:
    from gids.convert.readers.reader import Choices, Reader

MAX_MESSAGE_CHARS = 300  # of a library's message
MAX_DIRECTORY_BYTES = 8 << 20  # of a zip file: about 100,000 members, which need 100 MB of memory
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
    check_file(path)  # opening a socket fails, and opening some devices has effects
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_mode(path, os.fstat(fd).st_mode)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def check_file(path: Path) -> None:
    """Raise FormatError unless a path is a regular file. For libraries that open files themselves."""
    if "\0" in os.fspath(path):
        raise FormatError(f"{os.fspath(path)!r} cannot be a path: it has a NUL")
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise FormatError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'not a file')}; it must be a regular file"
        )


def read_file(path: Path, most_bytes: int, what: str) -> bytes:
    """The content of a file. Raises FormatError if it has more than most_bytes. what: its name there."""
    with open_file(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise FormatError(f"{path} has more than {most_bytes} bytes, the limit for {what}")
    return data


def starts_with(path: Path, *magics: bytes) -> bool:
    """Whether a file begins with one of these bytes. False for a directory."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return file.read(max(map(len, magics))).startswith(magics)


@contextlib.contextmanager
def open_zip(path: Path, fault: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file to read. fault: such as "is not a valid .npz file".

    Raises FormatError for damage, also within the block, and for two members of one name.
    """
    with open_file(path) as file, parsing(path, fault):
        bounded = _BoundedReads(file.raw)
        with zipfile.ZipFile(bounded) as archive:
            bounded.max_bytes = None
            (name, count), *_ = Counter(archive.namelist()).most_common(1) or [("", 1)]
            if count > 1:
                raise FormatError(f"{path} has two members {shown(name)}")
            yield archive


class _BoundedReads(io.BufferedReader):
    """A zip file with a limit for each read, until max_bytes is None."""

    max_bytes: int | None = MAX_DIRECTORY_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if self.max_bytes is None:
            return super().read(size)
        size = self.max_bytes + 1 if size is None or size < 0 else min(size, self.max_bytes + 1)
        data = super().read(size)
        if len(data) > self.max_bytes:
            raise ValueError(f"it has too many members: its directory has more than {self.max_bytes} bytes")
        return data


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


# Memory

_lock = threading.Lock()
_guards = 0  # threads within at_most
_limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)  # of this process outside of guards


@contextlib.contextmanager
def at_most(memory_bytes: int | None) -> Iterator[None]:
    """Let allocations fail that add more than memory_bytes to the process (None: no limit).

    Libraries then raise MemoryError or an error of their own. Applies to all threads until the last one
    leaves.
    """
    global _guards, _limits
    if memory_bytes is None:
        yield
        return
    with _lock:
        if not _guards:
            _limits = resource.getrlimit(resource.RLIMIT_DATA)
        _guards += 1
        limit = allocated_bytes() + memory_bytes
        own, most = _limits
        resource.setrlimit(resource.RLIMIT_DATA, (limit if own < 0 else min(limit, own), most))
    try:
        yield
    finally:
        with _lock:
            _guards -= 1
            if not _guards:
                resource.setrlimit(resource.RLIMIT_DATA, _limits)


def allocated_bytes() -> int:
    """Private memory of this process in bytes, used or not."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


# Libraries that may crash

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
