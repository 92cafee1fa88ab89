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
    return write_dataset(tmp_path_factory.mktemp("hostile") / "mag.gids")


DELETE = object()

PART = {"index": 0, "count": 1, "of": "crc32c:0123abcd", "method": "hash", "topology": "crc32c:0123abcd"}
IDS = {"path": "nodes/id.npy", "dtype": "int64", "shape": [20], "crc32c": 0}
ID_ROLES = ["id", "id_key", "id_node"]
OWNER = {"path": "nodes/owner.npy", "dtype": "uint8", "shape": [20], "crc32c": 0}

HOSTILE = [  # a field, its value, and the error
    ("nodes.0.arrays.label.dtype", [], "dtype is '[]'"),
    ("format", "zarr", 'has no "format": "gids"'),
    ("version", 2, "version 2; this gids reads version 1"),
    ("version", "1", "version '1'"),
    ("tables", DELETE, "manifest lacks ['tables']"),
    ("compression", "zstd", "unknown fields ['compression']"),
    ("tables", {}, "tables must be a list, not an object"),
    ("tables.0", 7, "tables[0] must be an object, not 7"),
    ("tables.0.dtype", DELETE, "tables[0] lacks ['dtype']"),
    ("tables.0.dtype", "object", "tables[0].dtype is 'object'"),
    ("tables.0.kind", "page", "tables[0].kind is 'page'"),
    ("tables.0.type", "venue", "belongs to 'venue', which is not in the manifest"),
    ("tables.0.kind", "edge", "kind is 'edge', but its type is 'paper'"),
    ("tables.0.key", "", "tables[0].key must be a non-empty text"),
    ("tables.0.columns", "abc", "tables[0].columns must be a list"),
    ("tables.0.columns", [1], "tables[0].columns[0] must be text, not 1"),
    ("tables.0.columns", ["a"], "has 1 columns for rows of shape (50,)"),
    ("tables.0.columns", ["a"] * 50, "column 'a' occurs twice"),
    ("tables.0.key", "\ud800", "not valid Unicode"),
    ("tables.0.key", "k" * 500, "too long"),
    ("tables.2.key", "feat", "table 'paper.feat' occurs twice"),
    ("tables.0.row_count", -1, "tables[0].row_count must be an integer from 0"),
    ("tables.0.row_count", True, "row_count must be an integer"),
    ("tables.0.row_count", 20.0, "row_count must be an integer"),
    ("tables.0.row_count", 1 << 60, "row_count must be an integer from 0 to"),
    ("tables.0.row_count", 21, "has 21 rows for 20 of 'paper'"),
    ("tables.0.shape", [0], "rows have 0 bytes"),
    ("tables.0.shape", [1 << 48, 1 << 48], "a row must have 1 to"),
    ("tables.0.shape", [-50], "tables[0].shape[0] must be an integer"),
    ("tables.0.shape", [1] * 9, "9 dimensions"),
    ("tables.0.page_bytes", 0, "page_bytes is 0"),
    ("tables.0.page_bytes", 1000, "page_bytes is 1000; it must be a multiple of 512"),
    ("tables.1.page_bytes", 512, "rows of 600 bytes in pages of 512"),
    ("tables.0.shards", [], "has 0 shards"),
    ("tables.0.shards", [f"s{i}" for i in range(300)], "has 300 shards"),
    ("tables.0.shards.0", "../other/shard-00.bin", "without '..'"),
    ("tables.0.shards.0", "a\x00b", "must be a path"),
    ("tables.0.shards.0", 5, "tables[0].shards[0] is '5'"),
    ("tables.0.shards.0", "/etc/passwd", "/etc/passwd is outside the dataset"),
    ("tables.0.shards.0", ".", "must be a path"),
    ("tables.0.shards", ["shard-00.bin"] * 2, "path 'shard-00.bin' occurs twice"),
    ("tables.0.shards.0", "manifest.json", "path 'manifest.json' occurs twice"),
    ("tables.0.shards.0", "tables", "tables is not a regular file"),
    ("tables.0.shards.0", "tables/none", "tables/none is missing"),
    ("tables.0.checksums.shape", [9], "expected uint32[10] checksums"),
    ("tables.0.checksums.path", "/etc/passwd", "only shards may be outside"),
    ("tables.0.checksums.dtype", "int64", "expected uint32[10]"),
    ("tables.0.checksums.crc32c", "0", "crc32c must be an integer"),
    ("tables.0.checksums.crc32c", 1 << 32, "crc32c must be an integer from 0 to 4294967295"),
    ("nodes.1.type", "paper", "node type 'paper' occurs twice"),
    ("nodes.0.arrays.label.shape", [19], "expected one label for each of 20"),
    ("nodes.0.arrays.label.shape", [], "expected one label"),
    ("nodes.0.arrays.label.dtype", "O", "dtype is 'O'"),
    ("nodes.0.arrays.train_idx.dtype", "float32", "expected int64 ids in train_idx"),
    ("nodes.0.arrays.id", IDS, "has only id; ids need id_key, id_node too"),
    ("nodes.0.arrays", dict.fromkeys(ID_ROLES, IDS | {"shape": [19]}), "expected int64[20] ids"),
    ("nodes.0.arrays", dict.fromkeys(ID_ROLES, IDS | {"dtype": "uint8"}), "expected int64[20] ids"),
    ("nodes.0.arrays", dict.fromkeys([*ID_ROLES, "id_offset"], IDS), "expected uint8 text of ids"),
    ("nodes.0.arrays.colour", {}, "unknown 'colour'"),
    ("nodes.0.arrays.out_degree.shape", [3], "expected uint32[20]"),
    ("nodes.0.arrays.heat_sampled", OWNER | {"dtype": "float64"}, "expected float32[20] in heat_sampled"),
    (
        "nodes.0.arrays.heat_sampled",
        OWNER | {"dtype": "float32", "shape": [19]},
        "expected float32[20] in heat",
    ),
    ("tables.0.order", OWNER | {"dtype": "int32", "shape": [19]}, "expected int32[20] positions"),
    ("tables.0.order", IDS, "expected int32[20] positions"),
    ("tables.0.order", IDS | {"path": "../x.npy"}, "a path without '..'"),
    ("tables.0.order", None, "tables[0].order must be an object"),
    ("nodes.0.arrays", [], "nodes[0].arrays must be an object"),
    ("relations.0.type", ["a", "b"], "not 2 names"),
    ("relations.0.type.0", "venue", "uses node type 'venue'"),
    ("relations.1.type", ["author", "writes", "paper"], "occurs twice"),
    ("relations.0.arrays.indptr", DELETE, "a graph needs indptr and indices"),
    ("relations.0.arrays.indptr.shape", [20], "expected int64[21] indptr"),
    ("relations.0.arrays.indices.shape", [3], "expected int[4] indices"),
    ("relations.0.arrays.indices.dtype", "float64", "expected int[4] indices"),
    ("relations.0.arrays.edge_ids.shape", [9], "expected int[4] edge_ids"),
    ("part", PART, "nodes[0] lacks ['held']"),
    ("nodes.0.held", 1, "nodes[0] has unknown fields ['held']"),
    ("nodes.0.arrays.owner", OWNER, "nodes[0].arrays has unknown 'owner'"),
    ("nodes.0.count", 1 << 40, "one label for each of"),
]


def refused(dataset, path, value, message):
    """Opening the dataset fails with this message while a field of its manifest is changed, or removed."""
    data = (dataset / "manifest.json").read_bytes()

    def change(target):
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
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
    FeatureStore(dataset)


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE)
def test_hostile_manifest_is_refused_with_the_cause(honest, path, value, message):
    refused(honest, path, value, message)


@pytest.fixture(scope="module")
def honest_scales(tmp_path_factory):
    """Tables with a scale, relations with and without times."""
    path = tmp_path_factory.mktemp("hostile_scales") / "a.gids"
    edges = edge_list(np.arange(9), np.arange(9), num_src=9, num_dst=9)
    with DatasetWriter(path) as writer:
        for scale in ("row", "column"):
            writer.write_table("node", "n", scale, torch.randn(9, 6), dtype=torch.int8, scale=scale)
        writer.write_edges(("n", "timed", "n"), edges, times=np.arange(9))
        writer.write_edges(("n", "plain", "n"), edges)
    return path


HOSTILE_SCALES = [
    ("tables.0.scale.per", [], "tables[0].scale.per is []; it must be 'row'"),
    ("tables.1.scale.columns", DELETE, "tables[1].scale is per column; 'column' has"),
    ("tables.0.scale.columns", IDS, "tables[0].scale is per row; 'column' has columns, 'row' has none"),
    ("tables.0.dtype", "uint8", "(n.row) is uint8 with a scale; only int8 has one"),
    ("tables.1.scale.columns.shape", [5], "float32[6] scales of columns"),
    ("tables.1.scale.columns.dtype", "float64", "expected float32[6]"),
    ("relations.0.sorted_by", "source", "relations[0].sorted_by is 'source'; it must be 'edges'"),
    ("relations.0.sorted_by", DELETE, "sorted_by is None; it must be 'edges' with an array time"),
    ("relations.0.sorted_by", "nodes", "sorted_by is 'nodes'"),
    ("relations.1.sorted_by", "nodes", "'n' nodes, which have none"),
    ("relations.0.arrays.time.shape", [8], "times"),
    ("relations.0.arrays.time.dtype", "float32", "times"),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE_SCALES)
def test_hostile_manifest_of_scales_and_times_is_refused_with_the_cause(honest_scales, path, value, message):
    refused(honest_scales, path, value, message)


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


HOSTILE_PARTS = [
    ("part", DELETE, "nodes[0] has unknown fields ['held']"),
    ("part", 1, "part must be an object, not 1"),
    ("part.index", 2, "part.index must be an integer from 0 to 1"),
    ("part.count", 0, "part.count must be an integer from 1 to 4096, not 0"),
    ("part.count", 4097, "part.count must be an integer from 1 to 4096"),
    ("part.of", "", "part.of must be a non-empty text"),
    ("part.topology", DELETE, "part lacks ['topology']"),
    ("part.method", "", "part.method must be a non-empty text"),
    ("part.size", 3, "part has unknown fields ['size']"),
    ("nodes.0.arrays.owner", DELETE, "nodes[0] is of a part"),
    ("nodes.0.arrays.owner.shape", [3], "expected uint8[20] owners"),
    ("nodes.0.arrays.owner.dtype", "uint16", "expected uint8[20]"),
    ("nodes.0.held", DELETE, "nodes[0] lacks ['held']"),
    ("nodes.0.held", 21, "nodes[0].held must be an integer from 0"),
    ("nodes.0.held", 1, "(paper.feat) has"),
    ("relations.0.held", DELETE, "relations[0] lacks ['held']"),
    ("relations.0.arrays.edge_ids", DELETE, "has no array edge_ids"),
    ("relations.0.arrays", {}, "has no array edge_ids"),
    ("relations.0.arrays.indices.shape", [9], "expected int["),
    ("nodes.0.arrays.label.dtype", "uint16", "which only owner may have"),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE_PARTS)
def test_hostile_manifest_of_a_part_is_refused_with_the_cause(honest_part, path, value, message):
    refused(honest_part, path, value, message)


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


def test_writer_validates_as_the_reader_does(honest, honest_scales):
    for path in (honest, honest_scales):
        manifest = load_manifest((path / "manifest.json").read_bytes())
        assert dump_manifest(manifest) == (path / "manifest.json").read_bytes()
    with pytest.raises(FormatError, match="nodes must be a list"):
        validate(manifest.to_json() | {"nodes": None})
