"""manifest.json: its fields, its checksum, and `validate`, which writers and readers share.

Called by FeatureStore, DatasetWriter and `gids verify`. Checks only the text; `files.py` checks the files.
docs/internals/format.md describes every field.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from gids import _core
from gids.errors import FormatError
from gids.store.dtypes import ARRAY_DTYPES, TABLE_DTYPES
from gids.store.geometry import MAX_ROWS, MAX_SHARDS, Geometry, table_page_bytes
from gids.store.names import HEAT_ROLES, SPLITS, Relation, check_name, describe_type, table_name
from gids.store.quantize import check_scale, stored_row_bytes

FORMAT = "gids"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_PARTS = 4096
OWNER = "owner"
"""The array of a node type that names the part of each node."""
_CHECKSUM = re.compile(rb'"checksum": "crc32c:([0-9a-f]{8})"\n\}\n\Z')
_OF = re.compile(r"crc32c:[0-9a-f]{8}\Z")
_BLANK = b"00000000"


@dataclass(frozen=True)
class ArrayEntry:
    """One array in one file: `.npy`, or raw for checksums. path: relative to the dataset."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    crc32c: int

    def describe(self) -> str:
        """Such as `int64[20000]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Part:
    """What makes a dataset one part of another one that `gids partition` divided.

    index: 0 … count - 1. of: the checksum of the manifest of the whole dataset. method: how nodes were
    divided: "range", "hash", "community" or "metis". topology: the topology_crc of the whole dataset.
    """

    index: int
    count: int
    of: str
    method: str
    topology: str

    def __str__(self) -> str:
        return f"part {self.index} of {self.count}"


@dataclass(frozen=True)
class NodesEntry:
    """One node type: its number of nodes and its arrays by role (label, train_idx, …, heat and time).

    held: in a part, the number of nodes that it owns; count is that of the whole dataset.
    """

    type: str
    count: int
    arrays: Mapping[str, ArrayEntry]
    held: int | None = None


@dataclass(frozen=True)
class RelationEntry:
    """One relation: its number of edges, and its arrays by role (indptr, indices, edge_ids, time) or none.

    sorted_by: "edges" if the in-edges of every node ascend by their times, "nodes" if by the times of their
    sources. held: in a part, the number of edges to nodes that it owns; count is that of the whole dataset.
    """

    type: Relation
    count: int
    arrays: Mapping[str, ArrayEntry]
    sorted_by: str | None = None
    held: int | None = None


@dataclass(frozen=True)
class ScaleEntry:
    """The factors of the values of an int8 table. per: "row" (at the end of each row) or "column".

    columns: the scales per column, float32[*shape of a row].
    """

    per: str
    columns: ArrayEntry | None = None


@dataclass(frozen=True)
class TableEntry:
    """One table: the rows of one node or edge type."""

    kind: str
    type: str | Relation
    key: str
    shape: tuple[int, ...]
    dtype: str
    page_bytes: int
    row_count: int
    shards: tuple[str, ...]
    checksums: ArrayEntry
    scale: ScaleEntry | None = None
    order: ArrayEntry | None = None
    """The position of each row on disk; None if it is the id."""

    @property
    def name(self) -> str:
        return table_name(self.type, self.key)

    @property
    def geometry(self) -> Geometry:
        scale = None if self.scale is None else self.scale.per
        row_bytes = stored_row_bytes(self.shape, TABLE_DTYPES[self.dtype].itemsize, scale)
        return Geometry(self.row_count, row_bytes, self.page_bytes, len(self.shards))


@dataclass(frozen=True)
class Manifest:
    """A valid manifest.json. Entries are in the order in which they were written."""

    nodes: tuple[NodesEntry, ...]
    relations: tuple[RelationEntry, ...]
    tables: tuple[TableEntry, ...]
    part: Part | None = None

    def arrays(self) -> Iterator[ArrayEntry]:
        """Every array file, including the checksums, scales and orders of tables."""
        for nodes in self.nodes:
            yield from nodes.arrays.values()
        for relation in self.relations:
            yield from relation.arrays.values()
        for table in self.tables:
            yield table.checksums
            if table.scale is not None and table.scale.columns is not None:
                yield table.scale.columns
            if table.order is not None:
                yield table.order

    def contents(self) -> dict[str, int]:
        """A number for each node type, relation and table, by name: equal for equal content, heat excepted,
        wherever its files are."""
        entries: dict[str, object] = {f"nodes {n.type}": _without_heat(n) for n in self.nodes}
        entries |= {f"relation {describe_type(r.type)}": r for r in self.relations}
        entries |= {f"table {t.name}": t for t in self.tables} | {"part": self.part}
        return {name: zlib.crc32(repr(_without_paths(entry_json(e))).encode()) for name, e in entries.items()}

    @property
    def topology_crc(self) -> str:
        """A checksum of the edges, edge ids and times, from those of their files; in a part, of the whole
        dataset."""
        if self.part is not None:
            return self.part.topology
        of_edges = [(r.type, role, a.crc32c) for r in self.relations for role, a in r.arrays.items()]
        of_nodes = [((n.type,), "time", n.arrays["time"].crc32c) for n in self.nodes if "time" in n.arrays]
        return f"crc32c:{_checksum(json.dumps(sorted([*of_edges, *of_nodes])).encode()).decode()}"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            **({} if self.part is None else {"part": entry_json(self.part)}),
            "nodes": entry_json(self.nodes),
            "relations": entry_json(self.relations),
            "tables": entry_json(self.tables),
        }


def entry_json(value: Any) -> Any:
    """An entry, or a collection of entries, as in manifest.json: all fields that are not None."""
    if dataclasses.is_dataclass(value):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: entry_json(found) for name, found in fields if found is not None}
    if isinstance(value, Mapping):
        return {key: entry_json(found) for key, found in value.items()}
    return [entry_json(found) for found in value] if isinstance(value, (tuple, list)) else value


def _without_heat(nodes: NodesEntry) -> NodesEntry:
    arrays = {role: entry for role, entry in nodes.arrays.items() if role not in HEAT_ROLES.values()}
    return dataclasses.replace(nodes, arrays=arrays)


def _without_paths(value: Any) -> Any:
    """The JSON of an entry without the paths of its files."""
    if not isinstance(value, dict):
        return value
    return {name: _without_paths(v) for name, v in value.items() if name not in ("path", "shards")}


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file. Validates first, so that it can be read again. Raises FormatError."""
    fields = manifest.to_json()
    validate(fields)
    text = json.dumps(fields | {"checksum": f"crc32c:{_BLANK.decode()}"}, indent=1).encode() + b"\n"
    return text[: -len(_BLANK) - 4] + _checksum(text) + text[-4:]


def manifest_checksum(manifest: Manifest) -> str:
    """The checksum in a manifest's file, such as "crc32c:0123abcd". Parts name the whole dataset by it."""
    found = _CHECKSUM.search(dump_manifest(manifest))
    assert found is not None
    return f"crc32c:{found[1].decode()}"


def load_manifest(data: bytes) -> Manifest:
    """The valid manifest in the bytes of a file. Raises FormatError with one cause."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{len(data)} bytes or more; a manifest may have at most {MAX_MANIFEST_BYTES}")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({error}); the file is damaged: convert the source again") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise FormatError('has no "format": "gids"; is it a gids dataset?')
    if type(fields.get("version")) is not int or fields["version"] != VERSION:
        raise FormatError(
            f"version {fields.get('version')!r}; this gids reads version {VERSION}: "
            "use the gids that wrote it, or convert the source again"
        )
    found = _CHECKSUM.search(data)
    if found is None:
        raise FormatError("has no checksum at its end; the file is damaged: convert the source again")
    actual = _checksum(data[: found.start(1)] + _BLANK + data[found.end(1) :])
    if actual != found[1]:
        raise FormatError(
            f"its checksum is {found[1].decode()}, but its bytes have {actual.decode()}; "
            "the file was changed or damaged: convert the source again"
        )
    del fields["checksum"]
    return validate(fields)


def _checksum(text: bytes) -> bytes:
    return b"%08x" % _core.crc32c_extend(0, np.frombuffer(text, np.uint8))


def validate(fields: object) -> Manifest:
    """Check every field of a manifest (without its checksum), and that they agree.

    Returns the manifest. Raises FormatError with the field, what was found and what was expected.
    """
    top = _fields(fields, "manifest", ("format", "version", "nodes", "relations", "tables"), ("part",))
    part = _part(top["part"]) if "part" in top else None
    nodes = tuple(_nodes(n, f"nodes[{i}]", part) for i, n in enumerate(_list(top["nodes"], "nodes")))
    counts = {n.type: n.count for n in nodes}
    _distinct([n.type for n in nodes], "node type")
    relations = tuple(
        _relation(r, f"relations[{i}]", counts, {n.type for n in nodes if "time" in n.arrays}, part)
        for i, r in enumerate(_list(top["relations"], "relations"))
    )
    _distinct([r.type for r in relations], "relation")
    rows = {n.type: n.count if n.held is None else n.held for n in nodes}
    edge_rows = {r.type: r.count if r.held is None else r.held for r in relations}
    tables = tuple(
        _table(t, f"tables[{i}]", rows, edge_rows) for i, t in enumerate(_list(top["tables"], "tables"))
    )
    _distinct([t.name for t in tables], "table")
    manifest = Manifest(nodes, relations, tables, part)
    paths = [a.path for a in manifest.arrays()] + [s for t in tables for s in t.shards]
    _distinct([MANIFEST, *(str(PurePosixPath(p)) for p in paths)], "path")
    return manifest


def _part(value: object) -> Part:
    fields = _fields(value, "part", ("index", "count", "of", "method", "topology"))
    count = _integer(fields["count"], "part.count", MAX_PARTS)
    if not count:
        raise FormatError(f"part.count must be an integer from 1 to {MAX_PARTS}, not 0")
    for name, what in (("of", "a manifest"), ("topology", "edges and times")):
        checksum = fields[name]
        if not isinstance(checksum, str) or not _OF.match(checksum):
            raise FormatError(
                f"part.{name} is {str(checksum)[:80]!r}; it must be the checksum of {what}, crc32c:xxxxxxxx"
            )
    index = _integer(fields["index"], "part.index", count - 1)
    method = check_name(fields["method"], "part.method")
    return Part(index, count, fields["of"], method, fields["topology"])


def owner_dtype(part_count: int) -> str:
    """The element type of the owners of nodes."""
    return "uint8" if part_count <= 256 else "uint16"


def _held(fields: dict[str, Any], where: str, count: int, part: Part | None) -> int | None:
    return None if part is None else _integer(fields["held"], f"{where}.held", count)


def _nodes(value: object, where: str, part: Part | None) -> NodesEntry:
    fields = _fields(value, where, ("type", "count", "arrays", *["held"] * (part is not None)))
    count = _integer(fields["count"], f"{where}.count", MAX_ROWS)
    held = _held(fields, where, count, part)
    arrays: dict[str, ArrayEntry] = {}
    known = ("label", *(f"{s}_idx" for s in SPLITS), *HEAT_ROLES.values(), "time")
    for role, array in _roles(fields, where, (*known, *[OWNER] * (part is not None))):
        entry = arrays[role] = _array(array, f"{where}.arrays.{role}")
        if role == "label":
            if entry.dtype == "uint16":
                raise FormatError(f"{where}.arrays.label.dtype is 'uint16', which only {OWNER} may have")
            _expect(entry.shape[:1] == (count,), where, f"one label for each of {count} nodes", entry)
        elif role == "time":
            _expect_array(entry, where, "times", (count,), "int32", "int64")
        elif role == OWNER:
            assert part is not None
            _expect_array(entry, where, "owners", (count,), owner_dtype(part.count))
        elif role in HEAT_ROLES.values():
            _expect_array(entry, where, f"in {role}", (count,), heat_dtype(role))
        else:
            _expect(len(entry.shape) == 1 and entry.dtype == "int64", where, f"int64 ids in {role}", entry)
    if part is not None and OWNER not in arrays:
        raise FormatError(f"{where} is of a part of a dataset, and has no array {OWNER}")
    return NodesEntry(check_name(fields["type"], f"{where}.type"), count, arrays, held)


def heat_dtype(role: str) -> str:
    """The element type of an array of heat."""
    return "uint32" if role == "out_degree" else "float32"


def _relation(
    value: object,
    where: str,
    counts: Mapping[str, int],
    timed: Container[str],
    part: Part | None,
) -> RelationEntry:
    """timed: the node types that have times."""
    names = ("type", "count", "arrays", *["held"] * (part is not None))
    fields = _fields(value, where, names, ("sorted_by",))
    type_ = _relation_type(fields["type"], f"{where}.type")
    count = _integer(fields["count"], f"{where}.count", MAX_ROWS)
    held = _held(fields, where, count, part)
    for end in (type_[0], type_[2]):
        if end not in counts:
            raise FormatError(f"{where} uses node type {end!r}, which is not in nodes")
    arrays = {
        r: _array(a, f"{where}.arrays.{r}")
        for r, a in _roles(fields, where, ("indptr", "indices", "edge_ids", "time"))
    }
    sorted_by = fields.get("sorted_by")
    if sorted_by is not None or "time" in arrays:
        if sorted_by not in ("edges", "nodes") or (sorted_by == "edges") != ("time" in arrays) or not arrays:
            raise FormatError(
                f"{where}.sorted_by is {sorted_by!r}; it must be 'edges' with an array time, or 'nodes'"
            )
        if sorted_by == "nodes" and type_[0] not in timed:
            raise FormatError(f"{where} is sorted by the times of {type_[0]!r} nodes, which have none")
    if part is not None and "edge_ids" not in arrays:
        raise FormatError(f"{where} is of a part of a dataset, and has no array edge_ids")
    if not arrays:
        return RelationEntry(type_, count, arrays)
    if "indptr" not in arrays or "indices" not in arrays:
        raise FormatError(f"{where} has only {', '.join(arrays)}; a graph needs indptr and indices")
    edges = count if held is None else held
    _expect_array(arrays["indptr"], where, "indptr", (counts[type_[2]] + 1,), "int64")
    if "time" in arrays:
        _expect_array(arrays["time"], where, "times", (edges,), "int32", "int64")
    limits = {"indices": (counts[type_[0]], "source nodes"), "edge_ids": (count, "edges")}
    for role, (limit, what) in limits.items():
        if role in arrays:
            _expect_array(arrays[role], where, role, (edges,), "int32", "int64")
            if arrays[role].dtype == "int32" and limit > 1 << 31:
                raise FormatError(f"{where}: int32 {role} cannot name {limit} {what}")
    return RelationEntry(type_, count, arrays, sorted_by, held)


def _table(value: object, where: str, nodes: Mapping[str, int], edges: Mapping[Relation, int]) -> TableEntry:
    fields = _fields(
        value,
        where,
        ("kind", "type", "key", "shape", "dtype", "page_bytes", "row_count", "shards", "checksums"),
        optional=("scale", "order"),
    )
    kind = fields["kind"]
    type_: str | Relation
    if kind == "node":
        type_ = check_name(fields["type"], f"{where}.type")
        count = nodes.get(type_)
    elif kind == "edge":
        type_ = _relation_type(fields["type"], f"{where}.type")
        count = edges.get(type_)
    else:
        raise FormatError(f"{where}.kind is {kind!r}; it must be 'node' or 'edge'")
    if count is None:
        raise FormatError(f"{where} belongs to {describe_type(type_)}, which is not in the manifest")
    if fields["dtype"] not in list(TABLE_DTYPES):  # a list: the value may not be hashable
        raise FormatError(f"{where}.dtype is {fields['dtype']!r}; known are {', '.join(TABLE_DTYPES)}")
    shards = tuple(
        _path(s, f"{where}.shards[{i}]", True)
        for i, s in enumerate(_list(fields["shards"], f"{where}.shards"))
    )
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise FormatError(f"{where} has {len(shards)} shards; it must have 1 to {MAX_SHARDS}")
    table = TableEntry(
        kind=kind,
        type=type_,
        key=check_name(fields["key"], f"{where}.key"),
        shape=_shape(fields["shape"], f"{where}.shape"),
        dtype=fields["dtype"],
        page_bytes=_integer(fields["page_bytes"], f"{where}.page_bytes", 1 << 40),
        row_count=_integer(fields["row_count"], f"{where}.row_count", MAX_ROWS),
        shards=shards,
        checksums=_array(fields["checksums"], f"{where}.checksums"),
        scale=_scale(fields["scale"], f"{where}.scale") if "scale" in fields else None,
        order=_array(fields["order"], f"{where}.order") if "order" in fields else None,
    )
    if table.scale is not None:
        _check_scale_fits(table, where)
    if table.row_count != count:
        raise FormatError(
            f"{where} ({table.name}) has {table.row_count} rows for {count} of {describe_type(type_)}"
        )
    layout = table.geometry
    try:
        page_bytes = table_page_bytes(layout.row_bytes, table.page_bytes)
    except FormatError as error:
        raise FormatError(f"{where} ({table.name}): {error}") from None
    if page_bytes != table.page_bytes:
        raise FormatError(
            f"{where} ({table.name}): rows of {layout.row_bytes} bytes in pages of {table.page_bytes}"
        )
    _expect_array(table.checksums, where, "checksums", (layout.page_count,), "uint32")
    if table.order is not None:
        _expect_array(table.order, where, "positions", (count,), position_dtype(count))
    return table


def position_dtype(row_count: int) -> str:
    """The element type of the positions of row_count rows."""
    return "int32" if row_count <= 1 << 31 else "int64"


def _scale(value: object, where: str) -> ScaleEntry:
    per = check_scale(_fields(value, where, ("per",), optional=("columns",))["per"], f"{where}.per")
    fields = _fields(value, where, ("per", "columns") if per == "column" else ("per",))
    return ScaleEntry(per, _array(fields["columns"], f"{where}.columns") if per == "column" else None)


def _check_scale_fits(table: TableEntry, where: str) -> None:
    if table.dtype != "int8":
        raise FormatError(f"{where} ({table.name}) is {table.dtype} with a scale; only int8 has one")
    if table.scale is not None and table.scale.columns is not None:
        _expect_array(table.scale.columns, where, "scales of columns", table.shape, "float32")


def _array(value: object, where: str) -> ArrayEntry:
    fields = _fields(value, where, ("path", "dtype", "shape", "crc32c"))
    if fields["dtype"] not in list(ARRAY_DTYPES):
        raise FormatError(f"{where}.dtype is {fields['dtype']!r}; known are {', '.join(ARRAY_DTYPES)}")
    crc = _integer(fields["crc32c"], f"{where}.crc32c", (1 << 32) - 1)
    path = _path(fields["path"], f"{where}.path", False)
    return ArrayEntry(path, fields["dtype"], _shape(fields["shape"], f"{where}.shape"), crc)


def _expect(holds: bool, where: str, expected: str, entry: ArrayEntry) -> None:
    if not holds:
        raise FormatError(f"{where}: {entry.path} is {entry.dtype}{list(entry.shape)}; expected {expected}")


def _expect_array(entry: ArrayEntry, where: str, what: str, shape: tuple[int, ...], *dtypes: str) -> None:
    dtype = dtypes[0] if len(dtypes) == 1 else "int"
    _expect(entry.shape == shape and entry.dtype in dtypes, where, f"{dtype}{list(shape)} {what}", entry)


def _fields(
    value: object, where: str, names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} must be an object, not {_kind(value)}")
    missing = [n for n in names if n not in value]
    extra = [n for n in value if n not in names and n not in optional]
    if missing or extra:
        raise FormatError(
            f"{where} lacks {missing}" if missing else f"{where} has unknown fields {extra[:4]}"
        )
    return value


def _roles(fields: dict[str, Any], where: str, known: tuple[str, ...]) -> list[tuple[str, object]]:
    arrays = fields["arrays"]
    if not isinstance(arrays, dict):
        raise FormatError(f"{where}.arrays must be an object, not {_kind(arrays)}")
    for role in arrays:
        if role not in known:
            raise FormatError(f"{where}.arrays has unknown {role!r} (known: {', '.join(known)})")
    return list(arrays.items())


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where} must be a list, not {_kind(value)}")
    return value


def _integer(value: object, where: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        found = value if type(value) is int else _kind(value)
        raise FormatError(f"{where} must be an integer from 0 to {most}, not {found}")
    return value


def _shape(value: object, where: str) -> tuple[int, ...]:
    lengths = _list(value, where)
    if len(lengths) > 8:
        raise FormatError(f"{where} has {len(lengths)} dimensions; at most 8")
    return tuple(_integer(n, f"{where}[{i}]", MAX_ROWS) for i, n in enumerate(lengths))


def _relation_type(value: object, where: str) -> Relation:
    names = _list(value, where)
    if len(names) != 3:
        raise FormatError(
            f"{where} must be [source type, relation, destination type], not {len(names)} names"
        )
    return check_name(names[0], where), check_name(names[1], where), check_name(names[2], where)


def _path(value: object, where: str, may_be_absolute: bool) -> str:
    path = PurePosixPath(value) if isinstance(value, str) and value and "\0" not in value else None
    if path is None or ".." in path.parts or str(path) in (".", "/"):
        raise FormatError(f"{where} is {str(value)[:80]!r}; it must be a path without '..'")
    if path.is_absolute() and not may_be_absolute:
        raise FormatError(f"{where} is {str(path)!r}; only shards may be outside the dataset")
    return str(path)


def _distinct(items: list[Any], what: str) -> None:
    seen = set()
    for item in items:
        if item in seen:
            raise FormatError(f"{what} {describe_type(item)} occurs twice")
        seen.add(item)


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(
        type(value), f"{value!r:.40}"
    )
