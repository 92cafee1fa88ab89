"""What isolation.py runs first in a fresh process: turn huge pages off, then become ``python ARGUMENTS``.

The setting stays after exec and in child processes, so it holds before anything is allocated. Run by its
path, without gids or site packages: imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_THP_DISABLE = 41


def main() -> None:
    numbers = [ctypes.c_ulong(number) for number in (1, 0, 0, 0)]
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, *numbers)  # where it is refused, huge pages stay
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
