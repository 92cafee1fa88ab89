"""Source: what a reader found, as rows that can be read a range at a time. Used by run.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gids.convert.source_file import open_file
from gids.errors import FormatError
from gids.store.geometry import MAX_ROWS
from gids.store.names import Relation, check_name
from gids.store.rows import Rows
from gids.write.edges import EdgeSource


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


@dataclass(frozen=True)
class Mask:
    """Which nodes a split has, not yet looked at; `what` names the array in messages."""

    rows: Rows
    what: str


@dataclass
class Source:
    """Everything that a dataset is made from.

    nodes: how many of each type, as far as known. graphs, labels, splits (by node type, then "train", "val",
    "test"); masks the same, for masks_to_splits. notes: what was found and left out, one sentence each;
    warnings: what a user should know even if he wants no notes. skip: arrays to leave out, by name; skipped:
    those that were found.
    """

    nodes: dict[str, int] = field(default_factory=dict)
    tables: list[TableSource] = field(default_factory=list)
    graphs: dict[Relation, InEdges | EdgeSource] = field(default_factory=dict)
    labels: dict[str, Rows] = field(default_factory=dict)
    splits: dict[str, dict[str, Rows]] = field(default_factory=dict)
    masks: dict[str, dict[str, Mask]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skip: tuple[str, ...] = ()
    skipped: set[str] = field(default_factory=set)
    _counted_by: dict[str, str] = field(default_factory=dict)

    def skips(self, name: str) -> bool:
        """Whether the user wants an array left out."""
        if name in self.skip:
            self.skipped.add(name)
        return name in self.skip

    def add_nodes(self, ntype: str, count: int, what: str, skip: str = "") -> None:
        """Learn how many nodes of a type there are. Raises FormatError when `what` disagrees, and for a name
        or a count that no dataset can have.

        skip: the array that the user may leave out then.
        """
        check_name(ntype, f"the node type of {what}")
        if not 0 <= count <= MAX_ROWS:
            raise FormatError(f"{what} is for {count} {ntype!r} nodes; there can be 0 to {MAX_ROWS}")
        known = self.nodes.setdefault(ntype, count)
        by = self._counted_by.setdefault(ntype, what)
        if known != count:
            cure = f"; --skip {skip} leaves it out" if skip else ""
            raise FormatError(f"{what} is for {count} {ntype!r} nodes, but there are {known}, by {by}{cure}")

    def add_mask(self, ntype: str, split: str, rows: Rows, what: str) -> None:
        """Raises FormatError when there is one already."""
        masks = self.masks.setdefault(ntype, {})
        if split in masks:
            raise FormatError(f"{masks[split].what} and {what} mean the same")
        masks[split] = Mask(rows, what)

    def node_count(self, ntype: str) -> int:
        if ntype not in self.nodes:
            raise FormatError(
                "; ".join(
                    [
                        f"the number of {ntype!r} nodes is not known: add their features, labels, or "
                        "num_nodes.npy",
                        *self.warnings,
                    ]
                )
            )
        return self.nodes[ntype]


def source_files(path: Path) -> list[Path]:
    """The files that a source consists of, sorted."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def starts_with(path: Path, *magics: bytes) -> bool:
    """Whether a file begins with one of these bytes; False for directories."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return file.read(max(map(len, magics))).startswith(magics)
