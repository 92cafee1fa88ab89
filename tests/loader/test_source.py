"""gids.open: options in one place, and one memory budget for all loaders of a source."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import resident_bytes
from emulator import EmulatedDevice
from loader_example import ROWS, TABLES, Ids, check, ids_of, minibatches
from open_options import tuned

import gids
from gids import cuda
from gids.errors import MemoryBudgetError
from gids.write import DatasetWriter

MEMORY = 16 << 20
SEEDS = {"paper": torch.arange(0, ROWS, 7)}
ARGUMENTS: dict[str, Any] = {"batch_size": 64, "labels": False, "seed": 0}


@pytest.fixture
def opened(path: Path) -> Any:
    with gids.open(path, memory=MEMORY, window=4, tuning=gids.Tuning(queue_depth=16)) as source:
        yield source


def node_loader(source: gids.Source, tables: Any = ("paper.feat",), **options: Any) -> gids.NodeLoader:
    return gids.NodeLoader(source, SEEDS, [3, 3], tables=tables, **ARGUMENTS | options)


def held_bytes(*loaders: gids.NodeLoader) -> int:
    features = {loader.feature_loader for loader in loaders}
    return sum(n for f in features if f is not None for n in f.stats()["memory"].values())


def test_sizes_are_numbers_or_text_and_numbers_of_things_are_whole(path: Path) -> None:
    for given, size in (("16GiB", 16 << 30), (8e9, 8_000_000_000), (4096, 4096)):
        tuning = gids.Tuning(cache=given, staging=given)
        with gids.open(path, memory=given, device_memory=given, tuning=tuning) as source:
            sizes = source.options
            assert {sizes.memory, sizes.device_memory, sizes.cache, sizes.staging, source.memory} == {size}
    for name in ("window", "threads", "planned", "queue_depth", "io_threads"):
        with gids.open(path, **tuned({name: np.int16(2)})) as source:
            assert type(getattr(source.options, name)) is int


def test_loaders_with_the_same_tables_share_one_cache(opened: gids.Source) -> None:
    with node_loader(opened) as train, node_loader(opened, shuffle=True) as val:
        assert train.feature_loader is val.feature_loader
        assert len(list(val)) == len(val)
        hits = train.stats()["hits"]
        for m in train:
            assert len(m.features["paper.feat"]) == len(m.input_nodes["paper"])  # type: ignore[call-overload]
        assert train.stats()["hits"] > hits
        assert held_bytes(train, val) <= MEMORY


def test_the_shared_cache_ends_with_its_last_loader(opened: gids.Source) -> None:
    train, val = node_loader(opened), node_loader(opened)
    shared = train.feature_loader
    epoch = iter(train)
    next(epoch)
    train.close()
    assert list(epoch) == []
    assert not shared.closed
    assert len(list(val)) == len(val)
    val.close()
    assert shared.closed


def test_the_iterator_of_a_dropped_loader_goes_on_when_other_loaders_close(opened: gids.Source) -> None:
    """``for minibatch in NodeLoader(…)``, with a validation inside."""
    closed = [node_loader(opened).close() for _ in node_loader(opened)]
    assert len(closed) == len(node_loader(opened)) > 1


def test_loaders_of_other_tables_take_turns_with_the_memory(path: Path, source: Ids) -> None:
    """Full caches of both tables would take more than there is."""
    memory, before = 8 << 20, resident_bytes()
    with gids.open(path, memory=memory, window=2, tuning=gids.Tuning(queue_depth=8)) as opened:
        papers, authors, _ = loaders = [
            node_loader(opened, tables, minibatch_rows=500)
            for tables in (["paper.feat"], ["author.feat"], TABLES)
        ]
        for loader in (*loaders, papers, authors):
            for m in loader:
                for table in loader.tables:
                    nodes = m.input_nodes[table.split(".")[0]]  # type: ignore[call-overload]
                    assert torch.equal(m.features[table], source[table][nodes])
                assert held_bytes(*loaders) <= memory
        caches = [loader.feature_loader.has_cache for loader in loaders]  # type: ignore[union-attr]
        assert caches == [False, True, False]
        steps = papers.stats()["tables"]["paper.feat"]["steps"]
        assert steps == 2 * len(papers)  # counters go on where a cache was given up
        assert resident_bytes() < before + 2 * memory


def test_minibatch_rows_of_one_loader_hold_for_all_that_share_its_cache(path: Path) -> None:
    lines = []
    for rows in (None, {"paper.feat": 1500}):
        with gids.open(path, memory=4 << 20, window=0, **tuned({"planned": 1, "queue_depth": 16})) as opened:
            train, _ = node_loader(opened, batch_size=8), node_loader(opened, minibatch_rows=rows)
            list(train)
            lines.append(train.stats()["memory"]["lines"])
    assert lines[1] < lines[0]


def test_an_open_epoch_of_other_tables_is_a_clear_error(opened: gids.Source) -> None:
    with node_loader(opened) as papers, node_loader(opened, ["author.feat"]) as authors:
        epoch = iter(papers)
        next(epoch)
        with pytest.raises(MemoryBudgetError, match=r"has an open epoch.*end that epoch first"):
            next(iter(authors))
        with node_loader(opened, dtype=torch.float16) as half:
            with pytest.raises(
                MemoryBudgetError, match=r"dtype=None\) has an .*dtype=torch\.float16\) needs"
            ):
                next(iter(half))
        assert len(list(epoch)) == len(papers) - 1
        assert len(list(authors)) == len(authors)
        for _ in papers:
            break
        del _
        assert len(list(authors)) == len(authors), "a dropped epoch is not open"


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedDevice]:
    """Two devices of one kind, "cuda:0" and "cuda:1". The second one has less free memory."""
    devices = [EmulatedDevice(total_bytes=64 << 20), EmulatedDevice(total_bytes=32 << 20, index=1)]
    monkeypatch.setattr(cuda, "open_device", lambda name: devices[torch.device(name).index or 0])
    return devices


def test_the_host_and_each_device_have_separate_memory(
    path: Path, source: Ids, two_devices: list[EmulatedDevice]
) -> None:
    batches = [{"paper.feat": m["paper.feat"]} for m in minibatches(3)]
    with gids.open(path, window=2, tuning=gids.Tuning(staging=1 << 18)) as opened:
        kinds = [(f"cuda:{index}", dtype) for index in (0, 1) for dtype in (None, torch.float16)]
        loaders = [
            gids.FeatureLoader(opened, ["paper.feat"], device=device, dtype=dtype)
            for device, dtype in (*kinds, ("cpu", None))
        ]
        streams = [loader.attach(batches, ids_of) for loader in loaders[::2]]
        for found in zip(*streams, strict=True):  # at the same time
            for one in found:
                check(source, *one)
        kept = loaders[0].stats()["memory"]["lines"]
        list(loaders[3].attach(batches, ids_of))  # takes the memory of the other loader there
        assert [loader.has_cache for loader in loaders] == [True, False, False, True, True]
        assert loaders[0].stats()["memory"]["lines"] == kept


def test_names_of_one_device_share_its_cache_and_memory(
    path: Path, two_devices: list[EmulatedDevice]
) -> None:
    with gids.open(path, device_memory=1 << 24, window=2, tuning=gids.Tuning(staging=1 << 18)) as opened:
        names: list[Any] = ["cuda", "cuda:0", torch.device("cuda", 0), "cuda:1"]
        loaders = [node_loader(opened, device=name).feature_loader for name in names]
        assert loaders[0] is loaders[1] is loaders[2] is not loaders[3]
        assert loaders[0].device == torch.device("cuda:0")


def test_a_source_of_two_datasets_finds_tables_in_both(path: Path, tmp_path: Path) -> None:
    text = torch.randn(ROWS, 8)
    with DatasetWriter(tmp_path / "text.gids") as writer:
        writer.write_table("node", "paper", "text", text)
    with gids.open([path, gids.FeatureStore(tmp_path / "text.gids")], memory=MEMORY, window=2) as source:
        assert source.store is source.stores[0]
        assert [store.name for store in source.stores] == [path.name, "text.gids"]
        bert = source.stores[1].table("text").named("bert")
        for tables in (["text", "author.feat"], None, ["author.feat", bert]):
            with node_loader(source, tables) as loader:
                assert "author.feat" in loader.tables
                m = next(iter(loader))
                name = "bert" if tables and bert in tables else "paper.text"
                nodes = m.input_nodes["paper"]  # type: ignore[call-overload]
                assert torch.equal(m.features[name], text[nodes])


def test_a_closed_source_is_refused_and_its_loaders_are_closed(path: Path) -> None:
    source = gids.open(path, memory=MEMORY)
    with node_loader(source) as loader, node_loader(source, []) as rowless:
        epochs = [iter(loader), iter(rowless)]
        for epoch in epochs:
            next(epoch)
        source.close()
        source.close()
        assert loader.feature_loader.closed
        for use in (*epochs, loader, rowless):
            with pytest.raises(ValueError, match="closed"):
                next(iter(use))  # type: ignore[call-overload]
    for make in (node_loader, lambda s: gids.FeatureLoader(s, TABLES)):
        with pytest.raises(ValueError, match=r"Source\(.*\) is closed: call gids.open\(\) again"):
            make(source)


def test_a_store_that_was_given_stays_open(path: Path) -> None:
    store = gids.FeatureStore(path)
    gids.open(store).close()
    with node_loader(gids.open(store, memory=MEMORY)) as loader:
        assert len(list(loader)) == len(loader)


def test_a_source_is_not_pickled(opened: gids.Source) -> None:
    with pytest.raises(TypeError, match=r"call gids.open\(\) in each process"):
        pickle.dumps(opened)


def test_shards_outside_the_dataset_need_allow_dirs(tmp_path: Path) -> None:
    path, outside = tmp_path / "a.gids", tmp_path / "fast"
    outside.mkdir()
    with DatasetWriter(path, stripe=[outside]) as writer:
        writer.write_table("node", "paper", "feat", torch.zeros(ROWS, 4))
    with pytest.raises(gids.FormatError, match="fast"):
        gids.open(path)
    with gids.open(path, allow_dirs=[outside]) as source:
        assert source.store.read_rows(np.arange(3)).tolist() == [[0.0] * 4] * 3


def test_a_source_counts_for_all_its_loaders(opened: gids.Source) -> None:
    assert opened.stats().keys() == {"packs"}
    pages = 0
    for tables in (["paper.feat"], ["author.feat"], ["paper.feat"]):
        with node_loader(opened, tables) as loader:
            for _ in loader:
                pass
            pages += loader.stats()["pages"]
            assert opened.stats()["pages"] == pages
    counted = opened.stats()
    assert counted["tables"].keys() == {"paper.feat", "author.feat"}
    assert counted["pages"] == pages == sum(table["pages"] for table in counted["tables"].values())
    assert counted["hit_ratio"] == counted["hits"] / pages
    assert not {"memory", "engine", "window"} & counted.keys()
