"""Reader: one input format of `gids convert`. Each file of this folder defines one or a few.

A reader looks at names, headers and sizes. It returns a Source whose arrays are read later, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gids.convert.source import Source, source_files

READER_BYTES = 300 << 20  # memory that a reader may use besides the buffers that --memory bounds


@dataclass(frozen=True)
class Choices:
    """The user's options for a reader.

    table: KEY or TYPE.KEY of a single array. dtype, shape: of raw binary. labels: name of the label array, if
    there are several. num_nodes: number of nodes of an edge list. skip: names of arrays to leave out.
    allow_dirs: directories outside a gids dataset that may contain its shards. load_graphs:
    dgl.load_graphs, if DGL is installed. others: further files of tables, beside the path. id_column,
    src_column, dst_column: node type or relation ("" for all others) -> column. drop_unknown: leave out edges
    whose ends no node has as its id. memory_bytes: limit for a library that decodes or loads
    a file (None: no limit).
    """

    table: str = "feat"
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    labels: str | None = None
    num_nodes: int | None = None
    skip: tuple[str, ...] = ()
    allow_dirs: tuple[str, ...] = ()
    load_graphs: Callable[[str], Any] | None = None
    others: tuple[Path, ...] = ()
    id_column: Mapping[str, str] = field(default_factory=dict)
    src_column: Mapping[str, str] = field(default_factory=dict)
    dst_column: Mapping[str, str] = field(default_factory=dict)
    drop_unknown: bool = False
    memory_bytes: int | None = None

    def changed(self) -> list[str]:
        """The options that are not as by default, except --dtype, which also applies to tables."""
        default = Choices()
        return [
            _OPTIONS.get(f.name, f"--{f.name.replace('_', '-')}")
            for f in fields(self)
            if f.name not in _NO_OPTIONS and getattr(self, f.name) != getattr(default, f.name)
        ]


_OPTIONS = {"allow_dirs": "--allow-dir", "others": "several SRC"}
_NO_OPTIONS = ("dtype", "load_graphs", "memory_bytes")


@dataclass(frozen=True)
class Reader:
    """A format.

    name: for --from. summary: one line. layout: the files that it reads, and their use. recognises:
    whether an existing path is certainly of this format. read(path, scratch, choices): the Source; keep the
    directory scratch as long as it is used. Raises FormatError. is_raw: whether --dtype is the type of the
    path's content, not a type to cast to. takes: the options that apply, as in Choices.changed. may_crash:
    whether a library's native code loads the file and may crash; then another process reads it first.
    files: those that the source consists of.
    """

    name: str
    summary: str
    layout: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Path, Choices], Source]
    is_raw: Callable[[Path], bool] = lambda _: False
    takes: tuple[str, ...] = ()
    may_crash: bool = False
    files: Callable[[Path], list[Path]] = source_files
