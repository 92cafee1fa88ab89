"""partition: divides a dataset into parts, which are datasets. Can resume. Called by `gids partition`.

What is per node is in every part; what is large, rows and edges, is divided. All parts are built beside their
final directory and published together, by one rename.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gids.errors import FormatError
from gids.store.array_checks import file_crc32c
from gids.store.feature_store import FeatureStore
from gids.store.files import array_bytes, map_array
from gids.store.geometry import div_ceil
from gids.store.manifest import (
    MAX_PARTS,
    OWNER,
    ArrayEntry,
    Manifest,
    NodesEntry,
    Part,
    RelationEntry,
    ScaleEntry,
    TableEntry,
    array_entry,
    dump_manifest,
    entry_json,
    manifest_checksum,
    owner_dtype,
)
from gids.store.names import describe_type, encode_path, table_path
from gids.store.part import part_name, refuse_part
from gids.stored_file import AnyFile
from gids.write.files import ArrayFile
from gids.write.page_sink import PageSink
from gids.write.partition import divide
from gids.write.partition.owners import METHODS, GraphMethod, hash_owners, range_owners
from gids.write.publish import dataset_path
from gids.write.space import check_space, total_bytes
from gids.write.workplace import Workplace, finish_published


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
    seed: int = 0,
    allow_dirs: Sequence[str | os.PathLike[str]] = (),
    workers: int = 2,
    memory_bytes: int = 256 << 20,
    overwrite: bool = False,
    say: Callable[[str], None] = _silent,
    on_total: Callable[[int], None] = _silent,
    on_bytes: Callable[[int], None] = _silent,
    sync_bytes: int = 256 << 20,
) -> Report | None:
    """Divide the dataset at `path` into parts, and write them to the directory `out`.

    parts: 1 to 4096. method: how nodes get owners, one of METHODS. seed: of the method. allow_dirs:
    directories outside the dataset that may contain its shards. workers: number of threads. memory_bytes:
    limit of the memory for buffers. overwrite: replace the parts at `out`. say(sentence): prints a note.
    on_total(bytes), on_bytes(n): progress, from any thread.

    Returns what each part has; None if `out` was complete already and only temporary files of an earlier run
    were left. After an interrupt, a kill or a full disk, OUT.partial remains and the same call continues.
    Raises ValueError for an invalid argument, FormatError for a dataset that cannot be divided,
    FileExistsError, StorageError for a full disk and for damaged data.
    """
    if not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"parts={parts}; it must be 1 to {MAX_PARTS}")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose {', '.join(METHODS)}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed}; it must be 0 to 2^64 - 1")
    if workers < 1 or memory_bytes < 1 << 20:
        raise ValueError(f"workers={workers}, memory_bytes={memory_bytes}; they must be at least 1 and 1 MiB")
    store = FeatureStore(path, allow_dirs=allow_dirs)
    try:
        refuse_part(store, "gids partition", "partition the whole dataset")
        manifest = store.locate.read_manifest()
        _check(manifest)
        key = {
            "the dataset": manifest_checksum(manifest),
            "--parts": parts,
            "--method": method,
            "--seed": seed,
        }
        if finish_published(dataset_path(out), key):
            say("the parts are complete; removed the temporary files of an earlier run that was killed")
            return None
        workplace = Workplace(dataset_path(out), [], key, overwrite=overwrite, of_parts=True)
        run = _Run(
            store,
            manifest,
            workplace,
            Part(0, parts, manifest_checksum(manifest), method, manifest.topology_crc),
            seed,
            workers=workers,
            memory_bytes=memory_bytes,
            sync_bytes=sync_bytes,
            say=say,
            on_bytes=on_bytes,
        )
        try:
            return run.run(on_total)
        except BaseException as error:
            explained = workplace.explain_full(error, "it") if isinstance(error, OSError) else None
            workplace.close(discard=isinstance(error, FormatError) or not workplace.has_progress)
            if explained is None:
                raise
            raise explained from error
    finally:
        store.close()


def _check(manifest: Manifest) -> None:
    """Raise FormatError for a relation that cannot be divided."""
    for relation in manifest.relations:
        if not relation.arrays:
            raise FormatError(
                f"relation {describe_type(relation.type)} has no topology, so its edges have no owners: "
                "convert the source with its edges, or without the features of these edges"
            )


class _Run:
    """One call of partition(). Its steps are recorded in the journal, and skipped when it resumes.

    first: the first part.
    """

    def __init__(
        self,
        store: FeatureStore,
        manifest: Manifest,
        workplace: Workplace,
        first: Part,
        seed: int,
        *,
        workers: int,
        memory_bytes: int,
        sync_bytes: int,
        say: Callable[[str], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._store, self._manifest, self._workplace = store, manifest, workplace
        self._first, self._parts, self._method, self._seed = first, first.count, first.method, seed
        self._workers, self._memory_bytes, self._sync_bytes = workers, memory_bytes, sync_bytes
        self._say, self._on_bytes = say, on_bytes
        self._roots = [workplace.root / part_name(i) for i in range(first.count)]
        self._owner_entries: dict[str, ArrayEntry] = {}
        self._arrays = divide.SourceArrays(store.locate)

    def run(self, on_total: Callable[[int], None]) -> Report:
        workplace = self._workplace
        if workplace.resumed and workplace.has_progress:
            self._say("resuming an unfinished partition")
        elif workplace.restart_reason:
            self._say(f"found an unfinished partition, but {workplace.restart_reason}: starting again")
        by_graph = None
        if self._method in ("community", "metis"):
            by_graph = GraphMethod(self._method, self._store, self._manifest, self._memory_bytes)
        needed = list(self._needed())
        if by_graph is not None:
            needed.append((workplace.path.parent, by_graph.scratch_bytes))
        check_space(needed, [workplace.partial])  # before the first record, so that nothing is left
        on_total(sum(self._work_bytes()))
        workplace.needed_bytes = total_bytes(needed)
        for root in self._roots:
            root.mkdir(exist_ok=True)
        if by_graph is not None:
            self._say(f"dividing the nodes by {self._method}")
        self._write_owners(by_graph)
        counts = self._once("counts", 8 * sum(r.count for r in self._manifest.relations), self._count)
        nodes = self._write_nodes()
        relations = [
            self._write_topology(r, counts["edges"][i]) for i, r in enumerate(self._manifest.relations)
        ]
        held_nodes = {n.type: counts["nodes"][i] for i, n in enumerate(self._manifest.nodes)}
        held_edges = {r.type: counts["edges"][i] for i, r in enumerate(self._manifest.relations)}
        tables = []
        for entry in self._manifest.tables:
            held = held_nodes[entry.type] if isinstance(entry.type, str) else held_edges[entry.type]
            tables.append(self._write_table(entry, held))
        manifests = [
            Manifest(
                tuple(
                    NodesEntry(n.type, n.count, nodes[n.type], held_nodes[n.type][part])
                    for n in self._manifest.nodes
                ),
                tuple(
                    RelationEntry(r.type, r.count, arrays[part], r.sorted_by, held_edges[r.type][part])
                    for r, arrays in zip(self._manifest.relations, relations, strict=True)
                ),
                tuple(of_parts[part] for of_parts in tables),
                dataclasses.replace(self._first, index=part),
            )
            for part in range(self._parts)
        ]
        workplace.publish({part_name(i): dump_manifest(m) for i, m in enumerate(manifests)})
        return self._report(manifests, counts)

    def _once(
        self,
        item: str,
        size_bytes: int,
        work: Callable[[], Any],
        folder: str = "",
        parts: range | None = None,
    ) -> Any:
        """Do what is not recorded as done. folder: of these parts (default: all), in which it makes files."""
        found = range(self._parts) if parts is None else parts
        folders = [self._roots[part] / folder for part in found] if folder else []
        return self._workplace.once(
            item, work, on_skip=lambda: self._on_bytes(size_bytes), folders=(f for f in folders if f.is_dir())
        )

    # Owners

    def _write_owners(self, by_graph: GraphMethod | None) -> None:
        """Give every node an owner. Writes them to the first part."""
        for nodes in self._manifest.nodes:
            if by_graph is not None:
                self._write_owners_of(nodes, self._owners_by(by_graph, nodes))
            elif self._method == "range":
                self._write_owners_of(nodes, range_owners(nodes.count, self._parts))
            else:
                self._write_owners_of(nodes, hash_owners(nodes.type, nodes.count, self._parts, self._seed))

    def _owners_by(self, method: GraphMethod, nodes: NodesEntry) -> Iterator[np.ndarray]:
        """One piece, computed when it is asked for."""
        yield method.owners(nodes.type, self._parts, self._workplace.scratch, self._workers)

    def _write_owners_of(self, nodes: NodesEntry, owners: Iterator[np.ndarray]) -> None:
        path = f"nodes/{encode_path(nodes.type)}.{OWNER}.npy"

        def write() -> Any:
            with ArrayFile(self._roots[0], path, owner_dtype(self._parts), (nodes.count,)) as file:
                for values in owners:
                    file.append(values)
                return entry_json(file.finish())

        self._owner_entries[nodes.type] = array_entry(
            self._once(f"owners {nodes.type}", 0, write, "nodes", range(1))
        )

    def _owners(self, ntype: str) -> np.ndarray:
        entry = self._owner_entries[ntype]
        return map_array(self._roots[0] / entry.path, entry)

    def _count(self) -> dict[str, Any]:
        return divide.count_parts(
            self._manifest,
            self._arrays,
            self._owners,
            self._parts,
            memory_bytes=self._memory_bytes,
            on_bytes=self._on_bytes,
        )

    # Per-node arrays

    def _write_nodes(self) -> dict[str, dict[str, ArrayEntry]]:
        """Copy every per-node array, and the owners, to every part. Returns their entries by node type."""
        entries: dict[str, dict[str, ArrayEntry]] = {}
        for nodes in self._manifest.nodes:
            found = entries[nodes.type] = {}
            for role, source in nodes.arrays.items():
                entry = dataclasses.replace(source, path=f"nodes/{encode_path(nodes.type)}.{role}.npy")
                copy = partial(self._copy, self._arrays.path(source), source, entry.path, self._roots)
                self._once(f"nodes {encode_path(nodes.type)}.{role}", array_bytes(source), copy, "nodes")
                found[role] = entry
            owners = self._owner_entries[nodes.type]
            copy = partial(self._copy, self._roots[0] / owners.path, owners, owners.path, self._roots[1:])
            self._once(f"nodes {encode_path(nodes.type)}.{OWNER}", array_bytes(owners), copy, "nodes")
            found[OWNER] = owners
        return entries

    def _copy(self, source: AnyFile, entry: ArrayEntry, path: str, roots: Sequence[Path]) -> None:
        divide.copy_array(
            source,
            entry,
            path,
            roots,
            memory_bytes=self._memory_bytes,
            on_bytes=self._on_bytes,
        )

    # Topology

    def _write_topology(self, relation: RelationEntry, held: Sequence[int]) -> list[dict[str, ArrayEntry]]:
        """Divide the in-edges of a relation. Returns the entries of each part."""
        paths = {role: self._arrays.path(entry) for role, entry in relation.arrays.items()}
        at_once, found = divide.files_limit(divide.TOPOLOGY_FILES), []
        for first in range(0, self._parts, at_once):
            group = range(first, min(first + at_once, self._parts))

            def work(group: range = group) -> Any:
                return entry_json(
                    divide.divide_topology(
                        relation,
                        paths,
                        self._arrays.mapped(relation.arrays["indptr"]),
                        self._owners(relation.type[2]),
                        self._roots,
                        group,
                        held,
                        memory_bytes=self._memory_bytes // 2,
                        on_bytes=self._on_bytes,
                    )
                )

            name = encode_path(*relation.type)
            item = f"graph {name} {group.start}-{group.stop - 1}"
            done = self._once(item, 8 * relation.count, work, f"graph/{name}", group)
            found += [{role: array_entry(fields) for role, fields in arrays.items()} for arrays in done]
        return found

    # Tables

    def _write_table(self, entry: TableEntry, held: Sequence[int]) -> list[TableEntry]:
        """Divide the rows of a table. Returns its entry in each part."""
        folder = table_path(entry.type, entry.key)
        written = []
        for rows in held:
            pages = div_ceil(rows, entry.geometry.rows_per_page)
            sums = ArrayEntry(f"tables/{folder}/checksum.bin", "uint32", (pages,), 0)
            shard = f"tables/{folder}/shard-00.bin"
            written.append(
                dataclasses.replace(entry, row_count=rows, shards=(shard,), checksums=sums, order=None)
            )
        columns = entry.scale.columns if entry.scale is not None else None
        if columns is not None:
            path = f"tables/{folder}/scale.npy"
            copy = partial(self._copy, self._arrays.path(columns), columns, path, self._roots)
            self._once(f"scales {folder}", array_bytes(columns), copy, f"tables/{folder}")
            scale = ScaleEntry("column", dataclasses.replace(columns, path=path))
            written = [dataclasses.replace(w, scale=scale) for w in written]
        if entry.order is not None:
            self._once(f"check {folder}.order", 0, partial(self._arrays.check, entry.order))
        sums_of: list[int] = []
        for group in self._groups(entry):
            sums_of += self._once(
                f"table {folder} {group.start}-{group.stop - 1}",
                entry.row_count * entry.geometry.row_bytes,
                partial(self._divide_rows, entry, written, group),
                f"tables/{folder}",
                group,
            )
        return [
            dataclasses.replace(w, checksums=dataclasses.replace(w.checksums, crc32c=crc))
            for w, crc in zip(written, sums_of, strict=True)
        ]

    def _groups(self, entry: TableEntry) -> list[range]:
        """The parts that one pass over a table writes: the same when a run resumes with other memory."""

        def find() -> int:
            return divide.parts_at_once(entry.page_bytes, self._memory_bytes)

        at_once = self._workplace.once(f"groups of {entry.name}", find, on_skip=lambda: None)
        return [range(i, min(i + at_once, self._parts)) for i in range(0, self._parts, at_once)]

    def _divide_rows(self, entry: TableEntry, written: Sequence[TableEntry], group: range) -> list[int]:
        """Write the rows of these parts. Returns the CRC32C of their checksums."""
        item = f"rows of {entry.name} {group.start}-{group.stop - 1}"
        shards = {part: self._roots[part] / written[part].shards[0] for part in group}
        checksums = {part: self._roots[part] / written[part].checksums.path for part in group}
        sizes = {shards[part]: written[part].geometry.shard_bytes(0) for part in group}
        with ExitStack() as stack:
            first_row = self._workplace.saved(item, sizes) or 0
            sinks = [
                stack.enter_context(PageSink(written[part].geometry, [shards[part]], checksums[part]))
                for part in group
            ]
            divide.divide_rows(
                self._store.tables[entry.name],
                entry,
                self._store.locate,
                self._owners_of(entry),
                sinks,
                group,
                first_row=first_row,
                memory_bytes=self._memory_bytes // 2,
                workers=self._workers,
                sync_bytes=self._sync_bytes,
                on_sync=partial(self._workplace.save, item),
                on_bytes=self._on_bytes,
            )
        return [file_crc32c(checksums[part]) for part in group]

    def _owners_of(self, entry: TableEntry) -> divide.OwnersOf:
        """The parts of the rows of a table."""
        if isinstance(entry.type, str):
            owners = self._owners(entry.type)
            return lambda first, last: owners[first:last]
        (relation,) = (r for r in self._manifest.relations if r.type == entry.type)
        ids = relation.arrays.get("edge_ids")
        read = None if ids is None else partial(self._arrays.read, ids)
        return divide.EdgeOwners(
            self._arrays.mapped(relation.arrays["indptr"]),
            read,
            self._owners(relation.type[2]),
            relation.count,
            self._memory_bytes // 2,
        )

    # Sizes

    def _work_bytes(self) -> Iterator[int]:
        """The bytes of progress."""
        for nodes in self._manifest.nodes:
            yield from map(array_bytes, nodes.arrays.values())
            yield array_bytes(self._owner_entry(nodes))
        for relation in self._manifest.relations:
            passes = div_ceil(self._parts, divide.files_limit(divide.TOPOLOGY_FILES))
            yield 8 * relation.count * (1 + passes)
        for entry in self._manifest.tables:
            if entry.scale is not None and entry.scale.columns is not None:
                yield array_bytes(entry.scale.columns)
            yield entry.row_count * entry.geometry.row_bytes * len(self._groups(entry))

    def _owner_entry(self, nodes: NodesEntry) -> ArrayEntry:
        return ArrayEntry("owner.npy", owner_dtype(self._parts), (nodes.count,), 0)

    def _needed(self) -> Iterator[tuple[Path, int]]:
        """(directory, bytes) that the parts need."""
        directory = self._workplace.path.parent
        for nodes in self._manifest.nodes:
            arrays = [*nodes.arrays.values(), self._owner_entry(nodes)]
            yield directory, self._parts * sum(map(array_bytes, arrays))
        for relation in self._manifest.relations:
            yield directory, self._parts * array_bytes(relation.arrays["indptr"])
            ids = ArrayEntry("edge_ids.npy", divide.id_dtype(relation), (relation.count,), 0)
            arrays = [*(relation.arrays[r] for r in ("indices", "time") if r in relation.arrays), ids]
            yield directory, sum(map(array_bytes, arrays))
        for entry in self._manifest.tables:
            pages = entry.geometry.page_count + self._parts
            yield directory, pages * (entry.page_bytes + 4)

    def _report(self, manifests: Sequence[Manifest], counts: dict[str, Any]) -> Report:
        figures = []
        for part, manifest in enumerate(manifests):
            size_bytes = sum(map(array_bytes, manifest.arrays()))
            size_bytes += sum(t.geometry.page_count * t.page_bytes for t in manifest.tables)
            figures.append(
                PartFigures(
                    rows=sum(held[part] for held in counts["nodes"]),
                    seeds=counts["seeds"][part],
                    in_edges=sum(held[part] for held in counts["edges"]),
                    bytes=size_bytes,
                )
            )
        edges = sum(r.count for r in self._manifest.relations)
        return Report(self._method, tuple(figures), edges, counts["cut"])
