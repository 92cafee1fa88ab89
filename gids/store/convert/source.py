"""Source: what a reader found, as rows that can be read a range at a time. Used by run.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gids.errors import FormatError
from gids.store.names import Relation
from gids.store.rows import Rows
from gids.store.topology import EdgeSource


@dataclass(frozen=True)
class TableSource:
    """One table: kind "node" or "edge", type (node type or (src, rel, dst)), key, rows."""

    kind: str
    type: str | Relation
    key: str
    rows: Rows


@dataclass(frozen=True)
class InEdges:
    """Topology that is already sorted by destination (CSC)."""

    indptr: Rows
    indices: Rows
    edge_ids: Rows | None


@dataclass
class Source:
    """Everything that a dataset is made from.

    nodes: how many of each type, as far as known. graphs, labels, splits (by node type, then "train", "val",
    "test"). notes: what was found and left out, one sentence each.
    """

    nodes: dict[str, int] = field(default_factory=dict)
    tables: list[TableSource] = field(default_factory=list)
    graphs: dict[Relation, InEdges | EdgeSource] = field(default_factory=dict)
    labels: dict[str, Rows] = field(default_factory=dict)
    splits: dict[str, dict[str, Rows]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_nodes(self, ntype: str, count: int, what: str) -> None:
        """Learn how many nodes of a type there are. Raises FormatError when `what` disagrees."""
        known = self.nodes.setdefault(ntype, count)
        if known != count:
            raise FormatError(f"{what} is for {count} {ntype!r} nodes, but there are {known}")

    def node_count(self, ntype: str) -> int:
        if ntype not in self.nodes:
            raise FormatError(
                f"the number of {ntype!r} nodes is not known: add their features, labels, or num_nodes.npy"
            )
        return self.nodes[ntype]


def source_files(path: Path) -> list[Path]:
    """The files that a source consists of, sorted."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def starts_with(path: Path, *magics: bytes) -> bool:
    """Whether a file begins with one of these bytes; False for directories."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(max(map(len, magics))).startswith(magics)
