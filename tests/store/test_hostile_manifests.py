"""Hostile manifests: each is refused with one error that names the field."""

import re

import numpy as np
import pytest
import torch
from datasets import sign, write_dataset

from gids import FeatureStore, FormatError
from gids.cli import main
from gids.store.manifest import dump_manifest, load_manifest, validate
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A dataset, one with scales and times, and a part."""
    folder = tmp_path_factory.mktemp("hostile")
    edges = edge_list(np.arange(9), np.arange(9), num_src=9, num_dst=9)
    with DatasetWriter(folder / "scaled.gids") as writer:
        for scale in ("row", "column"):
            writer.write_table("node", "n", scale, torch.randn(9, 6), dtype=torch.int8, scale=scale)
        writer.write_edges(("n", "timed", "n"), edges, times=np.arange(9))
        writer.write_edges(("n", "plain", "n"), edges)
    whole = write_dataset(folder / "mag.gids")
    partition(whole, folder / "parts", 2, method="hash")
    return {
        "whole": whole,
        "scaled": folder / "scaled.gids",
        "part": folder / "parts/part-001.gids",
    }


DELETE = object()

PART = {"index": 0, "count": 1, "of": "crc32c:0123abcd", "method": "hash", "topology": "crc32c:0123abcd"}
IDS = {"path": "nodes/id.npy", "dtype": "int64", "shape": [20], "crc32c": 0}
ID_ROLES = ["id", "id_key", "id_node"]
OWNER = {"path": "nodes/owner.npy", "dtype": "uint8", "shape": [20], "crc32c": 0}

HOSTILE = [  # a dataset, a field, its value, and the error
    ("whole", "format", "zarr", 'has no "format": "gids"'),
    ("whole", "version", "1", "version '1'"),
    ("whole", "tables", DELETE, "manifest lacks ['tables']"),
    ("whole", "compression", "zstd", "unknown fields ['compression']"),
    ("whole", "tables", {}, "tables must be a list, not an object"),
    ("whole", "tables.0", 7, "tables[0] must be an object, not 7"),
    ("whole", "tables.0.dtype", "object", "tables[0].dtype is 'object'"),
    ("whole", "tables.0.type", "venue", "belongs to 'venue', which is not in the manifest"),
    ("whole", "tables.0.kind", "edge", "kind is 'edge', but its type is 'paper'"),
    ("whole", "tables.0.key", "", "tables[0].key must be a non-empty text"),
    ("whole", "tables.0.key", "\ud800", "not valid Unicode"),
    ("whole", "tables.0.key", "k" * 500, "too long"),
    ("whole", "tables.2.key", "feat", "table 'paper.feat' occurs twice"),
    ("whole", "tables.0.columns", [1], "tables[0].columns[0] must be text, not 1"),
    ("whole", "tables.0.columns", ["a"], "has 1 columns for rows of shape (50,)"),
    ("whole", "tables.0.columns", ["a"] * 50, "column 'a' occurs twice"),
    ("whole", "tables.0.row_count", True, "row_count must be an integer"),
    ("whole", "tables.0.row_count", 1 << 60, "row_count must be an integer from 0 to"),
    ("whole", "tables.0.row_count", 21, "has 21 rows for 20 of 'paper'"),
    ("whole", "tables.0.shape", [1 << 48, 1 << 48], "a row must have 1 to"),
    ("whole", "tables.0.shape", [1] * 9, "9 dimensions"),
    ("whole", "tables.0.page_bytes", 1000, "page_bytes is 1000; it must be a multiple of 512"),
    ("whole", "tables.1.page_bytes", 512, "rows of 600 bytes in pages of 512"),
    ("whole", "tables.0.shards", [f"s{i}" for i in range(300)], "has 300 shards"),
    ("whole", "tables.0.shards.0", "../other/shard-00.bin", "without '..'"),
    ("whole", "tables.0.shards.0", "a\x00b", "must be a path"),
    ("whole", "tables.0.shards.0", "/etc/passwd", "/etc/passwd is outside the dataset"),
    ("whole", "tables.0.shards.0", "manifest.json", "path 'manifest.json' occurs twice"),
    ("whole", "tables.0.shards.0", "tables", "tables is not a regular file"),
    ("whole", "tables.0.checksums.shape", [9], "expected uint32[10] checksums"),
    ("whole", "tables.0.checksums.path", "/etc/passwd", "only shards may be outside"),
    ("whole", "tables.0.checksums.crc32c", 1 << 32, "crc32c must be an integer from 0 to 4294967295"),
    ("whole", "tables.0.order", IDS, "expected int32[20] positions"),
    ("whole", "nodes.1.type", "paper", "node type 'paper' occurs twice"),
    ("whole", "nodes.0.count", 1 << 40, "one label for each of"),
    ("whole", "nodes.0.arrays.train_idx.dtype", "float32", "expected int64 ids in train_idx"),
    ("whole", "nodes.0.arrays.id", IDS, "has only id; ids need id_key, id_node too"),
    ("whole", "nodes.0.arrays", dict.fromkeys(ID_ROLES, IDS | {"shape": [19]}), "expected int64[20] ids"),
    ("whole", "nodes.0.arrays", dict.fromkeys([*ID_ROLES, "id_offset"], IDS), "expected uint8 text of ids"),
    ("whole", "nodes.0.arrays.colour", {}, "unknown 'colour'"),
    ("whole", "nodes.0.arrays.heat_sampled", OWNER | {"dtype": "float64"}, "expected float32[20] in heat_"),
    ("whole", "nodes.0.arrays.owner", OWNER, "nodes[0].arrays has unknown 'owner'"),
    ("whole", "nodes.0.held", 1, "nodes[0] has unknown fields ['held']"),
    ("whole", "relations.0.type", ["a", "b"], "not 2 names"),
    ("whole", "relations.0.type.0", "venue", "uses node type 'venue'"),
    ("whole", "relations.0.arrays.indptr", DELETE, "a graph needs indptr and indices"),
    ("whole", "relations.0.arrays.indptr.shape", [20], "expected int64[21] indptr"),
    ("whole", "relations.0.arrays.indices.dtype", "float64", "expected int[4] indices"),
    ("whole", "part", PART, "nodes[0] lacks ['held']"),
    ("scaled", "tables.0.scale.per", [], "tables[0].scale.per is []; it must be 'row'"),
    ("scaled", "tables.1.scale.columns", DELETE, "tables[1].scale is per column; 'column' has"),
    ("scaled", "tables.0.dtype", "uint8", "(n.row) is uint8 with a scale; only int8 has one"),
    ("scaled", "tables.1.scale.columns.shape", [5], "float32[6] scales of columns"),
    ("scaled", "relations.0.sorted_by", "source", "relations[0].sorted_by is 'source'; it must be 'edges'"),
    ("scaled", "relations.0.sorted_by", DELETE, "sorted_by is None; it must be 'edges' with an array time"),
    ("scaled", "relations.1.sorted_by", "nodes", "'n' nodes, which have none"),
    ("scaled", "relations.0.arrays.time.shape", [8], "time.npy is int32[8]; expected int[9] times"),
    ("part", "part", DELETE, "nodes[0] has unknown fields ['held']"),
    ("part", "part.index", 2, "part.index must be an integer from 0 to 1"),
    ("part", "part.count", 0, "part.count must be an integer from 1 to 4096, not 0"),
    ("part", "part.of", "", "part.of must be a non-empty text"),
    ("part", "nodes.0.arrays.owner", DELETE, "nodes[0] is of a part"),
    ("part", "nodes.0.arrays.owner.dtype", "uint16", "expected uint8[20]"),
    ("part", "nodes.0.held", 21, "nodes[0].held must be an integer from 0"),
    ("part", "nodes.0.held", 1, "(paper.feat) has 11 rows for 1 of 'paper'"),
    ("part", "nodes.0.arrays.label.dtype", "uint16", "which only owner may have"),
]


@pytest.mark.parametrize(("name", "field", "value", "message"), HOSTILE)
def test_hostile_manifest_is_refused_with_the_cause(honest, name, field, value, message):
    dataset = honest[name]
    data = (dataset / "manifest.json").read_bytes()

    def change(target):
        *steps, last = [int(step) if step.isdigit() else step for step in field.split(".")]
        for step in steps:
            target = target[step]
        if value is DELETE:
            del target[last]
        else:
            target[last] = value

    sign(dataset, change)
    try:
        with pytest.raises(FormatError, match=re.escape(message)):
            FeatureStore(dataset)
    finally:
        (dataset / "manifest.json").write_bytes(data)


def test_commands_name_another_version_and_say_what_to_do(dataset, capsys):
    manifest = dataset / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 4'))
    assert main(["info", str(dataset)]) == 2
    said = capsys.readouterr().err
    assert f"{manifest}: version 4; this gids reads version 1: " in said
    assert "convert the source again" in said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", 'has no "format"'),
        (b'{"format": "gids", "version": 1}', "no checksum at its end"),
        (b" " * (17 << 20), "bytes or more"),
    ],
    ids=["no text", "nested", "no object", "no checksum", "too long"],
)
def test_invalid_manifest_file_is_refused(data, message):
    with pytest.raises(FormatError, match=message):
        load_manifest(data)


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(honest):
    data = (honest["whole"] / "manifest.json").read_bytes()
    for at in range(len(data)):
        with pytest.raises(FormatError):
            load_manifest(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


def test_writer_validates_as_the_reader_does(honest):
    for path in honest.values():
        manifest = load_manifest((path / "manifest.json").read_bytes())
        assert dump_manifest(manifest) == (path / "manifest.json").read_bytes()
    with pytest.raises(FormatError, match="nodes must be a list"):
        validate(manifest.to_json() | {"nodes": None})
