"""`gids convert OLD.gids NEW.gids`: another way to store the same dataset, bit for bit."""

import numpy as np
import pytest
import torch
from datasets import damage, same_bits
from reader_example import refused

from gids import FeatureStore
from gids.cli import main
from gids.heat import write_heat
from gids.store import verify
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

RNG = np.random.default_rng(5)
NODES, EDGES = 400, 1600


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A dataset with every kind of array: scales, orders, times, heat, split and labels."""
    path = tmp_path_factory.mktemp("full") / "full.gids"
    rows = torch.from_numpy(RNG.standard_normal((NODES, 5), np.float32))
    with DatasetWriter(path, page_bytes=1024) as writer:
        for ntype in ("a", "b"):
            writer.add_nodes(ntype, NODES)
        writer.write_times("a", RNG.integers(0, 50, NODES))
        for name, options in {
            "float": {"order": RNG.permutation(NODES)},
            "row": {"dtype": torch.int8, "scale": "row"},
            "column": {"dtype": torch.int8, "scale": "column", "page_bytes": 512},
            "half": {"dtype": torch.bfloat16, "order": RNG.permutation(NODES)},
        }.items():
            writer.write_table("node", "a", name, rows, **options)
        writer.write_table("node", "b", "flag", rows > 0)
        writer.write_table("node", "b", "more", torch.rand(NODES, 3))
        for relation, times in {
            ("a", "edges", "b"): RNG.integers(0, 9, EDGES),
            ("a", "nodes", "b"): "nodes",
            ("b", "plain", "a"): None,
        }.items():
            ends = RNG.integers(0, NODES, (2, EDGES))
            edges = edge_list(*ends, num_src=NODES, num_dst=NODES)
            dtype = "int32" if relation[1] == "plain" else "int64"
            writer.write_edges(relation, edges, times=times, index_dtype=dtype)
            writer.write_table("edge", relation, "weight", RNG.standard_normal(EDGES))
        indptr = np.arange(NODES + 1)  # not sorted by the times of its sources
        writer.write_graph(("a", "as is", "a"), indptr, RNG.permutation(NODES))
        writer.write_table("edge", ("a", "no topology", "a"), "weight", RNG.standard_normal((7, 2)))
        writer.write_labels("a", RNG.choice([np.nan, 1.0, 2.0], NODES))
        writer.write_labels("b", np.arange(NODES) % 3 - 1)
        writer.write_split("b", "val", RNG.permutation(NODES)[:40])
    write_heat(path, "sampled", {"a": RNG.random(NODES, np.float32)})
    return path


def convert(*arguments):
    assert main(["convert", "--quiet", *map(str, arguments)]) == 0


def assert_equal(old, new):
    """Everything in two datasets is equal, values and pages: so are the checksums of all files."""
    assert new.content_crc == old.content_crc
    assert new.topology_crc == old.topology_crc
    entries = [store.manifest for store in (old, new)]
    assert {n.type: {r: a.crc32c for r, a in n.arrays.items()} for n in entries[0].nodes} == {
        n.type: {r: a.crc32c for r, a in n.arrays.items()} for n in entries[1].nodes
    }
    assert [(r.type, r.count, r.sorted_by) for r in entries[0].relations] == [
        (r.type, r.count, r.sorted_by) for r in entries[1].relations
    ]
    assert list(old.tables) == list(new.tables)


def test_everything_is_carried_over(full, tmp_path, capsys):
    """To two disks, and back to one."""
    disks = [tmp_path / "ssd0", tmp_path / "ssd1"]
    for disk in disks:
        disk.mkdir()
    striped, back = tmp_path / "striped.gids", tmp_path / "back.gids"
    convert(full, striped, "--stripe", *disks)
    assert f"--allow-dir {disks[0]}" in refused(capsys, striped, back)
    allowed = [word for disk in disks for word in ("--allow-dir", disk)]
    convert(striped, back, *allowed)
    assert not list(verify(striped, allow_dirs=disks))
    assert not list(verify(back))
    old = FeatureStore(full)
    assert_equal(old, FeatureStore(striped, allow_dirs=disks))
    assert_equal(old, FeatureStore(back))
    assert main(["verify", str(back), "--against", str(striped), "--quiet", *map(str, allowed)]) == 0


def test_only_what_an_option_names_changes(full, tmp_path):
    new = tmp_path / "new.gids"
    convert(full, new, "--page-bytes", "512", "--order", "original", "--index-dtype", "int64")
    old, store = FeatureStore(full), FeatureStore(new)
    for name, table in old.tables.items():
        changed = store.tables[name]
        assert (changed.page_bytes, changed.order) == (512, None)
        assert same_bits(changed.read_rows(range(table.row_count)), table.read_rows(range(table.row_count)))
    assert store.graph(("b", "plain", "a")).indices.dtype == np.int64
    other = tmp_path / "other.gids"
    convert(full, other, "--dtype", "row=float32,float=float16", "--no-times", "--skip", "b.more")
    store = FeatureStore(other)
    ids = range(NODES)
    row, half = store.table("row"), store.table("float")
    assert (row.stored_dtype, half.stored_dtype) == (torch.float32, torch.float16)
    assert same_bits(row.read_rows(ids), old.table("row").read_rows(ids))
    assert np.array_equal(half.order, old.table("float").order)
    assert (half.read_rows(ids) - old.table("float").read_rows(ids)).abs().max() < 2e-3
    assert store.node_times("a") is None
    assert "b.more" not in store.tables
    assert store.table("column").content_crc == old.table("column").content_crc


@pytest.mark.parametrize(("scale", "magnitude"), [("row", 1e-41), ("row", 3e38), ("column", 1e-37)])
def test_rows_with_a_scale_are_not_rounded_again(tmp_path, scale, magnitude):
    rows = torch.from_numpy(RNG.random((1000, 4), np.float32) - 0.5) * 2 * magnitude
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "_N", "x", rows, dtype=torch.int8, scale=scale)
    convert(tmp_path / "a.gids", tmp_path / "b.gids")
    old, new = (FeatureStore(tmp_path / name).table("x") for name in ("a.gids", "b.gids"))
    assert same_bits(old.read_rows(range(1000)), new.read_rows(range(1000)))
    if magnitude > 1e-41:  # there, a scale of rows that are all 0 may become 0
        assert old.content_crc == new.content_crc


def test_changed_edges_have_no_heat_and_a_split_is_drawn_only_if_asked_for(tmp_path, capsys):
    with DatasetWriter(tmp_path / "old.gids") as writer:
        writer.write_table("node", "_N", "x", torch.rand(NODES, 2))
        edges = edge_list(*RNG.integers(0, NODES, (2, EDGES)), num_src=NODES, num_dst=NODES)
        writer.write_edges(("_N", "_E", "_N"), edges)
        writer.write_labels("_N", np.arange(NODES))
    write_heat(tmp_path / "old.gids", "sampled", {"_N": np.ones(NODES)})
    assert main(["convert", str(tmp_path / "old.gids"), str(tmp_path / "a.gids"), "--reverse-edges"]) == 0
    assert "left out the heat of the nodes" in capsys.readouterr().err
    store = FeatureStore(tmp_path / "a.gids")
    assert store.num_edges() == 2 * EDGES
    assert store.heat_methods() == ["out-degree"]
    assert not store.splits
    convert(tmp_path / "old.gids", tmp_path / "b.gids", "--split", "0.5,0.5,0", "--order", "degree")
    assert len(FeatureStore(tmp_path / "b.gids").split("train")) == NODES // 2


def test_a_dataset_is_replaced_while_it_is_open_only_with_overwrite(dataset, capsys):
    assert "already exists, and a dataset never changes" in refused(capsys, dataset, dataset)
    opened = FeatureStore(dataset)
    rows = opened.read_rows([3, 1], "paper.feat")
    convert(dataset, dataset, "--overwrite", "--page-bytes", "1024")
    assert torch.equal(opened.read_rows([3, 1], "paper.feat"), rows)
    assert torch.equal(FeatureStore(dataset).read_rows([3, 1], "paper.feat"), rows)
    assert FeatureStore(dataset).tables["paper.feat"].page_bytes == 1024


@pytest.mark.parametrize("ordered", [False, True])
def test_a_damaged_page_or_array_is_not_copied(tmp_path, capsys, ordered):
    with DatasetWriter(tmp_path / "a.gids", page_bytes=512) as writer:
        order = RNG.permutation(100) if ordered else None
        writer.write_table("node", "_N", "x", torch.rand(100, 50), order=order)
        writer.write_labels("_N", np.arange(100))
    store = FeatureStore(tmp_path / "a.gids")
    damage(store.table("x").shard_paths[0], b"?", 512 * 7)
    arguments = ["convert", str(tmp_path / "a.gids"), str(tmp_path / "b.gids")]
    assert main(arguments) == 2
    assert "page 7 of '_N.x' fails its CRC32C" in capsys.readouterr().err
    damage(tmp_path / "a.gids/nodes/_N.label.npy", b"?", -1)
    assert main(arguments) == 2
    assert "the checksum of this file is wrong" in capsys.readouterr().err
    assert not (tmp_path / "b.gids").exists()


def test_a_part_is_refused(dataset, tmp_path, capsys):
    partition(dataset, tmp_path / "parts", 2)
    target = tmp_path / "b.gids"
    error = refused(capsys, tmp_path / "parts/part-000.gids", target)
    assert "part-000.gids is part 0 of 2: convert the whole dataset, then partition it" in error
    assert "it is a directory of parts" in refused(capsys, tmp_path / "parts", target)
