"""One bench command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gids.bench.report import Report

if TYPE_CHECKING:
    from gids.cli.progress import Progress


@dataclass(frozen=True)
class Session:
    """The arguments of a command, its report, and its progress in runs."""

    args: argparse.Namespace
    report: Report
    progress: Progress
