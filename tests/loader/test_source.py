"""gids.open: options in one place, and one memory budget for all loaders of a source."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice
from loader_example import ROWS, TABLES, Ids, check, ids_of, minibatches
from open_options import tuned

import gids
from gids import cuda
from gids.errors import MemoryBudgetError
from gids.inference import layerwise
from gids.loader.options import OPTIONS
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


def test_options_are_the_arguments_of_open() -> None:
    arguments = list(inspect.signature(gids.open).parameters)
    assert set(arguments) == {"dataset", *OPTIONS}
    assert len(arguments) == 12


def test_sizes_are_numbers_or_text(path: Path) -> None:
    for given, size in (("16GiB", 16 << 30), (8e9, 8_000_000_000), (4096, 4096)):
        tuning = gids.Tuning(cache=given, staging=given)
        with gids.open(path, memory=given, device_memory=given, tuning=tuning) as source:
            sizes = source.options
            assert {sizes.memory, sizes.device_memory, sizes.cache, sizes.staging, source.memory} == {size}


@pytest.mark.parametrize("name", ["memory", "device_memory", "cache", "staging"])
@pytest.mark.parametrize("wrong", ["16 gigs", -1])  # the others: tests/test_sizes.py
def test_other_sizes_are_refused_with_the_name_of_the_argument(path: Path, name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* is not a size in bytes: use 4096, 256MB or 1.5GiB"):
        gids.open(path, **tuned({name: wrong}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"io_threads": 0}, r"io_threads must be 1 to 1024 \(got 0\)"),
        ({"io_threads": 1025}, r"io_threads must be 1 to 1024 \(got 1025\)"),
        ({"engine": "aio"}, r"engine must be one of auto, uring, threads, mmap \(got 'aio'\)"),
        ({"host_policy": "lru"}, r"host_policy must be one of lookahead, static \(got 'lru'\)"),
        ({"queue_depth": 16385}, r"queue_depth must be 1 to 16384 \(got 16385\)"),
    ],
)
def test_options_have_ranges(path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gids.open(path, **tuned(wrong))


@pytest.mark.parametrize("name", ["window", "threads", "planned", "queue_depth", "io_threads"])
def test_numbers_of_things_are_whole(path: Path, name: str) -> None:
    for wrong in (2.5, 2.0, True, "2"):
        with pytest.raises(TypeError, match=f"{name}={wrong!r}: give a whole number"):
            gids.open(path, **tuned({name: wrong}))
    assert type(getattr(gids.open(path, **tuned({name: np.int16(2)})).options, name)) is int


LOADERS: dict[str, Callable[..., Any]] = {
    "gids.FeatureLoader": lambda path, **options: gids.FeatureLoader(path, TABLES, **options),
    "gids.NodeLoader": lambda path, **options: gids.NodeLoader(path, SEEDS, [3], **options),
    "gids.EdgeLoader": lambda path, **options: gids.EdgeLoader(path, None, [3], **options),
    "layerwise": lambda path, **options: layerwise([], path, **options),
}


@pytest.mark.parametrize("caller", LOADERS)
def test_an_option_of_open_given_to_a_loader_says_where_it_belongs(path: Path, caller: str) -> None:
    with pytest.raises(TypeError, match=r"'window': it is an option of gids.open\(\). Give .*window=\.\.\."):
        LOADERS[caller](path, window=4)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("bach_size", "did you mean 'batch_size'?"),
        ("windw", "did you mean 'window' of gids.open()?"),
        ("xyzzy", "has no argument 'xyzzy' (it has source, seeds, sampler, time, strategy, tables, "),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(path: Path, name: str, suggestion: str) -> None:
    with pytest.raises(TypeError) as caught:
        gids.NodeLoader(path, SEEDS, [3], **{name: 1})
    assert suggestion in str(caught.value)


def test_a_misspelled_option_gets_a_suggestion(path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"gids.open has no argument 'polcy'; did you mean 'policy' of gids.Tuning"
    ):
        gids.open(path, polcy="lru")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("queue_deph", "did you mean 'queue_depth'?"), ("window", "Give gids.open(PATH, window=...)")],
)
def test_a_misspelled_field_of_tuning_gets_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(TypeError) as caught:
        gids.Tuning(**{name: 1})
    assert str(caught.value).startswith(f"gids.Tuning has no argument {name!r}")
    assert suggestion in str(caught.value)


def test_loaders_with_the_same_tables_share_one_cache(opened: gids.Source) -> None:
    with node_loader(opened) as train, node_loader(opened, shuffle=True) as val:
        assert train.feature_loader is val.feature_loader
        expected = [m.features["paper.feat"] for m in val]
        for m in train:
            assert len(m.features["paper.feat"]) == len(m.input_nodes["paper"])  # type: ignore[call-overload]
        assert train.stats()["hits"] > 0
        assert held_bytes(train, val) <= MEMORY
    with node_loader(opened, shuffle=True) as alone:
        for m, rows in zip(alone, expected, strict=True):
            assert torch.equal(m.features["paper.feat"], rows)


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


def test_loaders_of_other_tables_take_turns_with_the_memory(opened: gids.Source, source: Ids) -> None:
    with node_loader(opened) as papers, node_loader(opened, ["author.feat"]) as authors:
        assert papers.feature_loader is not authors.feature_loader
        for _ in range(2):
            for loader, table in ((papers, "paper.feat"), (authors, "author.feat")):
                for m in loader:
                    nodes = m.input_nodes[table.split(".")[0]]  # type: ignore[call-overload]
                    assert torch.equal(m.features[table], source[table][nodes])
                    assert held_bytes(papers, authors) <= MEMORY
        caches = [loader.feature_loader.has_cache for loader in (papers, authors)]  # type: ignore[union-attr]
        assert caches == [False, True]
        steps = papers.stats()["tables"]["paper.feat"]["steps"]
        assert steps == 2 * len(papers)  # counters go on where a cache was given up


def test_total_lines_never_exceed_the_memory(path: Path) -> None:
    """Full caches of both tables would take more than there is."""
    memory = 8 << 20
    with gids.open(path, memory=memory, window=2, tuning=gids.Tuning(queue_depth=8)) as source:
        loaders = [
            node_loader(source, tables, minibatch_rows=500)
            for tables in (["paper.feat"], ["author.feat"], TABLES)
        ]
        for loader in (*loaders, *loaders):
            for _ in loader:
                assert held_bytes(*loaders) <= memory


def test_an_open_epoch_of_other_tables_is_a_clear_error(opened: gids.Source) -> None:
    with node_loader(opened) as papers, node_loader(opened, ["author.feat"]) as authors:
        epoch = iter(papers)
        next(epoch)
        with pytest.raises(MemoryBudgetError, match=r"has an open epoch.*end that epoch first"):
            next(iter(authors))
        epoch.close()
        assert len(list(authors)) == len(authors)


def test_an_open_epoch_of_another_dtype_is_told_by_its_dtype(opened: gids.Source) -> None:
    with node_loader(opened) as stored, node_loader(opened, dtype=torch.float16) as half:
        epoch = iter(stored)
        next(epoch)
        with pytest.raises(MemoryBudgetError, match=r"dtype=None\) has an .*dtype=torch\.float16\) needs"):
            next(iter(half))
        epoch.close()


def test_a_dropped_epoch_is_not_open(opened: gids.Source) -> None:
    with node_loader(opened) as papers, node_loader(opened, ["author.feat"]) as authors:
        for _ in papers:
            break
        del _
        assert len(list(authors)) == len(authors)


def test_an_error_says_how_much_memory_is_enough_beside_idle_loaders(path: Path) -> None:
    def read(memory: int) -> None:
        options: Any = {"window": 0, "reads": "random", "tuning": gids.Tuning(queue_depth=64)}
        with gids.open(path, memory=memory, **options) as source:
            idle = [gids.FeatureLoader(source, tables) for tables in 3 * [["author.feat"]]]
            list(node_loader(source, batch_size=429))
            assert sum(loader.kept_bytes for loader in idle) > memory // 20  # of their engines

    memory = 2_000_000
    with pytest.raises(MemoryBudgetError, match=rf"^memory={memory} .* other loaders ") as caught:
        read(memory)
    advised = re.search(r"Give memory=([\d_]+) or more", str(caught.value))
    assert advised
    read(int(advised[1]))


def test_minibatch_rows_of_one_loader_hold_for_all_that_share_its_cache(path: Path) -> None:
    def lines(minibatch_rows: Any) -> int:
        with gids.open(
            path, memory=4 << 20, window=0, tuning=gids.Tuning(queue_depth=16, planned=1)
        ) as source:
            train = node_loader(source, batch_size=8)
            node_loader(source, batch_size=429, minibatch_rows=minibatch_rows)
            list(train)
            return int(train.stats()["memory"]["lines"])

    assert lines({"paper.feat": 1500}) < lines(None)


def test_loaders_of_different_devices_have_separate_memory(
    path: Path, source: Ids, cuda_is: Callable[[EmulatedDevice], None]
) -> None:
    cuda_is(EmulatedDevice())
    with gids.open(path, device_memory=1 << 24, window=2, tuning=gids.Tuning(staging=1 << 18)) as opened:
        host = gids.FeatureLoader(opened, ["paper.feat"])
        device = gids.FeatureLoader(opened, ["paper.feat"], device="cuda")
        batches = [{"paper.feat": m["paper.feat"]} for m in minibatches(4)]
        both = zip(host.attach(batches, ids_of), device.attach(batches, ids_of), strict=True)
        for one, other in both:
            check(source, *one)
            check(source, *other)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedDevice]:
    """Two devices of one kind, "cuda:0" and "cuda:1". The second one has less free memory."""
    devices = [EmulatedDevice(total_bytes=64 << 20), EmulatedDevice(total_bytes=32 << 20, index=1)]
    monkeypatch.setattr(cuda, "open_device", lambda name: devices[torch.device(name).index or 0])
    return devices


def test_two_equal_devices_have_separate_memory(
    path: Path, source: Ids, two_devices: list[EmulatedDevice]
) -> None:
    with gids.open(path, window=2, tuning=gids.Tuning(staging=1 << 18)) as opened:
        loaders = [
            gids.FeatureLoader(opened, ["paper.feat"], device=f"cuda:{index}", dtype=dtype)
            for index in (0, 1)
            for dtype in (None, torch.float16)
        ]
        for loader in loaders:
            device = two_devices[loader.device.index]
            assert opened.lender.device_bytes(device, None) == device.memory.total_bytes // 2
        batches = [{"paper.feat": m["paper.feat"]} for m in minibatches(4)]
        streams = [loader.attach(batches, ids_of) for loader in loaders[::2]]
        for one, other in zip(*streams, strict=True):  # at the same time
            check(source, *one)
            check(source, *other)
        kept = loaders[0].stats()["memory"]["lines"]
        list(loaders[3].attach(batches, ids_of))  # takes the memory of the other loader there
        assert [loader.has_cache for loader in loaders] == [True, False, False, True]
        assert loaders[0].stats()["memory"]["lines"] == kept


def test_names_of_one_device_share_its_cache_and_memory(
    path: Path, source: Ids, two_devices: list[EmulatedDevice]
) -> None:
    with gids.open(path, device_memory=1 << 24, window=2, tuning=gids.Tuning(staging=1 << 18)) as opened:
        names: list[Any] = ["cuda", "cuda:0", torch.device("cuda", 0), "cuda:1"]
        loaders = [node_loader(opened, device=name).feature_loader for name in names]
        assert loaders[0] is loaders[1] is loaders[2] is not loaders[3]
        assert loaders[0].device == torch.device("cuda:0")
        other = gids.FeatureLoader(opened, ["paper.feat"], device="cuda")
        again = gids.FeatureLoader(opened, ["paper.feat"], device="cuda:0")
        for loader in (other, again):
            list(loader.attach([{"paper.feat": torch.arange(9)}], ids_of))
        assert (other.has_cache, again.has_cache) == (False, True)


def test_on_a_device_memory_holds_staging_and_a_tier_of_lines(
    path: Path, cuda_is: Callable[[EmulatedDevice], None]
) -> None:
    cuda_is(EmulatedDevice())
    batches = [{"paper.feat": m["paper.feat"]} for m in minibatches(4)]
    for memory, tier in ((None, 0), (3 << 20, 2 << 20)):
        with gids.open(
            path, device_memory=1 << 24, memory=memory, tuning=gids.Tuning(cache=1 << 18, staging="1MiB")
        ) as source:
            loader = gids.FeatureLoader(source, ["paper.feat"], device="cuda")
            list(loader.attach(batches, ids_of))
            assert tier - (64 << 10) <= loader.stats()["memory"]["host lines"] <= tier
    with gids.open(path, memory="1MB", tuning=gids.Tuning(staging="1MiB")) as source:
        with pytest.raises(ValueError, match="staging=1048576 is more than memory=1000000"):
            gids.FeatureLoader(source, ["paper.feat"], device="cuda")


def test_a_source_of_two_datasets_finds_tables_in_both(path: Path, tmp_path: Path) -> None:
    text = torch.randn(ROWS, 8)
    with DatasetWriter(tmp_path / "text.gids") as writer:
        writer.write_table("node", "paper", "text", text)
    with gids.open([path, gids.FeatureStore(tmp_path / "text.gids")], memory=MEMORY, window=2) as source:
        assert source.store is source.stores[0]
        assert [store.name for store in source.stores] == [path.name, "text.gids"]
        for tables in (["paper.text", "author.feat"], ["text", "author.feat"], None):
            with node_loader(source, tables) as loader:
                assert set(loader.tables) >= {"paper.text", "author.feat"}
                for m in loader:
                    nodes = m.input_nodes["paper"]  # type: ignore[call-overload]
                    assert torch.equal(m.features["paper.text"], text[nodes])


def test_splits_are_those_of_the_first_dataset(tmp_path: Path) -> None:
    ids = torch.arange(3, 9)
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "paper", "feat", torch.zeros(20, 4))
        writer.write_split("paper", "train", ids)
    with gids.open(tmp_path / "a.gids") as source:
        assert torch.equal(source.split("train"), ids)
        with pytest.raises(KeyError, match="no split 'val'"):
            source.split("val")


def test_a_closed_source_is_refused_and_its_loaders_are_closed(path: Path) -> None:
    source = gids.open(path, memory=MEMORY)
    with node_loader(source) as loader:
        epoch = iter(loader)
        next(epoch)
        source.close()
        source.close()
        assert loader.feature_loader.closed
        with pytest.raises(ValueError, match="closed"):
            next(epoch)
        with pytest.raises(ValueError, match="closed"):
            next(iter(loader))
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


def test_what_is_no_dataset_is_refused() -> None:
    for wrong in (None, b"x.gids", {"x.gids"}):
        with pytest.raises(TypeError, match=f"dataset is {type(wrong).__name__}: give a path, a Feat"):
            gids.open(wrong)
    with pytest.raises(ValueError, match="dataset is an empty list"):
        gids.open([])


def test_stored_rows_and_rows_are_read_by_loaders_of_their_own(path: Path) -> None:
    """Cooperative minibatches read rows, and ranks that share rows read them as they are stored."""
    with gids.open(path, memory="16MB") as source:
        table = source.store.table("paper.feat")
        rows = source.feature_loader(table, {"paper.feat": table})
        stored = source.feature_loader(table, {"paper.feat": table.stored()})
        assert rows is source.feature_loader(source, {"paper.feat": table})
        for loader, dtype in ((rows, table.dtype), (stored, torch.uint8)):
            ((_, features),) = loader.attach([{"paper.feat": torch.arange(9)}], lambda ids: ids)
            assert features["paper.feat"].dtype == dtype


def pages_of(loader: gids.NodeLoader, minibatch: Any) -> int:
    """The distinct pages of a minibatch's rows."""
    table = loader.tables["paper.feat"]
    positions = np.asarray(minibatch.input_nodes["paper"])
    if table.order is not None:
        positions = table.order[positions]
    return len(np.unique(positions // table.rows_per_page))


def test_loaders_that_share_a_cache_return_its_counters(opened: gids.Source) -> None:
    train, val = node_loader(opened), node_loader(opened, shuffle=True, batch_size=32)
    expected = sum(pages_of(train, m) for m in train) + sum(pages_of(val, m) for m in val)
    assert train.stats()["pages"] == val.stats()["pages"] == opened.stats()["pages"] == expected
    assert val.stats()["tables"]["paper.feat"]["steps"] == len(train) + len(val)


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
