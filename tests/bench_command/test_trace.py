"""Trace files: they are read back, runs are replayed exactly, and a damaged file is one clear error."""

from __future__ import annotations

import errno
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from datasets import in_edges
from open_options import tuned

import gids
from gids.cache import POLICIES
from gids.errors import FormatError
from gids.trace import Trace, record, recording
from gids.trace.recording import ENTER, PLAN, RETIRE, TracedTable, TraceWriter
from gids.trace.replay import replay_as_recorded
from gids.write import DatasetWriter

ROWS = 4000


def table(name="_N.feat", pages=1000, *, heat=True):
    values = (np.arange(pages) % 251).astype(np.uint8) if heat else None
    return TracedTable(name, pages, 4096, 4, None, values)


def write(path, tables, batches):
    writer = TraceWriter(path, tables)
    for pages in batches:
        writer.enter(pages)
    writer.finish()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "two.gids"
    rng = np.random.default_rng(0)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(ROWS, 256))  # four rows to a page
        writer.write_table("node", "author", "feat", torch.randn(500, 1024))
        edges = in_edges(rng.integers(0, 8, ROWS), ROWS, rng, power=3)
        writer.write_graph(("paper", "cites", "paper"), *edges, num_src=ROWS)
    return path


def minibatches(count, seed):
    """Skewed ids with repeats; some minibatches omit the second table."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        ids = {
            "paper.feat": torch.from_numpy((ROWS * rng.random(rng.integers(0, 900)) ** 3).astype(np.int64))
        }
        if rng.random() < 0.8:
            ids["author.feat"] = torch.from_numpy(rng.integers(0, 500, rng.integers(0, 120)))
        result.append(ids)
    return result


def open_loader(dataset, *tables, **options):
    source = gids.open(dataset, memory=32 << 20, **tuned(options))
    return gids.FeatureLoader(source, list(tables) or ["paper.feat"])


def papers(ids):
    return {"paper.feat": ids["paper.feat"]}


@pytest.mark.parametrize("wide", [False, True])
def test_a_written_trace_is_read_back(tmp_path, wide):
    rng = np.random.default_rng(1)
    big = (1 << 32) + 7 if wide else 1000
    tables = [table("a.x", heat=False, pages=big), table("b.y", pages=37)]
    batches = [
        [rng.integers(0, big, rng.integers(0, 50)), rng.permutation(37)[: rng.integers(0, 37)]]
        for _ in range(30)
    ]
    write(tmp_path / "t", tables, batches)
    with Trace(tmp_path / "t") as trace:
        assert trace.batch_count == 30
        assert trace.policy is None
        assert [t.name for t in trace.tables] == ["a.x", "b.y"]
        assert trace.tables[0].heat is None
        assert np.array_equal(trace.tables[1].heat, tables[1].heat)
        assert trace.events.tolist() == [ENTER] * 30
        for number, pages in reversed(list(enumerate(batches))):
            for which in (0, 1):
                assert np.array_equal(trace.pages(number, which), pages[which])
        assert trace.page_counts(1).tolist() == [len(pages[1]) for pages in batches]
        assert trace.table_number(None) == (0 if wide or big > 37 else 1)
        with pytest.raises(KeyError, match="no table 'c'"):
            trace.table_number("c")
    with np.load(tmp_path / "t") as arrays:
        assert arrays["counts"].tolist() == [[len(first), len(second)] for first, second in batches]
        assert np.array_equal(arrays["pages-1"], np.concatenate([second for _, second in batches]))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "window", "planned"),
    [*((policy, 6, 3) for policy in POLICIES), ("lookahead", 0, 1), ("lookahead", 22, 2)],
)
def test_a_recorded_run_replays_to_the_counts_of_the_run(dataset, tmp_path, policy, window, planned):
    options = {"window": window, "planned": planned, "policy": policy, "queue_depth": 16}
    path = tmp_path / "run.trace"
    batches = minibatches(40, seed=window)
    tables = ("paper.feat", "author.feat")
    with open_loader(dataset, *tables, cache=1 << 20, **options) as loader, record(loader, path):
        for ids, features in loader.attach(batches, lambda ids: ids):  # an epoch
            assert all(torch.equal(features[t], loader.store.read_rows(ids[t], t)) for t in ids)
        for _ in loader.attach(batches[::-1], lambda ids: ids):  # and another
            pass
        stream = loader.attach(batches, lambda ids: ids)  # and one that is left in the middle
        for _ in range(7):
            next(stream)
        stream.close()
        counted = loader.stats()["tables"]
    with Trace(path) as trace:
        assert trace.policy == policy
        assert int((trace.events == ENTER).sum()) == trace.batch_count
        assert int((trace.events == RETIRE).sum()) == trace.batch_count
        assert 87 <= int((trace.events == PLAN).sum()) <= 87 + planned
        for number, traced in enumerate(trace.tables):
            found = replay_as_recorded(trace, number)
            run = counted[traced.name]
            assert int(found.hits.sum()) == run["hits"] == trace.counters[traced.name]["hits"]
            assert int(found.pages.sum()) == run["pages"]
            assert int(found.loads.sum()) == run["loads"]
            assert int(found.bypasses.sum()) == run["bypasses"]
            assert found.evictions == run["evictions"]


def test_a_run_whose_planned_minibatches_adapt_is_replayed(dataset, tmp_path):
    path = tmp_path / "run.trace"
    with open_loader(dataset, cache=1 << 20) as loader:
        with record(loader, path):
            for _ in range(3):
                for _ in loader.attach(minibatches(30, seed=2), papers):
                    pass
            hits = loader.stats()["hits"]
        for _ in loader.attach(minibatches(3, seed=2), papers):
            pass  # after the block nothing is written
    with Trace(path) as trace:
        assert trace.batch_count == 90
        assert int(replay_as_recorded(trace, 0).hits.sum()) == hits


def test_a_trace_ends_when_another_loader_takes_the_memory(dataset, tmp_path, caplog):
    path = tmp_path / "run.trace"
    with gids.open(dataset, memory=32 << 20, tuning=gids.Tuning(cache=1 << 20)) as source:
        loader, other = (gids.FeatureLoader(source, [table]) for table in ("paper.feat", "author.feat"))
        with record(loader, path):
            list(loader.attach(minibatches(30, seed=2), papers))
            hits = loader.stats()["hits"]
            list(other.attach(minibatches(3, seed=3), lambda ids: {"author.feat": ids["paper.feat"] % 500}))
            list(loader.attach(minibatches(30, seed=2), papers))
    assert "recording stopped" in caplog.text
    with Trace(path) as trace:
        assert trace.batch_count == 30
        assert int(replay_as_recorded(trace, 0).hits.sum()) == hits == trace.counters["paper.feat"]["hits"]


def test_a_failed_run_leaves_a_trace_of_what_happened_before(dataset, tmp_path):
    path = tmp_path / "run.trace"

    def train(loader):
        with record(loader, path):
            for number, _ in enumerate(loader.attach(minibatches(30, seed=2), papers)):
                if number == 9:
                    raise RuntimeError("the model exploded")

    with open_loader(dataset, window=4) as loader, pytest.raises(RuntimeError, match="the model exploded"):
        train(loader)
    with Trace(path) as trace:
        assert trace.batch_count >= 10
        replay_as_recorded(trace, 0)


def test_a_full_disk_ends_the_recording_but_not_the_training(dataset, tmp_path, monkeypatch, caplog):
    path = tmp_path / "run.trace"
    calls = iter(range(100))

    def fill(self):
        if next(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TraceWriter, "plan", fill)
    with open_loader(dataset) as loader, record(loader, path):
        assert len(list(loader.attach(minibatches(20, seed=2), papers))) == 20
    assert "incomplete: [Errno 28] No space left on device" in caplog.text
    with pytest.raises(FormatError, match="is not a complete trace of this gids: record it again"):
        Trace(path)


def test_recording_must_start_before_the_first_minibatch(dataset, tmp_path):
    with open_loader(dataset) as loader:
        next(loader.attach(minibatches(3, seed=2), papers))
        with pytest.raises(ValueError, match="before its first minibatch"), record(loader, tmp_path / "t"):
            pass
    with open_loader(dataset) as loader:
        with pytest.raises(FileNotFoundError), record(loader, tmp_path / "nowhere" / "t"):
            pass
        with record(loader, tmp_path / "none"):
            assert (tmp_path / "none").exists()
        assert not (tmp_path / "none").exists(), "without a minibatch nothing is left that is no trace"
        (tmp_path / "old").write_text("a trace")
        with record(loader, tmp_path / "old"):
            pass
        assert (tmp_path / "old").read_text() == "a trace"


def test_a_node_loader_is_recorded_by_its_feature_loader(dataset, tmp_path, monkeypatch):
    path = tmp_path / "run.trace"
    options = {"memory": 32 << 20, "cache": 1 << 20}
    seeds = torch.arange(0, ROWS, 9)
    with gids.NodeLoader(
        gids.open(dataset, **tuned(options)), {"paper": seeds}, [3, 3], batch_size=32, shuffle=True
    ) as loader:
        monkeypatch.chdir(tmp_path)
        with record(loader, path.name):
            monkeypatch.chdir("/")
            for _ in loader:
                pass
        counted = loader.stats()["tables"]
    with Trace(path) as trace:
        assert trace.batch_count == len(loader)
        for number, traced in enumerate(trace.tables):
            assert int(replay_as_recorded(trace, number).hits.sum()) == counted[traced.name]["hits"]
    with gids.NodeLoader(dataset, {"paper": seeds}, [3], tables=[]) as loader:
        with pytest.raises(ValueError, match="loads no features"), record(loader, path):
            pass


def test_a_sampled_trace_cannot_be_replayed_as_recorded(tmp_path):
    write(tmp_path / "t", [table()], [[np.arange(3)]])
    with Trace(tmp_path / "t") as trace, pytest.raises(ValueError, match="was sampled, not recorded"):
        replay_as_recorded(trace, 0)


@pytest.fixture
def good(tmp_path):
    write(tmp_path / "good", [table(pages=100)], [[np.arange(5)], [np.arange(7, 90)]])
    return (tmp_path / "good").read_bytes()


def test_every_truncation_is_one_clear_error(tmp_path, good):
    path = tmp_path / "cut"
    for size in [*range(0, len(good), 11), len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(FormatError, match=f"^{path} is not a complete trace"):
            Trace(path)


def test_every_changed_byte_is_harmless_or_an_error(tmp_path, good):
    rng = np.random.default_rng(3)
    path = tmp_path / "changed"
    refused = 0
    for _ in range(400):
        changed = bytearray(good)
        changed[rng.integers(0, len(good))] ^= 1 << rng.integers(0, 8)
        path.write_bytes(changed)
        try:
            with Trace(path) as trace:
                assert np.array_equal(trace.tables[0].heat, table(pages=100).heat)
                assert [trace.pages(batch).tolist() for batch in range(trace.batch_count)] == [
                    list(range(5)),
                    list(range(7, 90)),
                ]
        except FormatError:
            refused += 1
    assert refused > 200  # the others changed a date, or another field that nobody reads


def test_files_that_are_not_traces_are_refused(tmp_path):
    for name, data in (("old", b"GIDSTRCE" + bytes(99)), ("empty", b""), ("zip", b"PK\x03\x04" * 20)):
        (tmp_path / name).write_bytes(data)
    np.savez(tmp_path / "other", pages=np.arange(3))
    for path in tmp_path.iterdir():
        with pytest.raises(FormatError, match="is not a complete trace of this gids"):
            Trace(path)


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "VERSION", 4)
    write(tmp_path / "t", [table()], [])
    monkeypatch.undo()
    with pytest.raises(FormatError, match="is a trace of version 4; this gids reads version 3"):
        Trace(tmp_path / "t")


def test_pages_beyond_the_table_are_refused(tmp_path):
    write(tmp_path / "t", [table(pages=10)], [[np.array([3, 10])]])
    with (
        Trace(tmp_path / "t") as trace,
        pytest.raises(FormatError, match="is damaged: page 10 of table '_N\\.feat', which has 10 pages"),
    ):
        trace.pages(0)


ABOUTS = ([], {"version": 2}, {"version": 3, "gids": "0", "tables": [], "policy": None, "counters": {}})
HOSTILE: dict[str, list[Any]] = {
    "counts": [np.array([[-1]]), np.array([5, 83]), np.array([[5.0], [83.0]]), np.array([[5], [10**6]])],
    "events": [np.array(["a"]), np.array(1)],
    "heat-0": [np.array([0.5]), np.zeros(7, np.uint8)],
    "pages-0": [np.array(3), np.arange(88), np.arange(4, dtype="u4"), np.array(["a"]), np.array([{}])],
    "about": [np.array(3), *(np.array(json.dumps(about).encode()) for about in ABOUTS)],
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in HOSTILE.items() for v in values])
def test_arrays_that_are_whole_and_wrong_are_damage(tmp_path, good, name, value):
    with np.load(io.BytesIO(good)) as arrays, open(tmp_path / "wrong", "wb") as file:
        np.savez(file, **{**arrays, name: value})
    with pytest.raises(FormatError, match=r"is damaged|is a trace of version"):
        read_all(tmp_path / "wrong")


def test_compressed_pages_are_damage(tmp_path, good):
    with np.load(io.BytesIO(good)) as arrays, open(tmp_path / "wrong", "wb") as file:
        np.savez_compressed(file, **arrays)
    with pytest.raises(FormatError, match="is damaged"):
        read_all(tmp_path / "wrong")


def read_all(path):
    with Trace(path) as trace:
        list(map(trace.pages, range(trace.batch_count)))
