"""manifest.json: its fields, its checksum, and `validate`, which writers and readers share.

Called by FeatureStore, DatasetWriter and `gids verify`. Checks only the text; `files.py` checks the files.
docs/internals/format.md describes every field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError, naming
from gids.store.dtypes import (
    ARRAY_DTYPES,
    TABLE_DTYPES,
    check_scale,
    dtype_name,
    stored_geometry,
    stored_row_bytes,
)
from gids.store.geometry import MAX_ROWS, MAX_SHARDS, Geometry, table_page_bytes
from gids.store.ids import ID_ROLES
from gids.store.names import HEAT_ROLES, SPLITS, Relation, check_name, describe_type, table_name

FORMAT = "gids"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_PARTS = 4096
OWNER = "owner"
"""The array of a node type that names the part of each node."""
NODE_ARRAYS = ("label", *(f"{s}_idx" for s in SPLITS), *HEAT_ROLES.values(), "time", *ID_ROLES, OWNER)
_CHECKSUM = re.compile(rb'"checksum": "crc32c:([0-9a-f]{8})"\n\}\n\Z')
_BLANK = b"00000000"


@dataclass(frozen=True)
class ArrayEntry:
    """One array in one file: `.npy`, or raw for checksums. path: relative to the dataset."""

    path: Annotated[str, _path]
    dtype: Annotated[str, _among(ARRAY_DTYPES)]
    shape: Annotated[tuple[int, ...], _shape]
    crc32c: Annotated[int, _up_to((1 << 32) - 1)]

    def describe(self) -> str:
        """Such as `int64[20000]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Part:
    """What makes a dataset one part of another one that `gids partition` divided.

    index: 0 … count - 1. of: the checksum of the manifest of the whole dataset. method: how nodes were
    divided: "hash", "range" or "owners" (by files). topology: the topology_crc of the whole dataset.
    """

    index: Annotated[int, _up_to(MAX_PARTS - 1)]
    count: Annotated[int, _up_to(MAX_PARTS, least=1)]
    of: Annotated[str, check_name]
    method: Annotated[str, check_name]
    topology: Annotated[str, check_name]

    def __str__(self) -> str:
        return f"part {self.index} of {self.count}"


@dataclass(frozen=True)
class NodesEntry:
    """One node type: its number of nodes and its arrays by role (label, train_idx, …, heat, time and ids).

    held: in a part, the number of nodes that it owns; count is that of the whole dataset.
    """

    type: Annotated[str, check_name]
    count: Annotated[int, _up_to(MAX_ROWS)]
    arrays: Annotated[Mapping[str, ArrayEntry], _arrays_of(*NODE_ARRAYS)]
    held: Annotated[int, _up_to(MAX_ROWS)] | None = None


@dataclass(frozen=True)
class RelationEntry:
    """One relation: its number of edges, and its arrays by role (indptr, indices, edge_ids, time) or none.

    sorted_by: "edges" if the in-edges of every node ascend by their times, "nodes" if by the times of their
    sources. held: in a part, the number of edges to nodes that it owns; count is that of the whole dataset.
    """

    type: Annotated[Relation, _relation_type]
    count: Annotated[int, _up_to(MAX_ROWS)]
    arrays: Annotated[Mapping[str, ArrayEntry], _arrays_of("indptr", "indices", "edge_ids", "time")]
    sorted_by: Annotated[str, _among(("edges", "nodes"))] | None = None
    held: Annotated[int, _up_to(MAX_ROWS)] | None = None


@dataclass(frozen=True)
class ScaleEntry:
    """The factors of the values of an int8 table. per: "row" (at the end of each row) or "column".

    columns: the scales per column, float32[*shape of a row].
    """

    per: Annotated[str, check_scale]
    columns: ArrayEntry | None = None


@dataclass(frozen=True)
class TableEntry:
    """One table: the rows of one node or edge type."""

    kind: Annotated[str, _among(("node", "edge"))]
    type: Annotated[str | Relation, _type]
    key: Annotated[str, check_name]
    shape: Annotated[tuple[int, ...], _shape]
    dtype: Annotated[str, _among(TABLE_DTYPES)]
    page_bytes: Annotated[int, _up_to(1 << 40)]
    row_count: Annotated[int, _up_to(MAX_ROWS)]
    shards: tuple[Annotated[str, _shard], ...]
    checksums: ArrayEntry
    scale: ScaleEntry | None = None
    order: ArrayEntry | None = None
    """The position of each row on disk; None if it is the id."""
    columns: tuple[Annotated[str, _text], ...] | None = None
    """The names of the values of a row, in a table that was made of the columns of a file."""

    @property
    def name(self) -> str:
        return table_name(self.type, self.key)

    @property
    def geometry(self) -> Geometry:
        scale = None if self.scale is None else self.scale.per
        row_bytes = stored_row_bytes(self.shape, TABLE_DTYPES[self.dtype].itemsize, scale)
        return Geometry(self.row_count, row_bytes, self.page_bytes, len(self.shards))

    def with_crc(self, crc: int) -> TableEntry:
        """The same table. crc: of its checksums."""
        return dataclasses.replace(self, checksums=dataclasses.replace(self.checksums, crc32c=crc))


def table_entry(
    kind: str,
    type_: str | Relation,
    key: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    page_bytes: int,
    shards: Sequence[str],
    checksums: str,
    scale: str | None = None,
    columns: Sequence[str] = (),
) -> TableEntry:
    """The entry of a new table of values[shape], whose checksums have no CRC32C yet. Raises FormatError."""
    element = dtype_name(dtype)
    layout = stored_geometry(shape, dtype.itemsize, scale, page_bytes=page_bytes, shard_count=len(shards))
    return TableEntry(
        kind=kind,
        type=type_,
        key=key,
        shape=tuple(shape[1:]),
        dtype=element,
        page_bytes=layout.page_bytes,
        row_count=shape[0],
        shards=tuple(shards),
        checksums=ArrayEntry(checksums, "uint32", (layout.page_count,), 0),
        scale=None if scale is None else ScaleEntry(scale),
        columns=tuple(columns) or None,
    )


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
        entries: dict[str, object] = {f"nodes {n.type}": n for n in self.nodes}
        entries |= {f"relation {describe_type(r.type)}": r for r in self.relations}
        entries |= {f"table {t.name}": t for t in self.tables} | {"part": self.part}
        return {name: zlib.crc32(repr(_content(entry_json(e))).encode()) for name, e in entries.items()}

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
        return {name: entry_json(item) for name, item in fields if item is not None}
    if isinstance(value, Mapping):
        return {key: entry_json(item) for key, item in value.items()}
    return [entry_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def _content(value: Any) -> Any:
    """The JSON of an entry without heat and the paths of files."""
    left_out = {"path", "shards", *HEAT_ROLES.values()}
    if not isinstance(value, dict):
        return value
    return {name: _content(v) for name, v in value.items() if name not in left_out}


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file. Validates first, so that it can be read again. Raises FormatError."""
    fields = manifest.to_json()
    validate(fields)
    text = json.dumps(fields | {"checksum": f"crc32c:{_BLANK.decode()}"}, indent=1).encode() + b"\n"
    return text[: -len(_BLANK) - 4] + _checksum(text) + text[-4:]


def manifest_checksum(manifest: Manifest) -> str:
    """The checksum in a manifest's file, such as "crc32c:0123abcd". Parts name the whole dataset by it."""
    checksum = _CHECKSUM.search(dump_manifest(manifest))
    assert checksum is not None
    return f"crc32c:{checksum[1].decode()}"


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
    checksum = _CHECKSUM.search(data)
    if checksum is None:
        raise FormatError("has no checksum at its end; the file is damaged: convert the source again")
    actual = _checksum(data[: checksum.start(1)] + _BLANK + data[checksum.end(1) :])
    if actual != checksum[1]:
        raise FormatError(
            f"its checksum is {checksum[1].decode()}, but its bytes have {actual.decode()}; "
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
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name not in ("format", "version")}
    manifest: Manifest = _entry(Manifest, fields, "")
    if manifest.part is not None:
        _integer(manifest.part.index, "part.index", manifest.part.count - 1)
    counts = {n.type: n.count for n in manifest.nodes}
    _distinct([n.type for n in manifest.nodes], "node type")
    for i, nodes in enumerate(manifest.nodes):
        _check_nodes(nodes, f"nodes[{i}]", manifest.part)
    timed = {n.type for n in manifest.nodes if "time" in n.arrays}
    for i, relation in enumerate(manifest.relations):
        _check_relation(relation, f"relations[{i}]", counts, timed, manifest.part)
    _distinct([r.type for r in manifest.relations], "relation")
    entries: tuple[NodesEntry | RelationEntry, ...] = (*manifest.nodes, *manifest.relations)
    rows = {entry.type: entry.count if entry.held is None else entry.held for entry in entries}
    for i, table in enumerate(manifest.tables):
        _check_table(table, f"tables[{i}]", rows)
    _distinct([t.name for t in manifest.tables], "table")
    paths = [a.path for a in manifest.arrays()] + [s for t in manifest.tables for s in t.shards]
    _distinct([MANIFEST, *paths], "path")
    return manifest


def array_entry(fields: object) -> ArrayEntry:
    """The entry that entry_json made these fields of. Raises FormatError."""
    entry: ArrayEntry = _entry(ArrayEntry, fields, "array")
    return entry


def owner_dtype(part_count: int) -> str:
    """The element type of the owners of nodes."""
    return "uint8" if part_count <= 256 else "uint16"


def heat_dtype(role: str) -> str:
    """The element type of an array of heat."""
    return "uint32" if role == "out_degree" else "float32"


def position_dtype(row_count: int) -> str:
    """The element type of the positions of row_count rows."""
    return "int32" if row_count <= 1 << 31 else "int64"


# How the fields of entries agree


def _check_nodes(nodes: NodesEntry, where: str, part: Part | None) -> None:
    _check_part(nodes, where, part, OWNER)
    count, stored = nodes.count, [role for role in ID_ROLES if role in nodes.arrays]
    if stored and (missing := {"id", "id_key", "id_node"}.difference(stored)):
        raise FormatError(f"{where} has only {', '.join(stored)}; ids need {', '.join(sorted(missing))} too")
    expected: dict[str, tuple[str, int, *tuple[str, ...]]] = {  # what, length and types
        "time": ("times", count, "int32", "int64"),
        "id_offset": ("offsets of ids", count + 1, "int64"),
        "id_key": ("keys of ids", count, "int64"),
        "id_node": ("nodes of ids", count, position_dtype(count)),
        **{role: (f"in {role}", count, heat_dtype(role)) for role in HEAT_ROLES.values()},
    }
    if "id_offset" not in stored:
        expected["id"] = ("ids", count, "int64")
    if part is not None:
        expected[OWNER] = ("owners", count, owner_dtype(part.count))
    for role, entry in nodes.arrays.items():
        if role in expected:
            what, length, *dtypes = expected[role]
            _expect_array(entry, where, what, (length,), *dtypes)
        elif role == "label":
            if entry.dtype == "uint16":
                raise FormatError(f"{where}.arrays.label.dtype is 'uint16', which only {OWNER} may have")
            _expect(entry.shape[:1] == (count,), where, f"one label for each of {count} nodes", entry)
        elif role == "id":
            _expect(len(entry.shape) == 1 and entry.dtype == "uint8", where, "uint8 text of ids", entry)
        elif role == OWNER:
            raise FormatError(f"{where}.arrays has unknown {OWNER!r}, which only a part has")
        else:
            _expect(len(entry.shape) == 1 and entry.dtype == "int64", where, f"int64 ids in {role}", entry)


def _check_relation(
    relation: RelationEntry, where: str, counts: Mapping[str, int], timed: Container[str], part: Part | None
) -> None:
    """counts: of the nodes of each type. timed: the node types that have times."""
    source, _, destination = relation.type
    for end in (source, destination):
        if end not in counts:
            raise FormatError(f"{where} uses node type {end!r}, which is not in nodes")
    _check_part(relation, where, part, "edge_ids")
    arrays, sorted_by = relation.arrays, relation.sorted_by
    if sorted_by is not None or "time" in arrays:
        if sorted_by is None or (sorted_by == "edges") != ("time" in arrays) or not arrays:
            raise FormatError(
                f"{where}.sorted_by is {sorted_by!r}; it must be 'edges' with an array time, or 'nodes'"
            )
        if sorted_by == "nodes" and source not in timed:
            raise FormatError(f"{where} is sorted by the times of {source!r} nodes, which have none")
    if not arrays:
        return
    if "indptr" not in arrays or "indices" not in arrays:
        raise FormatError(f"{where} has only {', '.join(arrays)}; a graph needs indptr and indices")
    _expect_array(arrays["indptr"], where, "indptr", (counts[destination] + 1,), "int64")
    edges = relation.count if relation.held is None else relation.held
    for role in arrays.keys() - {"indptr"}:
        _expect_array(arrays[role], where, "times" if role == "time" else role, (edges,), "int32", "int64")
    limits = {"indices": (counts[source], "source nodes"), "edge_ids": (relation.count, "edges")}
    for role, (limit, what) in limits.items():
        if role in arrays and arrays[role].dtype == "int32" and limit > 1 << 31:
            raise FormatError(f"{where}: int32 {role} cannot name {limit} {what}")


def _check_part(entry: NodesEntry | RelationEntry, where: str, part: Part | None, role: str) -> None:
    """role: of an array that a part has."""
    if part is None:
        if entry.held is not None:
            raise FormatError(f"{where} has unknown fields ['held'], which only a part has")
        return
    if entry.held is None:
        raise FormatError(f"{where} lacks ['held']")
    _integer(entry.held, f"{where}.held", entry.count)
    if role not in entry.arrays:
        raise FormatError(f"{where} is of a part of a dataset, and has no array {role}")


def _check_table(table: TableEntry, where: str, rows: Mapping[str | Relation, int]) -> None:
    """rows: the number of rows of each node type and relation."""
    if table.kind != ("node" if isinstance(table.type, str) else "edge"):
        raise FormatError(f"{where}.kind is {table.kind!r}, but its type is {describe_type(table.type)}")
    if table.type not in rows:
        raise FormatError(f"{where} belongs to {describe_type(table.type)}, which is not in the manifest")
    name, count = f"{where} ({table.name})", rows[table.type]
    if not 1 <= len(table.shards) <= MAX_SHARDS:
        raise FormatError(f"{where} has {len(table.shards)} shards; it must have 1 to {MAX_SHARDS}")
    if table.scale is not None:
        if table.dtype != "int8":
            raise FormatError(f"{name} is {table.dtype} with a scale; only int8 has one")
        columns = table.scale.columns
        if (columns is not None) != (table.scale.per == "column"):
            raise FormatError(f"{where}.scale is per {table.scale.per}; 'column' has columns, 'row' has none")
        if columns is not None:
            _expect_array(columns, where, "scales of columns", table.shape, "float32")
    if table.row_count != count:
        raise FormatError(f"{name} has {table.row_count} rows for {count} of {describe_type(table.type)}")
    if table.columns is not None:
        if table.shape != (len(table.columns),):
            raise FormatError(f"{name} has {len(table.columns)} columns for rows of shape {table.shape}")
        _distinct(list(table.columns), f"{name}: column")
    layout = table.geometry
    with naming(name):
        page_bytes = table_page_bytes(layout.row_bytes, table.page_bytes)
    if page_bytes != table.page_bytes:
        raise FormatError(f"{name}: rows of {layout.row_bytes} bytes in pages of {table.page_bytes}")
    _expect_array(table.checksums, where, "checksums", (layout.page_count,), "uint32")
    if table.order is not None:
        _expect_array(table.order, where, "positions", (count,), position_dtype(count))


def _expect(holds: bool, where: str, expected: str, entry: ArrayEntry) -> None:
    if not holds:
        raise FormatError(f"{where}: {entry.path} is {entry.describe()}; expected {expected}")


def _expect_array(entry: ArrayEntry, where: str, what: str, shape: tuple[int, ...], *dtypes: str) -> None:
    dtype = dtypes[0] if len(dtypes) == 1 else "int"
    _expect(entry.shape == shape and entry.dtype in dtypes, where, f"{dtype}{list(shape)} {what}", entry)


def _distinct(items: list[Any], what: str) -> None:
    seen = set()
    for item in items:
        if item in seen:
            raise FormatError(f"{what} {describe_type(item)} occurs twice")
        seen.add(item)


# Entries from JSON. A reader converts one field, or raises FormatError with its name.

Reader = Callable[[object, str], Any]


@functools.cache
def _readers(kind: type[Any]) -> dict[str, Reader]:
    """The readers of the fields of an entry, from their annotations."""
    return {name: _reader(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _reader(hint: Any) -> Reader:
    if isinstance(hint, type):
        return functools.partial(_entry, hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        reader: Reader = arguments[1]
        return reader
    item = _reader(arguments[0])
    if origin is tuple:
        return lambda value, where: tuple(item(v, f"{where}[{i}]") for i, v in enumerate(_list(value, where)))
    return item  # or None: the field is optional


def _entry(kind: type[Any], value: object, where: str) -> Any:
    """The entry of a kind with these fields. where: its name, "" for the manifest."""
    fields, what = _object(value, where or "manifest"), where or "manifest"
    readers = _readers(kind)  # type: ignore[arg-type]
    optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    if missing := [name for name in readers if name not in fields and name not in optional]:
        raise FormatError(f"{what} lacks {missing}")
    if extra := [name for name in fields if name not in readers]:
        raise FormatError(f"{what} has unknown fields {extra[:4]}")
    prefix = f"{where}." if where else ""
    return kind(**{name: readers[name](fields[name], prefix + name) for name in readers if name in fields})


def _arrays_of(*roles: str) -> Reader:
    def read(value: object, where: str) -> dict[str, ArrayEntry]:
        fields = _object(value, where)
        for role in fields:
            if role not in roles:
                raise FormatError(f"{where} has unknown {role!r} (known: {', '.join(roles)})")
        return {role: _entry(ArrayEntry, array, f"{where}.{role}") for role, array in fields.items()}

    return read


def _among(known: Iterable[str]) -> Reader:
    names = list(known)  # the value may not be hashable

    def read(value: object, where: str) -> object:
        if value not in names:
            raise FormatError(f"{where} is {str(value)[:80]!r}; it must be {', '.join(map(repr, names))}")
        return value

    return read


def _up_to(most: int, least: int = 0) -> Reader:
    return lambda value, where: _integer(value, where, most, least)


def _integer(value: object, where: str, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        described = value if type(value) is int else _kind(value)
        raise FormatError(f"{where} must be an integer from {least} to {most}, not {described}")
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} must be an object, not {_kind(value)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where} must be a list, not {_kind(value)}")
    return value


def _shape(value: object, where: str) -> tuple[int, ...]:
    lengths = _list(value, where)
    if len(lengths) > 8:
        raise FormatError(f"{where} has {len(lengths)} dimensions; at most 8")
    return tuple(_integer(n, f"{where}[{i}]", MAX_ROWS) for i, n in enumerate(lengths))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{where} must be text, not {_kind(value)}")
    return value


def _relation_type(value: object, where: str) -> Relation:
    names = _list(value, where)
    if len(names) != 3:
        raise FormatError(
            f"{where} must be [source type, relation, destination type], not {len(names)} names"
        )
    return check_name(names[0], where), check_name(names[1], where), check_name(names[2], where)


def _type(value: object, where: str) -> str | Relation:
    return _relation_type(value, where) if isinstance(value, list) else check_name(value, where)


def _path(value: object, where: str) -> str:
    path = _shard(value, where)
    if PurePosixPath(path).is_absolute():
        raise FormatError(f"{where} is {path!r}; only shards may be outside the dataset")
    return path


def _shard(value: object, where: str) -> str:
    path = PurePosixPath(value) if isinstance(value, str) else PurePosixPath()
    if str(path) in (".", "/") or ".." in path.parts or re.search(r"[\0\ud800-\udfff]", str(path)):
        raise FormatError(f"{where} is {str(value)[:80]!r}; it must be a path without '..'")
    return str(path)


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(
        type(value), f"{value!r:.40}"
    )
