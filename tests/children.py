"""Processes of tests that must be interrupted."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable


def go_once(found: Callable[[], bool]) -> None:
    """In a child: print "go", from a thread, once found() is true."""

    def watch() -> None:
        while not found():
            time.sleep(1e-3)
        print("go", flush=True)

    threading.Thread(target=watch, daemon=True).start()


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Ctrl-C for a child once it printed "go": its exit status, what came on stdout since, and stderr."""
    with process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "go\n":
            pass
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors
