"""How a dataset with shards elsewhere is opened, in words. Called by the subcommands that make one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path


def how_to_open(dataset: Path, directories: Sequence[str]) -> str:
    """A line with the call and the options that open a dataset whose shards lie in these directories."""
    places = [os.path.abspath(d) for d in directories]
    options = " ".join(f"--allow-dir {shlex.quote(place)}" for place in places)
    return f"to open it: FeatureStore({str(dataset)!r}, allow_dirs={places}), or gids ... {options}"
