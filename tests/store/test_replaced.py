"""A dataset that is replaced while it is open: loaders read the rows of the dataset that was opened, or raise
a StorageError that says so."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import damage, in_edges
from emulator import EmulatedDevice
from engines import URING
from open_options import tuned

import gids
from gids.cuda.device import Device
from gids.errors import StorageError
from gids.heat import write_heat
from gids.loader import pack_switch, sampled_ahead
from gids.store import FeatureStore, files, verify
from gids.store.files import private_tensor
from gids.write import DatasetWriter, create_table

NODES, DIM = 600, 24
OLD, NEW = 0, 1 << 22
PAPER, CITES = "paper", ("paper", "cites", "paper")
REPLACED = r"was replaced(;| or removed after the dataset was opened:) open it again"
TABLES = ["paper.feat", "paper.ordered", "paper.scaled"]


def rows_of(base: int, table: str) -> torch.Tensor:
    """All rows of a table, which tell the dataset that they are from."""
    values = base + torch.arange(NODES).view(-1, 1) * 8.0 + torch.arange(DIM) % 8
    return values if table != "paper.scaled" else torch.full((NODES, DIM), 127.0 * (base + 1))


def write(path: Path, base: int, **options: Any) -> Path:
    """Every dataset has the same files, of the same sizes."""
    with DatasetWriter(path, overwrite=True, page_bytes=512, **options) as writer:
        rng = np.random.default_rng(base)
        order = rng.permutation(NODES)
        writer.write_table("node", PAPER, "feat", rows_of(base, "paper.feat"))
        writer.write_table("node", PAPER, "ordered", rows_of(base, "paper.ordered"), order=order)
        scaled = rows_of(base, "paper.scaled")
        writer.write_table("node", PAPER, "scaled", scaled, dtype=torch.int8, scale="column")
        writer.write_graph(CITES, *in_edges([12] * NODES, NODES, rng), num_src=NODES, edge_ids=order_of(base))
        writer.write_labels(PAPER, base + torch.arange(NODES))
        writer.write_split(PAPER, "train", torch.arange(200) + (base > 0))
        writer.write_times(PAPER, base + torch.arange(NODES))
    return path


def order_of(base: int) -> np.ndarray:
    return np.random.default_rng(base + 1).permutation(12 * NODES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.gids", OLD)


def check(minibatch: Any) -> None:
    """The minibatch has rows of the old dataset only."""
    assert torch.equal(minibatch.labels.cpu(), OLD + minibatch.seeds.cpu())
    for name in TABLES:
        rows = minibatch.features[name].cpu()
        assert torch.equal(rows, rows_of(OLD, name)[minibatch.input_nodes.cpu()]), name


def several_superbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_switch, "EARLY", 2)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", 4)


@pytest.fixture(params=["cpu", "cuda"])
def where(request: Any, cuda_is: Callable[[Device], None]) -> str:
    """The CPU, or an emulated device."""
    if request.param == "cuda":
        cuda_is(EmulatedDevice(0))
    return str(request.param)


@pytest.mark.few(6)
@pytest.mark.parametrize(("reads", "check_crc"), [("random", True), ("pack", False), ("pack", True)])
@pytest.mark.parametrize("when", ["before the loader", "before a minibatch", "in an epoch", "between epochs"])
def test_minibatches_are_of_the_dataset_that_was_opened(
    path: Path, where: str, reads: Any, check_crc: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    several_superbatches(monkeypatch)
    options: dict[str, Any] = {"memory": "12MB", "staging": "1MiB", "window": 2, "check_crc": check_crc}
    with gids.open(path, reads=reads, device_memory="12MB", **tuned(options, queue_depth=16)) as source:
        if when == "before the loader":
            write(path, NEW)
            with pytest.raises(StorageError, match=REPLACED):
                gids.NodeLoader(source, torch.arange(9), [3], tables=TABLES, device=where)
            return
        loader = gids.NodeLoader(
            source, torch.arange(0, NODES, 3), [3], tables=TABLES, batch_size=20, device=where
        )
        if when == "before a minibatch":
            write(path, NEW)
        for _ in range(2):
            returned = 0
            for minibatch in loader:
                check(minibatch)
                returned += 1
                if when == "in an epoch" and returned == 3:
                    write(path, NEW)
            assert returned == len(loader)
            if when == "between epochs":
                write(path, NEW)
        loader.close()


ARRAYS: dict[str, Callable[[FeatureStore], Any]] = {
    "graph": lambda store: np.concatenate([store.graph().indices, np.asarray(store.graph().edge_ids)]),
    "labels": lambda store: store.labels[PAPER],
    "graph to write": lambda store: private_tensor(store.graph().indptr),
    "splits": lambda store: store.split("train"),
    "times": lambda store: store.node_times(),
    "heat": lambda store: store.out_degrees(),
    "checksums": lambda store: store.table("feat").checksums(),
    "order": lambda store: store.table("ordered").order,
    "scales": lambda store: store.table("scaled").column_scales(),
    **{name: lambda store, name=name: store.read_rows([3, 9], name) for name in TABLES},  # type: ignore[misc]
    "scan": lambda store: torch.cat([block for _, block in store.table("feat").scan(100)]),
    "scan of an order": lambda store: torch.cat([block for _, block in store.table("ordered").scan(100)]),
}


def copied(values: Any) -> np.ndarray:
    return values.numpy().copy() if isinstance(values, torch.Tensor) else np.array(values)


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(copied(a), copied(b)))


@pytest.mark.parametrize("used_before", [False, True])
def test_what_is_opened_late_is_of_the_dataset_that_was_opened(path: Path, used_before: bool) -> None:
    expected = {name: copied(read(FeatureStore(path))) for name, read in ARRAYS.items()}
    store = FeatureStore(path)
    kept = {name: read(store) for name, read in ARRAYS.items()} if used_before else {}
    write(path, NEW)
    errors: list[StorageError] = []
    for name, read in ARRAYS.items():
        try:
            assert same(read(store), expected[name]), name
        except StorageError as error:
            errors.append(error)
    told = f"the dataset {path} was replaced; open it again"
    assert all(told in str(error) and error.errno == errno.ESTALE for error in errors)
    assert len(errors) == (5 if used_before else len(ARRAYS))
    assert all(same(value, expected[name]) for name, value in kept.items())
    assert same(store.reopen().read_rows([3], "feat"), rows_of(NEW, "paper.feat")[[3]])


@pytest.mark.parametrize("kind", ["a store", "a table"])
def test_a_pickled_store_is_not_opened_from_another_dataset(path: Path, kind: str) -> None:
    store = FeatureStore(path)
    data = pickle.dumps(store if kind == "a store" else store.table("feat"))
    again = pickle.loads(data)
    assert same(again.read_rows([5], *["feat"] * (kind == "a store")), rows_of(OLD, "paper.feat")[[5]])
    with create_table(store, "more", NODES, 2) as writer:
        writer.write(0, torch.zeros(NODES, 2))
    write_heat(path, "sampled", {PAPER: np.ones(NODES)})
    again = pickle.loads(data)  # what it had is still there
    assert same(again.read_rows([5], *["feat"] * (kind == "a store")), rows_of(OLD, "paper.feat")[[5]])
    write(path, NEW)
    with pytest.raises(StorageError, match=REPLACED):
        pickle.loads(data).read_rows([5], *["feat"] * (kind == "a store"))


def _reads(store: FeatureStore, answers: Any) -> None:
    try:
        answers.put([float(store.read_rows([7], "feat")[0, 0]), int(store.graph().indptr[-1])])
    except StorageError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_a_forked_process_reads_the_dataset_or_raises(path: Path) -> None:
    store, context = FeatureStore(path), multiprocessing.get_context("fork")
    answers = context.Queue()
    found = []
    for replace in (False, True):
        if replace:
            write(path, NEW)
        child = context.Process(target=_reads, args=(store, answers))
        child.start()
        found.append(answers.get(timeout=60))
        child.join()
    assert found[0] == [float(rows_of(OLD, "paper.feat")[7, 0]), 12 * NODES]
    assert "was replaced; open it again" in found[1]


@pytest.mark.parametrize("after", ["_open_directory", "load_manifest", "_faults"])
def test_a_store_is_of_one_dataset_whenever_it_is_replaced(
    path: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its directory was opened, its manifest read, its files looked at."""
    step, calls = getattr(files, after), []

    def replace_after(*arguments: Any) -> Any:
        result = step(*arguments)
        if after == "_faults":
            result = iter(list(result))
        calls.append(after)
        if len(calls) == 1:
            write(path, NEW)
        return result

    monkeypatch.setattr(files, after, replace_after)
    try:
        store = FeatureStore(path)
        values = [float(store.read_rows([0], "feat")[0, 0]), int(store.labels[PAPER][0])]
    except StorageError as error:
        told = str(error)
        assert after == "_faults"
        assert "was replaced; open it again" in told
        return
    assert values == [NEW, NEW]


@pytest.mark.parametrize("way", ["rename", "write again"])
def test_shards_outside_the_dataset_that_were_replaced_are_noticed(tmp_path: Path, way: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    path = write(tmp_path / "a.gids", OLD, stripe=[disk])
    write(tmp_path / "b.gids", NEW, stripe=[disk])
    store, other = (FeatureStore(tmp_path / name, allow_dirs=[disk]) for name in ("a.gids", "b.gids"))
    mine, theirs = (s.table("feat").shard_paths[0] for s in (store, other))
    with gids.open(path, allow_dirs=[disk]) as source:
        if way == "rename":
            theirs.rename(mine)
        else:
            data = theirs.read_bytes()
            mine.unlink()
            mine.write_bytes(data)
        with pytest.raises(StorageError, match="replaced or changed after the dataset was opened"):
            store.read_rows([3], "feat")
        with pytest.raises(StorageError, match="replaced or changed after the dataset was opened"):
            gids.FeatureLoader(source, ["feat"])


@pytest.mark.parametrize("name", ["ordered", "scaled"])
@pytest.mark.parametrize("check_crc", [False, True])
def test_a_loader_that_was_not_iterated_reads_a_table_that_was_replaced(
    path: Path, name: str, check_crc: bool
) -> None:
    with gids.open(path, memory="12MB", check_crc=check_crc) as source:
        loader = gids.NodeLoader(source, torch.arange(200), [3], tables=[name], batch_size=20)
        with create_table(source.store, name, NODES, DIM, replace=True) as writer:
            writer.write(0, rows_of(NEW, f"paper.{name}"))
        for minibatch in loader:
            expected = rows_of(OLD, f"paper.{name}")[minibatch.input_nodes]
            assert torch.equal(minibatch.features[f"paper.{name}"], expected)
        with pytest.raises(StorageError, match=REPLACED):
            gids.NodeLoader(source, torch.arange(200), [3], tables=["feat", name])
        loader.close()


def test_no_table_is_added_to_a_dataset_that_was_replaced_before(path: Path) -> None:
    store = FeatureStore(path)
    write(path, NEW)
    with pytest.raises(StorageError, match=REPLACED):
        create_table(store, "more", NODES, 2)


def test_verify_begins_again_when_the_dataset_is_replaced(path: Path) -> None:
    totals: list[int] = []

    def replace(total: int) -> None:
        totals.append(total)
        if len(totals) == 1:
            write(path, NEW)

    assert list(verify(path, on_total=replace)) == []
    assert len(totals) == 2


def test_a_closed_store_keeps_no_descriptor_and_can_be_read(path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    store = FeatureStore(path)
    tables = [store.table(name) for name in TABLES]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    store.close()
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert same(tables[0].read_rows([4]), rows_of(OLD, TABLES[0])[[4]])
    write(path, NEW)
    assert same(tables[0].read_rows([4]), rows_of(OLD, TABLES[0])[[4]]), "it is mapped"
    with pytest.raises(StorageError, match=REPLACED):
        tables[1].read_rows([4])


def flip(file: Path, byte: int) -> None:
    damage(file, bytes([file.read_bytes()[byte] ^ 4]), byte)


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("nodes/paper.label.npy", lambda source: source.store.labels[PAPER]),
        ("nodes/paper.train_idx.npy", lambda source: source.split("train")),
        ("tables/paper.scaled/scale.npy", lambda source: source.store.table("scaled").column_scales()),
        ("tables/paper.ordered/order.npy", lambda source: gids.FeatureLoader(source, ["ordered"])),
    ],
)
def test_a_flipped_bit_is_an_error(path: Path, file: str, read: Callable[[gids.Source], Any]) -> None:
    with gids.open(path, check_crc=True, memory="12MB") as source:
        flip(path / file, 128 + 41)
        with pytest.raises(StorageError, match=r"the checksum of this file is wrong") as caught:
            read(source)
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.filename == str(path / file)


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_an_order_that_was_checked_does_not_change_on_disk_any_more(path: Path, reads: Any) -> None:
    """It is in memory, so that a page that the system reads again cannot differ."""
    with gids.open(path, check_crc=True, memory="12MB", reads=reads) as source:
        loader = gids.NodeLoader(source, torch.arange(0, NODES, 2), [3], tables=TABLES, batch_size=20)
        for byte in range(128, 128 + 4 * NODES, 40):
            flip(path / "tables/paper.ordered/order.npy", byte)
        for minibatch in loader:
            check(minibatch)
        loader.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", [URING, "threads", "mmap"])
def test_few_descriptors_are_enough_and_closing_ends_them(path: Path, engine: str) -> None:
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 24, limits[1]))
    try:
        with gids.open(
            path, memory="12MB", check_crc=True, reads="random", tuning=gids.Tuning(engine=engine)
        ) as source:
            loader = gids.NodeLoader(source, torch.arange(200), [3], tables=TABLES, batch_size=20)
            for minibatch in loader:
                check(minibatch)
            loader.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del loader, minibatch, source
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
