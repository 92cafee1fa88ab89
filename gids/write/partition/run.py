"""partition: divides a dataset into parts, which are datasets. Can resume. Called by `gids partition`.

What is per node is in every part; what is large, rows and edges, is divided. All parts are built beside their
final directory and published together, by one rename.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from gids.errors import FormatError
from gids.store.array_checks import file_crc32c
from gids.store.feature_store import FeatureStore
from gids.store.files import array_bytes
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
from gids.store.names import Relation, describe_type, encode_path, table_path
from gids.store.part import part_name, refuse_part
from gids.write.files import check_space, link_file, write_array
from gids.write.page_sink import PageSink
from gids.write.partition import divide
from gids.write.partition.owners import METHODS, GraphMethod, hash_owners, range_owners
from gids.write.publish import dataset_path
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
            [workplace.root / part_name(i) for i in range(parts)],
            workers,
            memory_bytes,
            sync_bytes,
            on_bytes,
            workplace,
            Part(0, parts, manifest_checksum(manifest), method, manifest.topology_crc),
            seed,
            say,
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


@dataclass
class _Run(divide.Division):
    """One call of partition(). Its steps are recorded in the journal, and skipped when it resumes.

    first: the first part.
    """

    workplace: Workplace
    first: Part
    seed: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts = self.first.count

    def run(self, on_total: Callable[[int], None]) -> Report:
        manifest, workplace = self.manifest, self.workplace
        if workplace.resumed and workplace.has_progress:
            self.say("resuming an unfinished partition")
        elif workplace.restart_reason:
            self.say(f"found an unfinished partition, but {workplace.restart_reason}: starting again")
        by_graph = None
        if self.first.method in ("community", "metis"):
            by_graph = GraphMethod(self.first.method, self.store, manifest, self.memory_bytes)
        needed_bytes = self.needed_bytes() + (0 if by_graph is None else by_graph.scratch_bytes)
        # Before the first record, so that nothing is left.
        check_space([(workplace.path.parent, needed_bytes)], [workplace.partial])
        on_total(sum(self.work_bytes()))
        workplace.needed_bytes = needed_bytes
        for root in self.roots:
            root.mkdir(exist_ok=True)
        if by_graph is not None:
            self.say(f"dividing the nodes by {self.first.method}")
        for entry in manifest.nodes:
            self.owner_entries[entry.type] = self.write_owners(entry, by_graph)
        counts = self.once(
            "counts", 8 * sum(r.count for r in manifest.relations), partial(divide.count_parts, self)
        )
        held: dict[str | Relation, list[int]] = {}  # the nodes and edges of each part, by type
        held |= {n.type: of_parts for n, of_parts in zip(manifest.nodes, counts["nodes"], strict=True)}
        held |= {r.type: of_parts for r, of_parts in zip(manifest.relations, counts["edges"], strict=True)}
        nodes = {n.type: self.copy_node_arrays(n) for n in manifest.nodes}
        edges = {r.type: self.divide_topology(r, held[r.type]) for r in manifest.relations}
        tables = [self.divide_table(t, held[t.type]) for t in manifest.tables]
        manifests = [
            Manifest(
                tuple(replace(n, arrays=nodes[n.type], held=held[n.type][part]) for n in manifest.nodes),
                tuple(
                    replace(r, arrays=edges[r.type][part], held=held[r.type][part])
                    for r in manifest.relations
                ),
                tuple(of_parts[part] for of_parts in tables),
                replace(self.first, index=part),
            )
            for part in range(self.parts)
        ]
        workplace.publish({part_name(i): dump_manifest(m) for i, m in enumerate(manifests)})
        return self.report(manifests, counts)

    def once(
        self,
        item: str,
        size_bytes: int,
        work: Callable[[], Any],
        folder: str = "",
        parts: range | None = None,
    ) -> Any:
        """Do what is not recorded as done. folder: of these parts (default: all), in which it makes files."""
        roots = self.roots if parts is None else self.roots[parts.start : parts.stop]
        folders = [root / folder for root in roots] if folder else []
        return self.workplace.once(
            item, work, on_skip=lambda: self.on_bytes(size_bytes), folders=(f for f in folders if f.is_dir())
        )

    def write_owners(self, nodes: NodesEntry, by_graph: GraphMethod | None) -> ArrayEntry:
        """Give every node of a type an owner. Writes them to the first part."""

        def pieces() -> Iterator[np.ndarray]:
            if by_graph is not None:
                yield by_graph.owners(nodes.type, self.parts, self.workplace.scratch, self.workers)
            elif self.first.method == "range":
                yield from range_owners(nodes.count, self.parts)
            else:
                yield from hash_owners(nodes.type, nodes.count, self.parts, self.seed)

        def write() -> Any:
            path = f"nodes/{encode_path(nodes.type)}.{OWNER}.npy"
            dtype = owner_dtype(self.parts)
            return entry_json(write_array(self.roots[0], path, dtype, (nodes.count,), pieces()))

        return array_entry(self.once(f"owners {nodes.type}", 0, write, "nodes", range(1)))

    def copy_node_arrays(self, nodes: NodesEntry) -> dict[str, ArrayEntry]:
        """Copy every array of a node type, and the owners, to every part. Returns their entries."""
        name = encode_path(nodes.type)
        entries = {role: replace(a, path=f"nodes/{name}.{role}.npy") for role, a in nodes.arrays.items()}
        for role, source in nodes.arrays.items():
            self.copy(f"nodes {name}.{role}", source, entries[role], "nodes")
        owners = entries[OWNER] = self.owner_entries[nodes.type]
        first, *others = (root / owners.path for root in self.roots)

        def link() -> None:
            for other in others:
                link_file(first, other)
            self.on_bytes(array_bytes(owners))

        self.once(f"nodes {name}.{OWNER}", array_bytes(owners), link, "nodes")
        return entries

    def copy(self, item: str, source: ArrayEntry, entry: ArrayEntry, folder: str) -> None:
        """Copy an array of the dataset to the entry's path in all parts, once."""

        def work() -> None:
            divide.copy_array(self.arrays.path(source), entry, self.roots)
            self.on_bytes(array_bytes(entry))

        self.once(item, array_bytes(entry), work, folder)

    def divide_topology(self, relation: RelationEntry, held: Sequence[int]) -> list[dict[str, ArrayEntry]]:
        """Divide the in-edges of a relation. Returns the entries of each part."""
        name, entries = encode_path(*relation.type), list[dict[str, ArrayEntry]]()
        for group in groups(self.parts, divide.files_limit(divide.TOPOLOGY_FILES)):

            def work(group: range = group) -> Any:
                return entry_json(divide.divide_topology(self, relation, group, held))

            item = f"graph {name} {group.start}-{group.stop - 1}"
            done = self.once(item, 8 * relation.count, work, f"graph/{name}", group)
            entries += [{role: array_entry(fields) for role, fields in arrays.items()} for arrays in done]
        return entries

    def divide_table(self, entry: TableEntry, held: Sequence[int]) -> list[TableEntry]:
        """Divide the rows of a table. Returns its entry in each part."""
        folder = f"tables/{table_path(entry.type, entry.key)}"
        written = []
        for rows in held:
            pages = div_ceil(rows, entry.geometry.rows_per_page)
            sums = ArrayEntry(f"{folder}/checksum.bin", "uint32", (pages,), 0)
            shards = (f"{folder}/shard-00.bin",)
            written.append(replace(entry, row_count=rows, shards=shards, checksums=sums, order=None))
        columns = entry.scale.columns if entry.scale is not None else None
        if columns is not None:
            copied = replace(columns, path=f"{folder}/scale.npy")
            self.copy(f"scales {folder}", columns, copied, folder)
            written = [replace(w, scale=ScaleEntry("column", copied)) for w in written]
        if entry.order is not None:
            self.once(f"check {folder}.order", 0, partial(self.arrays.check, entry.order))
        sums_crc: list[int] = []
        for group in self.table_groups(entry):
            sums_crc += self.once(
                f"{folder} {group.start}-{group.stop - 1}",
                entry.row_count * entry.geometry.row_bytes,
                partial(self.divide_rows, entry, written, group),
                folder,
                group,
            )
        return [
            replace(w, checksums=replace(w.checksums, crc32c=crc))
            for w, crc in zip(written, sums_crc, strict=True)
        ]

    def table_groups(self, entry: TableEntry) -> list[range]:
        """The parts that one pass over a table writes: the same when a run resumes with other memory."""
        at_once = self.workplace.once(
            f"groups of {entry.name}",
            lambda: divide.parts_at_once(entry.page_bytes, self.memory_bytes),
            on_skip=lambda: None,
        )
        return groups(self.parts, at_once)

    def divide_rows(self, entry: TableEntry, written: Sequence[TableEntry], group: range) -> list[int]:
        """Write the rows of these parts. Returns the CRC32C of their checksums."""
        item = f"rows of {entry.name} {group.start}-{group.stop - 1}"
        layouts = [written[part].geometry for part in group]
        shards = [self.roots[part] / written[part].shards[0] for part in group]
        checksums = [self.roots[part] / written[part].checksums.path for part in group]
        sizes = {path: layout.shard_bytes(0) for path, layout in zip(shards, layouts, strict=True)}
        first_row = self.workplace.saved(item, sizes) or 0
        with ExitStack() as stack:
            buffers = threading.local()
            sinks = [
                stack.enter_context(PageSink(layout, [shard], sums, buffers=buffers))
                for layout, shard, sums in zip(layouts, shards, checksums, strict=True)
            ]
            divide.divide_rows(
                self,
                self.store.tables[entry.name],
                self.row_owners(entry),
                sinks,
                group,
                first_row=first_row,
                on_sync=partial(self.workplace.save, item),
            )
        return [file_crc32c(path) for path in checksums]

    def row_owners(self, entry: TableEntry) -> divide.OwnersOf:
        """The parts of the rows of a table."""
        if isinstance(entry.type, str):
            owners = self.owners(entry.type)
            return lambda first, last: owners[first:last]
        (relation,) = (r for r in self.manifest.relations if r.type == entry.type)
        ids = relation.arrays.get("edge_ids")
        return divide.EdgeOwners(
            self.arrays.mapped(relation.arrays["indptr"]),
            None if ids is None else partial(self.arrays.read, ids),
            self.owners(relation.type[2]),
            relation.count,
            self.memory_bytes // 2,
        )

    def work_bytes(self) -> Iterator[int]:
        """The bytes of progress."""
        for nodes in self.manifest.nodes:
            yield from map(array_bytes, self.node_arrays(nodes))
        for relation in self.manifest.relations:
            passes = div_ceil(self.parts, divide.files_limit(divide.TOPOLOGY_FILES))
            yield 8 * relation.count * (1 + passes)
        for entry in self.manifest.tables:
            if entry.scale is not None and entry.scale.columns is not None:
                yield array_bytes(entry.scale.columns)
            yield entry.row_count * entry.geometry.row_bytes * len(self.table_groups(entry))

    def needed_bytes(self) -> int:
        """The bytes of all parts."""
        total = 0
        for nodes in self.manifest.nodes:
            total += sum(map(array_bytes, self.node_arrays(nodes)))  # parts share them
        for relation in self.manifest.relations:
            ids = ArrayEntry("edge_ids.npy", divide.id_dtype(relation), (relation.count,), 0)
            divided = [relation.arrays[role] for role in ("indices", "time") if role in relation.arrays]
            total += self.parts * array_bytes(relation.arrays["indptr"]) + sum(
                map(array_bytes, [*divided, ids])
            )
        for entry in self.manifest.tables:
            total += (entry.geometry.page_count + self.parts) * (entry.page_bytes + 4)
        return total

    def node_arrays(self, nodes: NodesEntry) -> list[ArrayEntry]:
        """The arrays of a node type that every part gets."""
        return [*nodes.arrays.values(), ArrayEntry("owner.npy", owner_dtype(self.parts), (nodes.count,), 0)]

    def report(self, manifests: Sequence[Manifest], counts: dict[str, Any]) -> Report:
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
        edges = sum(r.count for r in self.manifest.relations)
        return Report(self.first.method, tuple(figures), edges, counts["cut"])


def groups(parts: int, at_once: int) -> list[range]:
    """The parts 0 … parts - 1, at most at_once in a group."""
    return [range(first, min(first + at_once, parts)) for first in range(0, parts, at_once)]
