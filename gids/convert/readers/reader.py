"""Reader: what every format of sources is to `gids convert`. Each file of this folder makes one or a few.

A reader looks at names, headers and sizes, and gives a Source whose arrays are read later, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gids.convert.source import Source, source_files

READER_BYTES = 300 << 20  # what a reader may hold beside the buffers that --memory bounds


@dataclass(frozen=True)
class Choices:
    """What the user says about a source, for readers that need to be told.

    table: KEY or TYPE.KEY of a single array. dtype, shape: of raw binary. labels: which label array, where
    there are several. num_nodes: how many nodes there are, where only edges tell. skip: arrays to leave out.
    load_graphs: dgl.load_graphs, when DGL is at hand. memory_bytes: what a library may take that decodes a
    piece of a file, or loads it whole; None: no limit.
    """

    table: str = "feat"
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    labels: str | None = None
    num_nodes: int | None = None
    skip: tuple[str, ...] = ()
    load_graphs: Callable[[str], Any] | None = None
    memory_bytes: int | None = None

    def given(self) -> list[str]:
        """The options of the command that say them, without --dtype, which says other things, too."""
        options = {
            "--table": self.table != "feat",
            "--shape": self.shape is not None,
            "--labels": self.labels is not None,
            "--num-nodes": self.num_nodes is not None,
            "--skip": bool(self.skip),
        }
        return [option for option, is_given in options.items() if is_given]


@dataclass(frozen=True)
class Reader:
    """A format.

    name: for --from. summary: one line. layout: which files it reads, and what becomes of them. recognises:
    whether a path that exists is surely of this format. read(path, scratch, choices): what the path holds;
    scratch is a directory for files that are needed as long as the result. Raises FormatError. files: what a
    source consists of, to notice changes. is_raw: whether a path has no type of its own, so that --dtype says
    how to read it, not what to cast it to. takes: which options of Choices.given mean something here.
    may_crash: whether a library's native code loads the file whole, and may crash on a damaged one; another
    process reads it first.
    """

    name: str
    summary: str
    layout: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Path, Choices], Source]
    files: Callable[[Path], list[Path]] = source_files
    is_raw: Callable[[Path], bool] = lambda _: False
    takes: tuple[str, ...] = ()
    may_crash: bool = False
