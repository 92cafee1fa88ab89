"""Turns huge pages off and then runs ``python ARGUMENTS``. isolation.py starts fresh processes with it.

The setting survives exec and is inherited by child processes. Run by its path, without gids or site packages:
it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_THP_DISABLE = 41


def main() -> None:
    numbers = [ctypes.c_ulong(number) for number in (1, 0, 0, 0)]
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, *numbers)  # if refused, huge pages stay on
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
