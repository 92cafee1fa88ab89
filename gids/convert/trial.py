"""Reads a source in a separate process first, if the library that reads it may crash. Called by readers.

DGL and SciPy load whole files in native code. A damaged file may crash them or make them allocate too much.
Then that process dies, not the conversion.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.convert.damage import MAX_MESSAGE_CHARS, said_by, shortened
from gids.convert.memory_guard import at_most
from gids.errors import FormatError

if TYPE_CHECKING:
    from gids.convert.readers.reader import Choices, Reader

_REFUSED = 3  # exit status of a trial that printed an error to stdout
_RUN = "import sys; from gids.convert.trial import main; sys.exit(main(*sys.argv[1:]))"


def try_to_read(reader: Reader, path: Path, choices: Choices) -> None:
    """Raise FormatError if reading the path crashes, needs too much memory or fails."""
    function = choices.load_graphs
    loader = "" if function is None else f"{function.__module__}:{function.__qualname__}"
    limit = "" if choices.memory_bytes is None else str(choices.memory_bytes)
    command = [sys.executable, "-P", "-c", _RUN, reader.name, str(path), loader, limit]
    silent = subprocess.DEVNULL
    done = subprocess.run(command, stdin=silent, stdout=subprocess.PIPE, stderr=silent)
    if done.returncode == 0:
        return
    if done.returncode == _REFUSED:
        raise FormatError(done.stdout.decode(errors="replace").rpartition("\0")[2])
    how = f"ended with status {done.returncode}"
    if done.returncode < 0:
        how = f"crashed ({signal.Signals(-done.returncode).name})"
    raise FormatError(f"{path} is damaged or needs too much memory: the library that reads it {how}")


def main(name: str, path: str, loader: str, memory_bytes: str) -> int:
    """Read a source with the reader of that name, within memory_bytes. Returns the exit status."""
    from gids.convert.readers import READERS, Choices

    (reader,) = (r for r in READERS if r.name == name)
    load_graphs = _function(loader) if loader else None
    with tempfile.TemporaryDirectory() as scratch, at_most(int(memory_bytes) if memory_bytes else None):
        try:
            reader.read(Path(path), Path(scratch), Choices(load_graphs=load_graphs))
        except ImportError:
            return 0  # the conversion reports the missing library
        except FormatError as error:
            sys.stdout.write(f"\0{error}")
        except Exception as error:
            said = shortened(f"{type(error).__name__}: {said_by(error)}", MAX_MESSAGE_CHARS)
            sys.stdout.write(f"\0{path} is damaged: {said}")
        else:
            return 0
        sys.stdout.flush()
        return _REFUSED


def _function(name: str) -> Callable[[str], Any]:
    module, _, function = name.partition(":")
    found: Callable[[str], Any] = getattr(importlib.import_module(module), function)
    return found
