"""Open a dataset and ask for existing and missing things."""

import contextlib
import os
import pickle
import re

import numpy as np
import pytest
import torch
from datasets import CITES, WRITES, write_dataset

import gids
from gids import FeatureStore, FormatError, StorageError
from gids.write import DatasetWriter

SHARD = "tables/paper.feat/shard-00.bin"


def test_store_lists_its_content(dataset):
    store = FeatureStore(dataset)
    assert gids.FeatureStore is FeatureStore
    assert store.name == "mag.gids"
    assert store.path == dataset
    assert list(store.tables) == ["paper.feat", "author.feat", "paper.year", "author.writes.paper.weight"]
    assert store.node_types == ["paper", "author"]
    assert store.relations == [WRITES, CITES]
    assert (store.num_nodes("paper"), store.num_edges(WRITES)) == (20, 4)
    table = store.table("author.feat")
    assert (table.kind, table.type, table.key, table.shape) == ("node", "author", "feat", (300,))
    assert (table.dtype, table.row_bytes, table.page_bytes) == (torch.bfloat16, 600, 1024)
    assert (table.rows_per_page, table.page_count, len(table.checksums())) == (1, 3, 3)
    assert store.table("weight").type == WRITES
    assert repr(table) == "Table('author.feat', bfloat16[3, 300], 3 pages of 1024 B)"
    assert repr(store.labels) == "{'paper': int64[20]}"
    assert repr(store.splits) == "{'paper': {'train': int64[10], 'test': int64[5]}}"
    assert store.find_table("node", "paper", "year") is store.table("year")
    assert store.find_table("edge", WRITES, "weight") is store.table("author.writes.paper.weight")
    assert store.find_table("edge", CITES, "weight") is None


def test_the_graph_is_mapped_read_only(dataset):
    store = FeatureStore(dataset)
    graph = store.graph(WRITES)
    assert graph.indptr.tolist() == [0, 1, 2, 2, 2, 2, *[4] * 15]
    assert graph.indices.tolist() == [1, 2, 2, 0]
    assert graph.edge_ids.tolist() == [3, 2, 0, 1]
    assert isinstance(graph.indices, np.memmap)
    assert not graph.indices.flags.writeable
    assert store.graph(CITES).indices.dtype == np.int32
    assert store.out_degrees("author").tolist() == [1, 1, 2]
    assert store.out_degrees("paper").sum() == 100


def test_labels_and_splits_are_read_when_first_used(dataset):
    store = FeatureStore(dataset)
    assert list(store.labels) == list(store.splits) == ["paper"]
    assert store.labels["paper"].tolist() == [0, 1, 2, 3] * 5
    assert store.labels["paper"].dtype == torch.int64
    assert store.splits["paper"]["test"].tolist() == [15, 16, 17, 18, 19]
    assert "author" not in store.labels
    assert store.labels.get("author") is None


def test_split_of_several_node_types_needs_a_type(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        for ntype, first in (("paper", 0), ("author", 3)):
            writer.write_table("node", ntype, "feat", torch.zeros(9, 1))
            writer.write_split(ntype, "train", torch.arange(first, 5))
        writer.write_split("author", "val", torch.arange(5, 7))
    store = FeatureStore(tmp_path / "a.gids")
    assert store.split("val").tolist() == [5, 6]
    assert store.split("train", "author").tolist() == [3, 4]
    said = "2 node types of a.gids have a split 'train': say which ('paper', 'author')"
    with pytest.raises(KeyError, match=re.escape(said)):
        store.split("train")
    said = "no split 'val' of 'paper' nodes in a.gids (has 'train' of 'paper', "
    with pytest.raises(KeyError, match=re.escape(said)):
        store.split("val", "paper")


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda s: s.table("venue.feat"), KeyError, "no table 'venue.feat' in mag.gids (has 'paper.feat', "),
        (lambda s: s.table("feat"), KeyError, "2 tables of mag.gids have key 'feat': say which ('pap"),
        (lambda s: s.table(), KeyError, "mag.gids has 3 node tables ('paper.feat', 'author.feat', "),
        (lambda s: s.read_rows([0]), KeyError, "mag.gids has 4 tables"),
        (lambda s: s.graph(), KeyError, "mag.gids has 2 relations"),
        (lambda s: s.graph(("a", "b", "c")), KeyError, "no relation ('a', 'b', 'c') in mag.gids"),
        (lambda s: s.num_nodes("venue"), KeyError, "no node type 'venue' in mag.gids (has 'paper', "),
        (lambda s: s.num_nodes(), KeyError, "mag.gids has 2 node types ('paper', 'author'): say which"),
        (lambda s: s.labels["author"], KeyError, "no labels for node type 'author' (only for 'paper')"),
        (lambda s: s.split("val"), KeyError, "no split 'val' in mag.gids (has 'train' of 'paper', 'test' of"),
        (lambda s: s.table("year").read_rows([20]), IndexError, "row 20 is out of range for 'paper.year'"),
        (lambda s: s.table("year").read_rows([3, -1]), IndexError, "row -1 is out of range"),
        (lambda s: s.table("year").read_rows(np.array([1.0])), TypeError, "ids are float64[1]"),
        (lambda s: s.table("year").read_rows(torch.ones(1, device="meta")), TypeError, "ids are on meta"),
        (lambda s: s.table("year").scan(0), ValueError, "rows_per_block is 0"),
        (lambda s: s.table("year").scan(5, order=[3, 4]), IndexError, "block 4 is out of range for 'paper."),
    ],
)
def test_the_error_lists_what_is_known(dataset, ask, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ask(FeatureStore(dataset))


def test_blocks_of_a_scan_come_in_any_order_and_a_scan_may_be_left(tmp_path):
    values = torch.arange(1000 * 50.0).view(1000, 50)
    with DatasetWriter(tmp_path / "a.gids", page_bytes=512, stripe=3) as writer:
        writer.write_table("node", "a", "feat", values)
        writer.write_table("node", "b", "feat", torch.empty(0, 4))
    store = FeatureStore(tmp_path / "a.gids")
    table = store.table("a.feat")
    assert list(store.table("b.feat").scan(10)) == []
    for order in (range(143), [5, 0, 142], []):
        scanned = list(table.scan(7, order=order))
        assert [start for start, _ in scanned] == [7 * block for block in order]
        assert all(torch.equal(rows, values[start : start + 7]) for start, rows in scanned)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        blocks = table.scan(10)
        next(blocks)
        blocks.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_types_with_odd_names_stay_inside_the_dataset(tmp_path):
    names = ["../../etc", "a/b", "a.b", "ünï", " ", "*", "con.", "%2E", "\n"]
    with DatasetWriter(tmp_path / "a.gids") as writer:
        for number, name in enumerate(names):
            writer.write_table("node", name, "k/../e.y", torch.tensor([number]))
            writer.write_labels(name, torch.tensor([number]))
    store = FeatureStore(tmp_path / "a.gids")
    assert store.node_types == names
    for number, name in enumerate(names):
        assert store.table(f"{name}.k/../e.y").read_rows([0]).tolist() == [number]
        assert store.labels[name].tolist() == [number]
    assert [p.name for p in tmp_path.iterdir()] == ["a.gids"]
    files = [p for p in (tmp_path / "a.gids").rglob("*") if p.is_file()]
    assert all(re.fullmatch(r"[A-Za-z0-9_.%/-]+", str(p.relative_to(tmp_path))) for p in files)


def test_shards_outside_the_dataset_must_be_allowed(tmp_path):
    disks = [tmp_path / "ssd0", tmp_path / "ssd1"]
    for disk in disks:
        disk.mkdir()
    path = write_dataset(tmp_path / "mag.gids", stripe=disks)
    assert not (path / SHARD).exists()
    with pytest.raises(FormatError, match=r"is outside the dataset mag\.gids; .* allow_dirs=\["):
        FeatureStore(path)
    with pytest.raises(FormatError, match="ssd1"):
        FeatureStore(path, allow_dirs=disks[:1])
    with pytest.raises(TypeError, match="allow_dirs must be a list"):
        FeatureStore(path, allow_dirs=str(tmp_path))
    with contextlib.chdir(tmp_path):
        relative = FeatureStore("mag.gids", allow_dirs=["ssd0", "ssd1"])
    store = pickle.loads(pickle.dumps(relative))
    assert store.table("year").read_rows([7, 19]).tolist() == [2007, 2019]
    assert [path.parents[2] for path in store.table("year").shard_paths] == disks


def test_link_that_leaves_the_dataset_is_refused(dataset, tmp_path):
    shard = dataset / SHARD
    shard.rename(tmp_path / "elsewhere.bin")
    shard.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(FormatError, match=r"elsewhere\.bin is outside"):
        FeatureStore(dataset)
    FeatureStore(dataset, allow_dirs=[tmp_path])
    labels = dataset / "nodes/paper.label.npy"
    labels.rename(tmp_path / "label.npy")
    labels.symlink_to(tmp_path / "label.npy")
    with pytest.raises(FormatError, match=r"leads to .*, outside the dataset"):
        FeatureStore(dataset, allow_dirs=[tmp_path])


def change_the_header(path):
    path.write_bytes(path.read_bytes().replace(b"(20,)", b"(02,)"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.rename(d.with_name("gone")), FileNotFoundError, "`gids generate NAME.gids` makes one"),
        (lambda d: (d / "manifest.json").unlink(), FormatError, "has no manifest.json"),
        (lambda d: (d / "nodes/paper.label.npy").unlink(), FormatError, "paper.label.npy is missing"),
        (lambda d: os.truncate(d / SHARD, 512), FormatError, "truncated: 512 bytes, expected 5120"),
        (lambda d: os.truncate(d / SHARD, 9999), FormatError, "too long: 9999 bytes"),
        (lambda d: os.truncate(d / "graph/paper.cites.paper/indices.npy", 100), FormatError, "truncated"),
        (
            lambda d: change_the_header(d / "nodes/paper.label.npy"),
            FormatError,
            "header of a .npy file with int64",
        ),
        (lambda d: [(d / SHARD).unlink(), os.mkfifo(d / SHARD)], FormatError, "not a regular file"),
    ],
    ids=["no dataset", "no manifest", "no file", "short", "long", "short array", "header", "no regular file"],
)
def test_a_damaged_dataset_is_not_opened(dataset, change, error, message):
    change(dataset)
    with pytest.raises(error, match=re.escape(message)):
        FeatureStore(dataset)


def test_truncation_after_opening_is_a_storage_error_not_a_crash(dataset):
    store = FeatureStore(dataset)
    os.truncate(dataset / SHARD, 512)
    with pytest.raises(StorageError, match="truncated after the dataset was opened") as caught:
        store.read_rows([19], "paper.feat")
    assert caught.value.filename.endswith("shard-00.bin")


def test_truncation_during_a_scan_is_a_storage_error(dataset):
    blocks = FeatureStore(dataset).table("paper.feat").scan(2)
    next(blocks)
    os.truncate(dataset / SHARD, 512)
    with pytest.raises(StorageError, match="the file ended early"):
        list(blocks)


def test_error_for_an_unfinished_dataset_says_how_to_finish_it(tmp_path):
    (tmp_path / "a.gids.partial").mkdir()
    with pytest.raises(FormatError, match="to finish it, run the same `gids convert` command again"):
        FeatureStore(tmp_path / "a.gids.partial")
