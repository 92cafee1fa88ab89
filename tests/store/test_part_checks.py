"""`gids verify` of parts: a flipped bit, a wrong owner, a part that is missing or of another dataset."""

import dataclasses
import shutil

import numpy as np
import pytest
from datasets import CITES, sign, write_dataset

from gids.cli import main
from gids.store import verify
from gids.store.files import array_header, map_array, read_manifest
from gids.store.manifest import dump_manifest
from gids.write.partition import partition


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    partition(write_dataset(folder / "mag.gids"), folder / "parts", 3, method="range")
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


def test_a_flipped_bit_in_any_file_is_found(made, tmp_path):
    rng = np.random.default_rng(0)
    files = [f for f in sorted(made.rglob("*")) if f.is_file() and f.stat().st_size]
    assert len(files) > 60
    for file in files:
        data = bytearray(file.read_bytes())
        at = int(rng.integers(len(data)))
        data[at] ^= 1 << int(rng.integers(8))
        original = file.read_bytes()
        file.write_bytes(data)
        try:
            assert list(verify(file.parents[len(file.relative_to(made).parts) - 2])), file
        finally:
            file.write_bytes(original)
    assert list(verify(made)) == []


def test_wrong_owners_are_found(parts):
    def move(data):
        data[0] = 1

    change(parts / "part-000.gids", owner_of("paper"), move)
    faults = list(verify(parts))
    assert any("7 nodes" in f or "5 nodes belong to part 0, but the manifest says 6" in f for f in faults)
    assert any("part-001.gids and" in f and "differ in the owners of nodes" in f for f in faults)

    def beyond(data):
        data[3] = 9

    change(parts / "part-002.gids", owner_of("paper"), beyond)
    assert any("owner[3] is 9; it must be from 0 to 2" in f for f in verify(parts / "part-002.gids"))


def test_edges_of_other_nodes_are_found(parts):
    manifest = read_manifest(parts / "part-001.gids")
    indptr = map_array(
        parts / "part-001.gids" / array_of("indptr")(manifest).path, array_of("indptr")(manifest)
    )
    assert indptr[3] == 0

    def early(data):
        data[3:7] = 1

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
    assert any("has no part-001.gids, part 1 of 3: copy it there" in f for f in verify(parts))
    assert main(["verify", str(parts), "--quiet"]) == 1
    assert "has no part-001.gids" in capsys.readouterr().out
    shutil.copytree(parts / "part-002.gids", parts / "part-001.gids")
    assert any("is part 2 of 3: its name must be part-002.gids" in f for f in verify(parts))
    shutil.rmtree(parts / "part-001.gids")
    shutil.move(tmp_path / "elsewhere", parts / "part-001.gids")
    assert main(["verify", str(parts)]) == 0
    part = read_manifest(parts / "part-001.gids").part
    rewritten(parts / "part-001.gids", part=dataclasses.replace(part, of="crc32c:00000000"))
    assert any("differ in the dataset that was partitioned" in f for f in verify(parts))
    write_dataset(tmp_path / "whole.gids")
    shutil.rmtree(parts / "part-001.gids")
    shutil.move(tmp_path / "whole.gids", parts / "part-001.gids")
    assert any("is not a part, but a whole dataset" in f for f in verify(parts))


def test_held_counts_that_do_not_add_up_are_found(parts):
    manifest = read_manifest(parts / "part-000.gids")
    paper = next(n for n in manifest.nodes if n.type == "author")
    assert paper.held == 1
    nodes = tuple(dataclasses.replace(n, held=0) if n.type == "author" else n for n in manifest.nodes)
    tables = tuple(t for t in manifest.tables if t.type != "author")
    rewritten(parts / "part-000.gids", nodes=nodes, tables=tables)
    found = list(verify(parts))
    assert any("differ in their tables" in f for f in found)
    assert any("1 nodes belong to part 0, but the manifest says 0" in f for f in found)
