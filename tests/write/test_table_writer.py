"""A table is added to a dataset in one step, from blocks in any order; a killed writer changes nothing."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from children import ended, killed
from datasets import CITES, WRITES, contents, write_dataset

from gids import FeatureStore, FormatError, StorageError
from gids.store import verify
from gids.write import DatasetWriter, create_table, publish, restripe, table_writer, temporary_table
from gids.write.table_writer import publish_tables


def values(rows, *shape, seed=0, dtype=torch.float32):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(path, rows, stripe=1):
    """A dataset of one node type with a table of another shape."""
    with DatasetWriter(path, page_bytes=512, stripe=stripe) as writer:
        writer.write_table("node", "_N", "x", torch.zeros(rows, 1))
    return FeatureStore(path, allow_dirs=[] if isinstance(stripe, int) else stripe)


def add(store, name, rows, *arguments, **options):
    """Add a table of these rows."""
    with create_table(store, name, len(rows), tuple(rows.shape[1:]), *arguments, **options) as writer:
        writer.write(0, rows)


@pytest.fixture
def store(dataset):
    return FeatureStore(dataset)


@pytest.mark.parametrize(
    ("dim", "page_bytes", "blocks"),
    [
        (16, 512, [7, 1, 30, 2, 61]),  # 8 rows to a page, blocks across and within pages
        (16, 512, [8, 16, 77]),
        (100, 512, [1, 99, 1]),  # 1 row to a page, padded
        (300, 512, [50, 51]),  # a long page
        (50, 4096, [3, 17, 81]),  # 20 rows and a gap
        ((2, 3), 512, [101]),
        ((), 512, [101]),
    ],
)
def test_blocks_in_any_order_make_the_table(tmp_path, dim, page_bytes, blocks):
    store = make(tmp_path / "x.gids", 101)
    rows = values(101, *((dim,) if isinstance(dim, int) else dim))
    bounds = np.cumsum([0, *blocks])
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(blocks))
        with create_table(store, f"h{seed}", 101, dim, page_bytes=page_bytes) as writer:
            for i in order:
                writer.write(int(bounds[i]), rows[bounds[i] : bounds[i + 1]])
        found = store.reopen().table(f"_N.h{seed}")
        assert torch.equal(found.read_rows(torch.arange(101)), rows)
        assert found.dtype == torch.float32
        assert found.row_count == 101
    assert list(verify(tmp_path / "x.gids")) == []


def test_several_threads_can_write(tmp_path):
    store = make(tmp_path / "x.gids", 5000, stripe=2)
    rows = values(5000, 16)
    with create_table(store, "h", 5000, 16) as writer:

        def write(first):
            for start in range(first, 5000, 35):
                writer.write(start, rows[start : start + 7])

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(write, range(0, 35, 7)))
    table = store.reopen().table("h")
    assert len(table.shard_paths) == 2
    assert torch.equal(table.read_rows(torch.arange(5000)), rows)
    assert list(verify(tmp_path / "x.gids")) == []


def test_open_store_does_not_see_the_new_table(dataset, store):
    with create_table(store, "paper.h", 20, 4) as writer:
        writer.write(0, values(20, 4))
        assert "paper.h" not in FeatureStore(dataset).tables
    assert "paper.h" not in store.tables
    new = store.reopen()
    assert list(new.tables) == [*store.tables, "paper.h"]
    add(new, "paper.feat", values(20, 4), replace=True)
    assert new.reopen().table("paper.feat").shape == (4,)
    assert list(new.reopen().tables) == list(new.tables)
    with pytest.raises(StorageError, match="replaced or removed after the dataset was opened: open it again"):
        store.read_rows([0, 7], "paper.feat")
    assert list(verify(dataset)) == []
    assert not (dataset / "tables" / "paper.feat").exists()


def test_tables_of_edges_and_of_every_type(dataset, store):
    add(store, "author.writes.paper.h", values(4, 2))
    numbers = torch.arange(300).view(100, 3)
    add(store, "any text/at all", numbers, torch.int64, type_=CITES)
    store = store.reopen()
    assert store.table("author.writes.paper.h").type == WRITES
    table = store.find_table("edge", CITES, "any text/at all")
    assert torch.equal(table.read_rows(torch.arange(100)), numbers)
    assert list(verify(dataset)) == []


def test_shards_are_in_the_directories_of_the_other_tables(tmp_path, disks):
    store = make(tmp_path / "x.gids", 100, stripe=disks)
    rows = values(100, 64)
    add(store, "h", rows)
    store = store.reopen()
    assert [p.parents[2] for p in store.table("h").shard_paths] == disks
    assert torch.equal(store.table("h").read_rows(torch.arange(100)), rows)
    add(store, "h", -rows, replace=True)
    assert torch.equal(store.reopen().table("h").read_rows(torch.arange(100)), -rows)
    for disk in disks:
        assert len(list(disk.glob("*/_N.h*"))) == 1  # the old one is gone
    assert list(verify(tmp_path / "x.gids", allow_dirs=disks)) == []
    with pytest.raises(RuntimeError), create_table(store, "g", 100, 64):
        raise RuntimeError
    assert [len(list(disk.glob("*/_N.g*"))) for disk in disks] == [0, 0, 0]


def test_values_are_cast(store):
    rows = torch.tensor([1.1, float("nan"), float("inf"), -2.0]).repeat(5)
    add(store, "paper.half", rows, torch.float16)
    found = store.reopen().table("half").read_rows(torch.arange(20))
    assert torch.equal(found.nan_to_num(), rows.half().nan_to_num())


def test_a_writer_that_is_dropped_leaves_nothing(dataset, store):
    before = contents(dataset)
    writer = create_table(store, "paper.h", 20, 4)
    writer.write(3, values(4, 4))
    del writer  # dropped
    assert contents(dataset) == before
    assert len(list((dataset / "tables").iterdir())) == len(store.tables)


def test_a_forked_child_that_ends_leaves_the_table_of_its_parent(store):
    with create_table(store, "paper.h", 20, 4) as writer:
        writer.write(0, values(20, 4))
        ended(writer.discard)
    assert torch.equal(store.reopen().table("paper.h").read_rows(range(20)), values(20, 4))


def test_rows_may_be_any_array_of_numpy(dataset):
    big = np.arange(80, dtype=">f4").reshape(20, 4)
    fixed = np.frombuffer(big.astype("f4").tobytes(), "f4").reshape(20, 4)
    for key, rows in (("big", big), ("turned", fixed[::-1].copy()[::-1]), ("fixed", fixed)):
        with create_table(dataset, f"paper.{key}", 20, 4) as writer:
            writer.write(torch.tensor(0), rows)
        assert torch.equal(FeatureStore(dataset).read_rows(range(20), key), torch.arange(80.0).view(20, 4))
        with pytest.raises(ValueError, match=f"'paper.{key}' is published already"):
            writer.publish()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda w: w.write(0, values(19, 4)), "rows 19 to 19 of 'paper.h' were never written"),
        (lambda w: [w.write(0, values(5, 4)), w.write(9, values(11, 4))], "rows 5 to 8 of"),
        (lambda w: w.write(5, values(15, 4)), "rows 0 to 4 of"),
        (lambda w: [w.write(0, values(9, 4)), w.write(8, values(5, 4))], "row 8 was written already"),
        (lambda w: [w.write(9, values(9, 4)), w.write(8, values(5, 4))], "row 9 was written already"),
        (lambda w: w.write(0, values(21, 4)), r"rows 0 to 20 are out of range for 'paper.h' \(20 rows\)"),
        (lambda w: w.write(-1, values(2, 4)), "rows -1 to 0 are out of range"),
        (lambda w: w.write(0, values(20, 5)), r"rows are \[20, 5\]; a block of 'paper.h' is \[n, 4\]"),
        (lambda w: w.write(0, torch.tensor(1.0)), r"rows are \[\]"),
    ],
)
def test_invalid_or_missing_rows_are_refused(dataset, store, write, message):
    before = contents(dataset)
    with pytest.raises(ValueError, match=message), create_table(store, "paper.h", 20, 4) as writer:
        write(writer)
    assert contents(dataset) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("paper.feat", 20, 4), FileExistsError, "mag.gids already has a table 'paper.feat': give another"),
        (("paper.h", 19, 4), ValueError, "rows=19, but mag.gids has 20 of 'paper': give rows=20"),
        (("papr.h", 20, 4), KeyError, r"table name 'papr.h' has no type of mag.gids \('paper', 'author', "),
        (("h", 20, 4), KeyError, "say which"),
        (("paper.", 20, 4), FormatError, "the table's key must be a non-empty text"),
        (("paper.h", 20, 0), FormatError, "a row must have 1 to"),
        (("paper.h", 20, 4, torch.complex64), FormatError, "tables cannot hold complex64"),
        (("author.writes.paper.h", 5, 4), ValueError, "has 4 of 'author.writes.paper'"),
    ],
)
def test_invalid_table_is_refused_before_anything_is_written(dataset, store, arguments, error, message):
    before = contents(dataset)
    with pytest.raises(error, match=message):
        create_table(store, *arguments)
    assert contents(dataset) == before


def test_full_disk_is_reported_before_anything_is_written(dataset, store, monkeypatch):
    before = contents(dataset)
    with monkeypatch.context() as patch:
        patch.setattr("gids.write.files.os.statvfs", lambda _: os.statvfs_result([0] * 10))
        with pytest.raises(StorageError, match=r"not enough room, .*: 4\.1 kB needed, 0 B free"):
            create_table(store, "paper.h", 20, 4)
    assert contents(dataset) == before
    with create_table(store, "paper.h", 20, 4) as writer:

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("gids.write.files.os.pwrite", full)
            with pytest.raises(StorageError, match=r"writing table 'paper.h' failed \(No space left"):
                writer.write(0, values(20, 4))
        with pytest.raises(ValueError, match=r"'paper\.h' is broken by an error"):
            writer.publish()
        writer.discard()
    assert contents(dataset) == before


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("module", "name", "is_new", "striped"),
    [
        (os, "ftruncate", False, False),
        (os, "pwrite", False, True),
        (publish, "dump_manifest", False, False),
        (os, "rename", False, True),
        (table_writer, "remove_replaced", True, False),
        (table_writer, "remove_replaced", True, True),
    ],
)
def test_killed_table_writer_leaves_a_valid_dataset(tmp_path, disks, module, name, is_new, striped):
    dataset = write_dataset(tmp_path / "mag.gids", stripe=disks if striped else 1)
    store = FeatureStore(dataset, allow_dirs=disks)
    expected = torch.ones(20, 4) if is_new else store.read_rows(torch.arange(20), "paper.feat")

    killed(lambda: add(store, "paper.feat", torch.ones(20, 4), replace=True), module, name)
    assert list(verify(dataset, allow_dirs=disks)) == []
    store = FeatureStore(dataset, allow_dirs=disks)
    assert torch.equal(store.read_rows(torch.arange(20), "paper.feat"), expected)
    add(store, "paper.h", values(20, 4))
    store = store.reopen()
    named = {path for t in store.tables.values() for path in t.shard_paths}
    found = set(tmp_path.rglob("shard-*.bin"))
    assert found == named  # what was left is gone
    assert len(list(tmp_path.rglob("checksum.bin"))) == len(store.tables)
    assert list(verify(dataset, allow_dirs=disks)) == []


def test_files_of_another_writer_are_kept(store):
    with create_table(store, "paper.a", 20, 4) as first:
        first.write(0, values(20, 4, seed=1))
        add(store, "paper.b", values(20, 4, seed=2))
    store = store.reopen()
    for seed, key in ((1, "a"), (2, "b")):
        assert torch.equal(store.table(key).read_rows(torch.arange(20)), values(20, 4, seed=seed))


def test_the_first_of_two_writers_of_one_name_wins(dataset, store):
    first, second = create_table(store, "paper.h", 20, 4), create_table(store, "paper.h", 20, 4)
    for seed, writer in enumerate((first, second)):
        writer.write(0, values(20, 4, seed=seed))
    assert torch.equal(first.publish().table("h").read_rows(torch.arange(20)), values(20, 4))
    with pytest.raises(FileExistsError, match=r"has a table 'paper\.h' by now"):
        second.publish()
    second.discard()
    assert list(verify(dataset)) == []
    assert len(list((dataset / "tables").glob("paper.h*"))) == 1


def test_several_tables_are_published_together(dataset, store):
    writers = [create_table(store, "paper.h", 20, 4), create_table(store, "author.h", 3, 4)]
    again = [create_table(store, "author.g", 3, 4), create_table(store, "paper.h", 20, 4)]
    for writer in (*writers, *again):
        writer.write(0, values(writer.row_count, 4))
    assert {"paper.h", "author.h"}.isdisjoint(FeatureStore(dataset).tables)
    assert {"paper.h", "author.h"} <= publish_tables(writers).tables.keys()
    with pytest.raises(FileExistsError):
        publish_tables(again)
    assert "author.g" not in FeatureStore(dataset).tables
    with pytest.raises(ValueError, match=r"'paper\.h' is published"):
        writers[0].write(0, values(20, 4))


def test_a_finished_table_can_be_read_before_it_is_published(store):
    writer = create_table(store, "paper.h", 20, 4)
    writer.write(0, values(20, 4))
    table = writer.finish()
    assert torch.equal(table.read_rows(torch.arange(20)), values(20, 4))
    with pytest.raises(ValueError, match=r"'paper\.h' is finished: no more rows"):
        writer.write(0, values(20, 4))
    writer.discard()
    assert not table.shard_paths[0].exists()


def test_temporary_table_has_any_number_of_rows_and_is_removed(dataset, store):
    before = contents(dataset)
    with temporary_table(store, "paper", 50, 4, torch.float32) as writer:
        writer.write(0, values(50, 4))
        assert torch.equal(writer.finish().read_rows([49]), values(50, 4)[49:])
        with pytest.raises(ValueError, match="is temporary"):
            writer.publish()
    assert contents(dataset) == before


@pytest.mark.parametrize("how", ["write_dataset", "restripe"])
def test_table_is_not_added_to_a_dataset_that_was_replaced(tmp_path, how):
    path = write_dataset(tmp_path / "mag.gids", stripe=[tmp_path])
    with create_table(FeatureStore(path, allow_dirs=[tmp_path]), "paper.h", 20, 4) as writer:
        writer.write(0, values(20, 4))
        if how == "restripe":
            restripe(path, [], allow_dirs=[tmp_path])
        else:
            write_dataset(path, overwrite=True)
        before = contents(path)
        with pytest.raises(FormatError, match=r"mag.gids was replaced or restriped while 'paper.h' was"):
            writer.publish()
        writer.discard()
    assert contents(path) == before


def test_a_table_of_no_rows(tmp_path):
    store = make(tmp_path / "x.gids", 0)
    add(store, "h", torch.empty(0, 4))
    assert store.reopen().table("h").read_rows([]).shape == (0, 4)
    assert list(verify(tmp_path / "x.gids")) == []
