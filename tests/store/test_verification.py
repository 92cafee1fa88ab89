"""Verification: a flipped bit, wrong pages, a wrong owner, parts that are missing or of another dataset."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from datasets import CITES, sign, write_dataset

from gids import FeatureStore
from gids.cli import main
from gids.store import verify
from gids.store.files import array_header, map_array, read_manifest
from gids.store.manifest import dump_manifest
from gids.write import DatasetWriter
from gids.write.partition import partition


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    partition(write_dataset(folder / "mag.gids"), folder / "parts", 2, method="range")
    return folder / "parts"


@pytest.fixture
def parts(made, tmp_path):
    return shutil.copytree(made, tmp_path / "parts")


def change(part, pick, values):
    """Write other values to an array of a part, with right checksums. pick(manifest) -> entry."""
    entry = pick(read_manifest(part))
    path = part / entry.path
    data = np.array(map_array(path, entry))
    values(data)
    path.write_bytes(array_header(entry) + data.tobytes())
    sign(part)


def owner_of(ntype):
    return lambda m: next(n for n in m.nodes if n.type == ntype).arrays["owner"]


def array_of(role):
    return lambda m: next(r for r in m.relations if r.type == CITES).arrays[role]


def rewritten(path, **changes):
    manifest = dataclasses.replace(read_manifest(path), **changes)
    (path / "manifest.json").write_bytes(dump_manifest(manifest))


def test_a_flipped_bit_in_any_file_is_found(made):
    rng = np.random.default_rng(0)
    part = made / "part-001.gids"
    files = [f for f in sorted(part.rglob("*")) if f.is_file() and f.stat().st_size]
    assert len(files) == 20
    for file in files:
        original = file.read_bytes()
        data = bytearray(original)
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)
        try:
            assert list(verify(part)), file
        finally:
            file.write_bytes(original)
    assert list(verify(made)) == []


def test_many_wrong_pages_of_a_table_are_summed_up(tmp_path):
    with DatasetWriter(tmp_path / "a.gids", page_bytes=512) as writer:
        writer.write_table("node", "n", "k", torch.arange(64 * 130))
    [shard] = FeatureStore(tmp_path / "a.gids").table("k").shard_paths
    shard.write_bytes(bytes([1]) * 512 * 130)
    *pages, rest = verify(tmp_path / "a.gids")
    assert len(pages) == 100
    assert all("fails its CRC32C" in fault for fault in pages)
    assert rest == "30 more pages of 'n.k' are wrong"


def test_wrong_owners_are_found(parts):
    def move(data):
        data[0] = 1

    change(parts / "part-000.gids", owner_of("paper"), move)
    faults = list(verify(parts))
    assert any("9 nodes belong to part 0, but the manifest says 10" in f for f in faults)
    assert any("part-001.gids and" in f and "differ in the owners of nodes" in f for f in faults)

    def beyond(data):
        data[3] = 9

    change(parts / "part-001.gids", owner_of("paper"), beyond)
    assert any("owner[3] is 9; it must be from 0 to 1" in f for f in verify(parts / "part-001.gids"))


def test_edges_of_other_nodes_are_found(parts):
    def early(data):
        assert data[3] == 0
        data[3:11] = 1

    change(parts / "part-001.gids", array_of("indptr"), early)
    found = list(verify(parts / "part-001.gids"))
    assert any("node 2 has in-edges here, but belongs to part 0; this is part 1" in f for f in found)


def test_repeated_edge_ids_are_found(parts):
    def repeat(data):
        data[4] = data[2]

    change(parts / "part-001.gids", array_of("edge_ids"), repeat)
    (fault,) = verify(parts / "part-001.gids")
    assert "edge_ids[4] is" in fault
    assert fault.endswith("as is an entry before it")


def test_parts_that_do_not_belong_together_are_found(parts, tmp_path, capsys):
    shutil.move(parts / "part-001.gids", tmp_path / "elsewhere")
    assert main(["verify", str(parts), "--quiet"]) == 1
    assert "has no part-001.gids, part 1 of 2: copy it there" in capsys.readouterr().out
    shutil.copytree(parts / "part-000.gids", parts / "part-001.gids")
    assert any("is part 0 of 2: its name must be part-000.gids" in f for f in verify(parts))
    shutil.rmtree(parts / "part-001.gids")
    shutil.move(tmp_path / "elsewhere", parts / "part-001.gids")
    part = read_manifest(parts / "part-001.gids").part
    rewritten(parts / "part-001.gids", part=dataclasses.replace(part, of="crc32c:00000000"))
    assert any("differ in the dataset that was partitioned" in f for f in verify(parts))
    shutil.rmtree(parts / "part-001.gids")
    write_dataset(parts / "part-001.gids")
    assert any("is not a part, but a whole dataset" in f for f in verify(parts))


def test_held_counts_that_do_not_add_up_are_found(parts):
    manifest = read_manifest(parts / "part-000.gids")
    [authors] = [n for n in manifest.nodes if n.type == "author"]
    nodes = tuple(dataclasses.replace(n, held=0) if n is authors else n for n in manifest.nodes)
    tables = tuple(t for t in manifest.tables if t.type != "author")
    rewritten(parts / "part-000.gids", nodes=nodes, tables=tables)
    found = list(verify(parts))
    assert any("differ in their tables" in f for f in found)
    assert any(f"{authors.held} nodes belong to part 0, but the manifest says 0" in f for f in found)
