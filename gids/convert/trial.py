"""Reads a source in a separate process first, if the library that reads it may crash. Called by readers.

DGL and SciPy load whole files in native code. A damaged file may crash them or make them allocate too much.
Then that process dies, not the conversion.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gids.convert.damage import MAX_MESSAGE_CHARS, message_of, shortened
from gids.convert.memory_guard import at_most
from gids.errors import FormatError

if TYPE_CHECKING:
    from gids.convert.readers.reader import Choices, Reader

_REFUSED = 3  # exit status of a trial that printed an error to stdout
_RUN = "import sys; from gids.convert.trial import main; sys.exit(main(sys.stdin.buffer.read()))"


def try_to_read(reader: Reader, path: Path, choices: Choices) -> None:
    """Raise FormatError if reading the path crashes, needs too much memory or fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUN],
        input=pickle.dumps((reader.name, path, choices)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return
    if done.returncode == _REFUSED:
        raise FormatError(done.stdout.decode(errors="replace").rpartition("\0")[2])
    how = f"ended with status {done.returncode}"
    if done.returncode < 0:
        how = f"crashed ({signal.Signals(-done.returncode).name})"
    raise FormatError(f"{path} is damaged or needs too much memory: the library that reads it {how}")


def main(pickled: bytes) -> int:
    """Read a source as try_to_read asks, within choices.memory_bytes. Returns the exit status."""
    from gids.convert.readers import READERS

    name, path, choices = pickle.loads(pickled)
    (reader,) = (r for r in READERS if r.name == name)
    with tempfile.TemporaryDirectory() as scratch, at_most(choices.memory_bytes):
        try:
            reader.read(path, Path(scratch), choices)
        except ImportError:
            return 0  # the conversion reports the missing library
        except FormatError as error:
            sys.stdout.write(f"\0{error}")
        except Exception as error:
            message = shortened(f"{type(error).__name__}: {message_of(error)}", MAX_MESSAGE_CHARS)
            sys.stdout.write(f"\0{path} is damaged: {message}")
        else:
            return 0
        sys.stdout.flush()
        return _REFUSED
