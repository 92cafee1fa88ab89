"""Options: how to convert a source. Made by `gids convert` and by users."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

DEFAULT_SPLIT = (0.6, 0.2, 0.2)
_FREE = ("workers", "memory_bytes", "overwrite")  # may change when a conversion resumes
_OPTIONS = {
    "dtypes": "--dtype",
    "scales": "--scale",
    "keep_edge_ids": "--no-edge-ids",
    "times": "--no-times",
    "allow_dirs": "--allow-dir",
    "others": "several SRC",
    "dtype": "--dtype of raw data",
}


def option_name(name: str) -> str:
    """The option of `gids convert` that a field of Options or Choices comes from."""
    return _OPTIONS.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class Options:
    """How to convert.

    A gids dataset keeps what is None. page_bytes: of all tables; None: chosen by row, see layout.py.
    stripe: a directory per shard. dtypes: table name or key ("" for all others) -> type to cast to. scales:
    the same -> "row" (default) or "column", for floating tables cast to int8. order: of rows that share
    pages, see layout.py. index_dtype: "int64" (default), "int32" or "auto" (int32 where it fits).
    reverse_edges, self_loops: see edges. sort_neighbors, dedup: see DatasetWriter.write_edges. times: store
    the times of nodes and edges, and sort edges by them. split: fractions of train, val and test for labels
    without splits; (): no random split; None: DEFAULT_SPLIT. split_column: column of masks of shape (nodes,
    splits). workers and memory_bytes do not change the result. overwrite: replace a dataset that is there.
    """

    page_bytes: int | None = None
    stripe: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    order: str | None = None
    index_dtype: str | None = None
    keep_edge_ids: bool = True
    reverse_edges: bool = False
    self_loops: bool = False
    sort_neighbors: bool = False
    dedup: bool = False
    times: bool = True
    split: tuple[float, ...] | None = None
    split_column: int | None = None
    seed: int = 0
    workers: int = 2
    memory_bytes: int = 256 << 20
    overwrite: bool = False

    def key(self) -> dict[str, Any]:
        """The options that a resumed conversion must have in common with the first run."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FREE}
        values["stripe"] = [os.path.realpath(d) for d in self.stripe]
        return {option_name(name): value for name, value in values.items()}
