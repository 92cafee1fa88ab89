"""Divide a dataset into parts, one per process or machine. Called by `gids partition`.

Rows and edges, which are large, are divided; every part has all arrays about nodes. All parts are built
beside their final directory and published together, by one rename.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gids.errors import FormatError
from gids.store.feature_store import FeatureStore
from gids.store.files import array_bytes
from gids.store.manifest import MAX_PARTS, Manifest, Part, manifest_checksum
from gids.store.names import Relation, describe_type
from gids.store.part import part_name, refuse_part
from gids.write.files import check_space
from gids.write.partition.divide import Division
from gids.write.partition.owners import FROM_FILES, METHODS, OwnerFiles, hash_owners, range_owners
from gids.write.workplace import Workplace, dataset_path

__all__ = ["METHODS", "PartFigures", "Report", "partition"]


@dataclass(frozen=True)
class PartFigures:
    """Of one part: the nodes that it owns (rows), those of the train splits (seeds), their in-edges; bytes of
    its files."""

    rows: int
    seeds: int
    in_edges: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """Of all parts. cut_edges: edges whose source is in another part than their destination."""

    method: str
    parts: tuple[PartFigures, ...]
    edges: int
    cut_edges: int

    @property
    def cut_share(self) -> float:
        return self.cut_edges / max(1, self.edges)

    def balance(self, figure: str) -> float:
        """The largest part divided by the mean: 1 is perfect. figure: a field of PartFigures."""
        values = [getattr(part, figure) for part in self.parts]
        return max(values) * len(values) / sum(values) if sum(values) else 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "parts": [asdict(part) for part in self.parts],
            "edges": self.edges,
            "cut_edges": self.cut_edges,
            "cut_share": self.cut_share,
            "balance": {field.name: self.balance(field.name) for field in fields(PartFigures)},
        }


def _silent(*_: Any) -> None:
    pass


def partition(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    parts: int,
    *,
    method: str = "hash",
    owners: Mapping[str, str | os.PathLike[str]] | None = None,
    seed: int = 0,
    allow_dirs: Sequence[str | os.PathLike[str]] = (),
    workers: int = 2,
    memory_bytes: int = 256 << 20,
    on_total: Callable[[int], None] = _silent,
    on_bytes: Callable[[int], None] = _silent,
) -> Report:
    """Divide the dataset at `path` into parts, and write them to the directory `out`.

    parts: 1 to 4096. method: how nodes get owners, one of METHODS. owners: node type ("": the only one) ->
    .npy file with the part of each node, int[nodes], in place of a method. seed: of method "hash".
    allow_dirs: directories outside the dataset that may contain its shards. workers: number of threads.
    memory_bytes: limit of the memory for buffers. on_total(bytes), on_bytes(n):
    progress, from any thread.

    Returns what each part has. `out` appears when all parts are complete. A kill leaves OUT.partial, which
    the next call for `out` removes; it starts again. Raises ValueError for an invalid argument, FormatError
    for a dataset that cannot be divided, FileExistsError if something is at `out`, StorageError for a full
    disk and for damaged data.
    """
    if not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"parts={parts}; it must be 1 to {MAX_PARTS}")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose {', '.join(METHODS)}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed}; it must be 0 to 2^64 - 1")
    if workers < 1 or memory_bytes < 1 << 20:
        raise ValueError(f"workers={workers}, memory_bytes={memory_bytes}; they must be at least 1 and 1 MiB")
    with contextlib.closing(FeatureStore(path, allow_dirs=allow_dirs)) as store:
        refuse_part(store, "gids partition", "partition the whole dataset")
        manifest = store.manifest
        for relation in manifest.relations:
            if not relation.arrays:
                raise FormatError(
                    f"relation {describe_type(relation.type)} has no topology, so its edges have no owners: "
                    "convert the source with its edges, or without the features of these edges"
                )
        files = None if owners is None else OwnerFiles(owners, manifest)
        method = method if files is None else FROM_FILES
        first = Part(0, parts, manifest_checksum(manifest), method, manifest.topology_crc)
        workplace = Workplace(dataset_path(out), [], None)
        division = Division(store, manifest, workplace, first, workers, memory_bytes, on_bytes)
        try:
            return _run(division, files, seed, on_total)
        except BaseException as error:
            explained = workplace.explain_full(error, "it") if isinstance(error, OSError) else None
            workplace.close(discard=True)
            if explained is None:
                raise
            raise explained from error


def _run(
    division: Division,
    files: OwnerFiles | None,
    seed: int,
    on_total: Callable[[int], None],
) -> Report:
    manifest, workplace, method = division.manifest, division.workplace, division.first.method
    needed_bytes = division.needed_bytes()
    check_space([(workplace.path.parent, needed_bytes)])
    on_total(division.work_bytes())
    workplace.needed_bytes = needed_bytes
    for root in division.roots:
        root.mkdir(exist_ok=True)
    for nodes in manifest.nodes:
        if files is not None:
            owners = files.owners(nodes.type, division.parts)
        elif method == "range":
            owners = range_owners(nodes.count, division.parts)
        else:
            owners = hash_owners(nodes.type, nodes.count, division.parts, seed)
        division.write_owners(nodes, owners)
    counts = division.count()
    held: dict[str | Relation, list[int]] = {}  # the nodes and edges of each part, by type
    held |= {n.type: of_parts for n, of_parts in zip(manifest.nodes, counts["nodes"], strict=True)}
    held |= {r.type: of_parts for r, of_parts in zip(manifest.relations, counts["edges"], strict=True)}
    node_arrays = {n.type: division.copy_node_arrays(n) for n in manifest.nodes}
    edges = {r.type: division.divide_topology(r, held[r.type]) for r in manifest.relations}
    tables = [division.divide_table(t, held[t.type]) for t in manifest.tables]
    manifests = [
        Manifest(
            tuple(replace(n, arrays=node_arrays[n.type], held=held[n.type][part]) for n in manifest.nodes),
            tuple(
                replace(r, arrays=edges[r.type][part], held=held[r.type][part]) for r in manifest.relations
            ),
            tuple(of_parts[part] for of_parts in tables),
            replace(division.first, index=part),
        )
        for part in range(division.parts)
    ]
    workplace.publish({part_name(i): m for i, m in enumerate(manifests)})
    figures = []
    for part, of_part in enumerate(manifests):
        size_bytes = sum(map(array_bytes, of_part.arrays()))
        size_bytes += sum(t.geometry.page_count * t.page_bytes for t in of_part.tables)
        rows, in_edges = (sum(of_parts[part] for of_parts in counts[kind]) for kind in ("nodes", "edges"))
        figures.append(PartFigures(rows, counts["seeds"][part], in_edges, size_bytes))
    return Report(method, tuple(figures), sum(r.count for r in manifest.relations), counts["cut"])
