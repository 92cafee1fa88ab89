"""A dataset that is moved, removed or damaged while it is open: its own rows, or a StorageError."""

from __future__ import annotations

import errno
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import damage, in_edges

import gids
from gids.errors import StorageError
from gids.heat import write_heat
from gids.store import FeatureStore
from gids.write import DatasetWriter

NODES, DIM = 600, 24
OLD, NEW = 0, 1 << 22
PAPER, CITES = "paper", ("paper", "cites", "paper")
TABLES = ["paper.feat", "paper.ordered", "paper.scaled"]
GONE = "removed after the dataset was opened: open it again"


def rows_of(base: int, table: str) -> torch.Tensor:
    """All rows of a table, which tell the dataset that they are from."""
    values = base + torch.arange(NODES).view(-1, 1) * 8.0 + torch.arange(DIM) % 8
    return values if table != "paper.scaled" else torch.full((NODES, DIM), 127.0 * (base + 1))


def write(path: Path, base: int) -> Path:
    """Every dataset has the same files, of the same sizes."""
    with DatasetWriter(path, page_bytes=512) as writer:
        rng = np.random.default_rng(base)
        order = rng.permutation(NODES)
        writer.write_table("node", PAPER, "feat", rows_of(base, "paper.feat"))
        writer.write_table("node", PAPER, "ordered", rows_of(base, "paper.ordered"), order=order)
        scaled = rows_of(base, "paper.scaled")
        writer.write_table("node", PAPER, "scaled", scaled, dtype=torch.int8, scale="column")
        writer.write_graph(CITES, *in_edges([12] * NODES, NODES, rng), num_src=NODES)
        writer.write_labels(PAPER, base + torch.arange(NODES))
        writer.write_split(PAPER, "train", torch.arange(200))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.gids", OLD)


def check(loader: Any) -> None:
    for minibatch in loader:
        assert torch.equal(minibatch.labels, OLD + minibatch.seeds)
        for name in TABLES:
            assert torch.equal(minibatch.features[name], rows_of(OLD, name)[minibatch.input_nodes]), name


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_an_open_dataset_reads_its_own_files_when_another_one_has_its_path(path: Path, reads: Any) -> None:
    with gids.open(path, memory="12MB", reads=reads) as source:
        options: dict[str, Any] = {"tables": TABLES, "batch_size": 20}
        loader = gids.NodeLoader(source, torch.arange(0, NODES, 3), [3], **{"seed": 0} | options)
        path.rename(path.with_name("moved.gids"))
        write(path, NEW)
        check(loader)
        check(gids.NodeLoader(source, torch.arange(9), [3], **{"seed": 0} | options))
        assert torch.equal(source.split("train"), torch.arange(200))
        shutil.rmtree(path.with_name("moved.gids"))
        check(loader)  # its files are open
        assert torch.equal(source.store.labels[PAPER], torch.arange(NODES))
        with pytest.raises(StorageError, match=GONE) as caught:
            source.store.table("feat").checksums()
        assert caught.value.errno == errno.ESTALE


def read(store_or_table: Any) -> torch.Tensor:
    names = ["feat"] if isinstance(store_or_table, FeatureStore) else []
    return store_or_table.read_rows([5], *names)  # type: ignore[no-any-return]


def test_pickles_and_closed_stores_open_the_same_content_again(path: Path) -> None:
    store = FeatureStore(path)
    pickles = [pickle.dumps(store), pickle.dumps(store.table("feat"))]
    assert len(pickles[1]) < 4000, "the mapped files are not in the pickle"
    closed, others = FeatureStore(path), FeatureStore(path)
    for each in (closed, others):
        each.close()
        each.close()
    write_heat(path, "sampled", {PAPER: np.ones(NODES)})
    expected = rows_of(OLD, "paper.feat")[[5]]
    assert all(torch.equal(read(pickle.loads(data)), expected) for data in pickles)
    assert torch.equal(read(closed), expected)
    path.rename(path.with_name("moved.gids"))
    write(path, NEW)
    assert torch.equal(read(closed), expected), "it is mapped"
    for data in pickles:
        with pytest.raises(StorageError, match=r"is not the one that was \w+: open it again"):
            read(pickle.loads(data))
    with pytest.raises(StorageError, match="is not the one that was opened: open it again"):
        read(others)


@pytest.mark.parametrize("how", ["renamed", "overwritten"])
def test_files_that_are_exchanged_are_refused(path: Path, how: str) -> None:
    other = write(path.with_name("b.gids"), NEW)
    with gids.open(path, memory="12MB", reads="random") as source:
        for file in other.rglob("*.bin"):
            target = path / file.relative_to(other)
            file.rename(target) if how == "renamed" else shutil.copyfile(file, target)
        with pytest.raises(StorageError, match="replaced or changed after the dataset was opened"):
            check(gids.NodeLoader(source, torch.arange(60), [3], tables=TABLES, batch_size=20))


def flip(file: Path, byte: int) -> None:
    damage(file, bytes([file.read_bytes()[byte] ^ 4]), byte)


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("nodes/paper.label.npy", lambda source: source.store.labels[PAPER]),
        ("nodes/paper.train_idx.npy", lambda source: source.split("train")),
        ("tables/paper.scaled/scale.npy", lambda source: source.store.table("scaled").column_scales()),
        ("tables/paper.ordered/order.npy", lambda source: gids.FeatureLoader(source, ["ordered"])),
    ],
)
def test_a_flipped_bit_is_an_error(path: Path, file: str, use: Callable[[gids.Source], Any]) -> None:
    with gids.open(path, check_crc=True, memory="12MB") as source:
        flip(path / file, 128 + 41)
        with pytest.raises(StorageError, match=r"the checksum of this file is wrong") as caught:
            use(source)
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.filename == str(path / file)


def test_an_order_that_was_checked_does_not_change_on_disk_any_more(path: Path) -> None:
    """It is in memory, so that a page that the system reads again cannot differ."""
    with gids.open(path, check_crc=True, memory="12MB", reads="random") as source:
        loader = gids.NodeLoader(source, torch.arange(0, NODES, 2), [3], tables=TABLES, batch_size=20, seed=0)
        for byte in range(128, 128 + 4 * NODES, 40):
            flip(path / "tables/paper.ordered/order.npy", byte)
        check(loader)
