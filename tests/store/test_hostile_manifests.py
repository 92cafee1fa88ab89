"""Hostile manifests: each is refused with one error that names the field."""

import json
import re

import pytest
from datasets import write_dataset

from gids import FeatureStore, FormatError, _core
from gids.cli import main
from gids.store.manifest import dump_manifest, load_manifest, validate
from gids.write.partition import partition


def sign(fields):
    """A manifest file with a right checksum, whatever its fields say."""
    import numpy as np

    text = json.dumps(fields | {"checksum": "crc32c:00000000"}, indent=1) + "\n"
    crc = _core.crc32c_extend(0, np.frombuffer(text.encode(), np.uint8))
    return text.replace("crc32c:00000000", f"crc32c:{crc:08x}").encode()


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("hostile") / "mag.gids")


def edit(*path, to):
    """Set the field at a path; DELETE removes it."""

    def change(fields):
        target = fields
        for step in path[:-1]:
            target = target[step]
        if to is DELETE:
            del target[path[-1]]
        else:
            target[path[-1]] = to

    return change


DELETE = object()
TABLE, NODES, EDGES = ("tables", 0), ("nodes", 0), ("relations", 0)

PART = {"index": 0, "count": 1, "of": "crc32c:0123abcd", "method": "hash", "topology": "crc32c:0123abcd"}
IDS = {"path": "nodes/id.npy", "dtype": "int64", "shape": [20], "crc32c": 0}
OWNER = {"path": "nodes/owner.npy", "dtype": "uint8", "shape": [20], "crc32c": 0}

HOSTILE = {
    "a label dtype that is a list": (edit(*NODES, "arrays", "label", "dtype", to=[]), "dtype is '[]'"),
    "another format": (edit("format", to="zarr"), 'has no "format": "gids"'),
    "a later version": (edit("version", to=2), "version 2; this gids reads version 1"),
    "a version that is text": (edit("version", to="1"), "version '1'"),
    "a missing part": (edit("tables", to=DELETE), "manifest lacks ['tables']"),
    "an unknown field": (edit("compression", to="zstd"), "unknown fields ['compression']"),
    "tables that are no list": (edit("tables", to={}), "tables must be a list, not an object"),
    "a table that is no object": (edit(*TABLE, to=7), "tables[0] must be an object, not 7"),
    "a table without dtype": (edit(*TABLE, "dtype", to=DELETE), "tables[0] lacks ['dtype']"),
    "an unknown dtype": (edit(*TABLE, "dtype", to="object"), "tables[0].dtype is 'object'"),
    "a dtype that is a list": (edit(*TABLE, "dtype", to=["float32"]), "tables[0].dtype"),
    "an unknown kind": (edit(*TABLE, "kind", to="page"), "tables[0].kind is 'page'"),
    "a table of an unknown type": (
        edit(*TABLE, "type", to="venue"),
        "belongs to 'venue', which is not in the manifest",
    ),
    "an edge table of a node type": (
        edit(*TABLE, "kind", to="edge"),
        "kind is 'edge', but its type is 'paper'",
    ),
    "an empty key": (edit(*TABLE, "key", to=""), "tables[0].key must be a non-empty text"),
    "a key that is a number": (edit(*TABLE, "key", to=3), "tables[0].key must be a non-empty text, not 3"),
    "a surrogate in a key": (edit(*TABLE, "key", to="\ud800"), "not valid Unicode"),
    "an endless key": (edit(*TABLE, "key", to="k" * 500), "too long"),
    "two tables of one name": (edit("tables", 2, "key", to="feat"), "table 'paper.feat' occurs twice"),
    "a negative row count": (
        edit(*TABLE, "row_count", to=-1),
        "tables[0].row_count must be an integer from 0",
    ),
    "a true row count": (edit(*TABLE, "row_count", to=True), "row_count must be an integer"),
    "a row count with a fraction": (edit(*TABLE, "row_count", to=20.0), "row_count must be an integer"),
    "a huge row count": (edit(*TABLE, "row_count", to=1 << 60), "row_count must be an integer from 0 to"),
    "more rows than nodes": (edit(*TABLE, "row_count", to=21), "has 21 rows for 20 of 'paper'"),
    "a row without elements": (edit(*TABLE, "shape", to=[0]), "rows have 0 bytes"),
    "a row of petabytes": (edit(*TABLE, "shape", to=[1 << 48, 1 << 48]), "a row must have 1 to"),
    "a negative dimension": (edit(*TABLE, "shape", to=[-50]), "tables[0].shape[0] must be an integer"),
    "too many dimensions": (edit(*TABLE, "shape", to=[1] * 9), "9 dimensions"),
    "no page size": (edit(*TABLE, "page_bytes", to=0), "page_bytes is 0"),
    "a crooked page size": (
        edit(*TABLE, "page_bytes", to=1000),
        "page_bytes is 1000; it must be a multiple of 512",
    ),
    "pages shorter than rows": (edit("tables", 1, "page_bytes", to=512), "rows of 600 bytes in pages of 512"),
    "no shards": (edit(*TABLE, "shards", to=[]), "has 0 shards"),
    "too many shards": (edit(*TABLE, "shards", to=[f"s{i}" for i in range(300)]), "has 300 shards"),
    "a shard above the dataset": (edit(*TABLE, "shards", 0, to="../other/shard-00.bin"), "without '..'"),
    "a shard with a NUL": (edit(*TABLE, "shards", 0, to="a\0b"), "must be a path"),
    "a shard that is a number": (edit(*TABLE, "shards", 0, to=5), "tables[0].shards[0] is '5'"),
    "a shard elsewhere": (
        edit(*TABLE, "shards", 0, to="/etc/passwd"),
        "/etc/passwd is outside the dataset",
    ),
    "the dataset as a shard": (edit(*TABLE, "shards", 0, to="."), "must be a path"),
    "a shard twice": (
        edit(*TABLE, "shards", to=["tables/paper.feat/shard-00.bin"] * 2),
        "path 'tables/paper.feat/shard-00.bin' occurs twice",
    ),
    "the manifest as a shard": (
        edit(*TABLE, "shards", 0, to="manifest.json"),
        "path 'manifest.json' occurs twice",
    ),
    "a shard that is a directory": (edit(*TABLE, "shards", 0, to="tables"), "tables is not a regular file"),
    "a shard that is missing": (edit(*TABLE, "shards", 0, to="tables/none"), "tables/none is missing"),
    "too few checksums": (edit(*TABLE, "checksums", "shape", to=[9]), "expected uint32[10] checksums"),
    "checksums elsewhere": (
        edit(*TABLE, "checksums", "path", to="/etc/passwd"),
        "only shards may be outside",
    ),
    "checksums of another type": (edit(*TABLE, "checksums", "dtype", to="int64"), "expected uint32[10]"),
    "a crc that is text": (edit(*TABLE, "checksums", "crc32c", to="0"), "crc32c must be an integer"),
    "a crc of 33 bits": (
        edit(*TABLE, "checksums", "crc32c", to=1 << 32),
        "crc32c must be an integer from 0 to 4294967295",
    ),
    "a node type twice": (edit("nodes", 1, "type", to="paper"), "node type 'paper' occurs twice"),
    "fewer labels than nodes": (
        edit(*NODES, "arrays", "label", "shape", to=[19]),
        "expected one label for each of 20",
    ),
    "a scalar label": (edit(*NODES, "arrays", "label", "shape", to=[]), "expected one label"),
    "a label of an unknown type": (edit(*NODES, "arrays", "label", "dtype", to="O"), "dtype is 'O'"),
    "a split of floats": (
        edit(*NODES, "arrays", "train_idx", "dtype", to="float32"),
        "expected int64 ids in train_idx",
    ),
    "ids without keys": (
        edit(*NODES, "arrays", "id", to=IDS),
        "has only id; ids need id_key, id_node too",
    ),
    "ids of other nodes": (
        edit(*NODES, "arrays", to={role: IDS | {"shape": [19]} for role in ("id", "id_key", "id_node")}),
        "expected int64[20] ids",
    ),
    "text without offsets": (
        edit(*NODES, "arrays", to=dict.fromkeys(("id", "id_key", "id_node"), IDS | {"dtype": "uint8"})),
        "expected int64[20] ids",
    ),
    "text of numbers": (
        edit(*NODES, "arrays", to=dict.fromkeys(("id", "id_offset", "id_key", "id_node"), IDS)),
        "expected uint8 text of ids",
    ),
    "an unknown array of nodes": (edit(*NODES, "arrays", "colour", to={}), "unknown 'colour'"),
    "out-degrees of other nodes": (
        edit(*NODES, "arrays", "out_degree", "shape", to=[3]),
        "expected uint32[20]",
    ),
    "heat of another type": (
        edit(*NODES, "arrays", "heat_sampled", to=OWNER | {"dtype": "float64"}),
        "expected float32[20] in heat_sampled",
    ),
    "heat of other nodes": (
        edit(*NODES, "arrays", "heat_sampled", to=OWNER | {"dtype": "float32", "shape": [19]}),
        "expected float32[20] in heat_sampled",
    ),
    "an order of other rows": (
        edit(*TABLE, "order", to=OWNER | {"dtype": "int32", "shape": [19]}),
        "expected int32[20] positions",
    ),
    "an order of another type": (edit(*TABLE, "order", to=IDS), "expected int32[20] positions"),
    "an order elsewhere": (edit(*TABLE, "order", to=IDS | {"path": "../x.npy"}), "a path without '..'"),
    "no order": (edit(*TABLE, "order", to=None), "tables[0].order must be an object"),
    "arrays that are a list": (edit(*NODES, "arrays", to=[]), "nodes[0].arrays must be an object"),
    "a relation of two names": (edit(*EDGES, "type", to=["a", "b"]), "not 2 names"),
    "a relation between unknown types": (edit(*EDGES, "type", 0, to="venue"), "uses node type 'venue'"),
    "a relation twice": (edit("relations", 1, "type", to=["author", "writes", "paper"]), "occurs twice"),
    "a graph without indptr": (
        edit(*EDGES, "arrays", "indptr", to=DELETE),
        "a graph needs indptr and indices",
    ),
    "an indptr of other nodes": (
        edit(*EDGES, "arrays", "indptr", "shape", to=[20]),
        "expected int64[21] indptr",
    ),
    "fewer indices than edges": (
        edit(*EDGES, "arrays", "indices", "shape", to=[3]),
        "expected int[4] indices",
    ),
    "indices of floats": (
        edit(*EDGES, "arrays", "indices", "dtype", to="float64"),
        "expected int[4] indices",
    ),
    "edge ids of other edges": (
        edit(*EDGES, "arrays", "edge_ids", "shape", to=[9]),
        "expected int[4] edge_ids",
    ),
    "a part of a whole dataset": (edit("part", to=PART), "nodes[0] lacks ['held']"),
    "held nodes of a whole dataset": (edit(*NODES, "held", to=1), "nodes[0] has unknown fields ['held']"),
    "owners of a whole dataset": (
        edit(*NODES, "arrays", "owner", to=OWNER),
        "nodes[0].arrays has unknown 'owner'",
    ),
    "too many nodes for int32": (edit("nodes", 0, "count", to=1 << 40), "one label for each of"),
}


def refused(path, change, message):
    """Opening the dataset fails with this message while its manifest is changed."""
    data = (path / "manifest.json").read_bytes()
    fields = json.loads(data)
    del fields["checksum"]
    change(fields)
    (path / "manifest.json").write_bytes(sign(fields))
    try:
        with pytest.raises(FormatError, match=re.escape(message)):
            FeatureStore(path)
    finally:
        (path / "manifest.json").write_bytes(data)
    FeatureStore(path)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest_is_refused_with_the_cause(honest, name):
    refused(honest, *HOSTILE[name])


@pytest.mark.parametrize("command", ["info", "verify"])
def test_commands_name_another_version_and_say_what_to_do(dataset, command, capsys):
    manifest = dataset / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 4'))
    assert main([command, str(dataset)]) in (1, 2)
    said = "".join(capsys.readouterr())
    assert f"{manifest}: version 4; this gids reads version 1: " in said
    assert "convert the source again" in said


@pytest.fixture(scope="module")
def honest_part(honest, tmp_path_factory):
    out = tmp_path_factory.mktemp("hostile_part") / "parts"
    partition(honest, out, 2, method="hash")
    return out / "part-001.gids"


HOSTILE_PARTS = {
    "no part": (edit("part", to=DELETE), "nodes[0] has unknown fields ['held']"),
    "a part that is a number": (edit("part", to=1), "part must be an object, not 1"),
    "a part beyond the last": (edit("part", "index", to=2), "part.index must be an integer from 0 to 1"),
    "no parts": (edit("part", "count", to=0), "part.count must be an integer from 1 to 4096, not 0"),
    "too many parts": (edit("part", "count", to=4097), "part.count must be an integer from 1 to 4096"),
    "parts of nothing": (edit("part", "of", to="md5:0"), "part.of is 'md5:0'; it must be the checksum of a"),
    "a part of edges without a checksum": (edit("part", "topology", to=DELETE), "part lacks ['topology']"),
    "a part of edges of another kind": (edit("part", "topology", to=7), "part.topology is '7'; it must"),
    "an empty method": (edit("part", "method", to=""), "part.method must be a non-empty text"),
    "a part with more": (edit("part", "size", to=3), "part has unknown fields ['size']"),
    "no owners": (edit(*NODES, "arrays", "owner", to=DELETE), "nodes[0] is of a part"),
    "owners of other nodes": (edit(*NODES, "arrays", "owner", "shape", to=[3]), "expected uint8[20] owners"),
    "wide owners of few parts": (edit(*NODES, "arrays", "owner", "dtype", to="uint16"), "expected uint8[20]"),
    "no number of held nodes": (edit(*NODES, "held", to=DELETE), "nodes[0] lacks ['held']"),
    "more held nodes than nodes": (edit(*NODES, "held", to=21), "nodes[0].held must be an integer from 0"),
    "other rows than held nodes": (edit(*NODES, "held", to=1), "(paper.feat) has"),
    "no number of held edges": (edit(*EDGES, "held", to=DELETE), "relations[0] lacks ['held']"),
    "no edge ids": (edit(*EDGES, "arrays", "edge_ids", to=DELETE), "has no array edge_ids"),
    "no topology": (edit(*EDGES, "arrays", to={}), "has no array edge_ids"),
    "other indices than held edges": (edit(*EDGES, "arrays", "indices", "shape", to=[9]), "expected int["),
    "labels of uint16": (edit(*NODES, "arrays", "label", "dtype", to="uint16"), "which only owner may have"),
}


@pytest.mark.parametrize("name", HOSTILE_PARTS)
def test_hostile_manifest_of_a_part_is_refused_with_the_cause(honest_part, name):
    refused(honest_part, *HOSTILE_PARTS[name])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", 'has no "format"'),
        (b"9" * 5000, "not JSON"),
        (b'{"format": "gids", "version": 1}', "no checksum at its end"),
        (b" " * (17 << 20), "bytes or more"),
    ],
)
def test_invalid_manifest_file_is_refused(data, message):
    with pytest.raises(FormatError, match=message):
        load_manifest(data)


def test_any_flipped_bit_of_a_manifest_is_found(honest):
    data = (honest / "manifest.json").read_bytes()
    load_manifest(data)
    for at in range(len(data)):
        for bit in range(8):
            altered = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(FormatError):
                load_manifest(altered)


def test_writer_validates_as_the_reader_does(honest):
    manifest = load_manifest((honest / "manifest.json").read_bytes())
    assert dump_manifest(manifest) == (honest / "manifest.json").read_bytes()
    with pytest.raises(FormatError, match="nodes must be a list"):
        validate(manifest.to_json() | {"nodes": None})
