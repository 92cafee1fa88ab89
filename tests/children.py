"""Processes of tests that must be interrupted."""

from __future__ import annotations

import signal
import subprocess
import time


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Ctrl-C for a child a second after it printed "go": its exit status, what came on stdout, and stderr."""
    with process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "go\n":
            pass
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    return process.returncode, output, errors
