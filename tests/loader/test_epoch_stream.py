"""EpochStream: no epoch ends early in silence; errors come when they are due; another thread may close it."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import ended
from loader_example import TABLES, Ids, check, ids_of, minibatches

import gids
from gids.errors import StorageError
from gids.loader.epoch_stream import EpochStream, Sampled
from gids.loader.readers import CacheReader, Reader
from gids.sampler import Neighbor


def test_an_epoch_that_loses_minibatches_raises() -> None:
    for most, taken in ((0, 0), (3, 0), (5, 3), (0, 8)):
        source = Sampled(range(8))
        stream = EpochStream(source, Reader(), count=8)
        stream.read(Reader(), itertools.islice(source, taken, taken + most))
        with pytest.raises(RuntimeError, match="please report"):
            list(stream)
        assert list(stream) == []


class Source:
    """Raises an error in place of some minibatches. Nothing else refers to an error."""

    def __init__(self, count: int, failed: tuple[int, ...]) -> None:
        self._step, self._count, self._failed = -1, count, failed

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self._step += 1
        if self._step == self._count:
            raise StopIteration
        if self._step in self._failed:
            raise StorageError(5, "cannot read the topology", "indices.npy", self._step)
        return {"paper.feat": torch.tensor([self._step])}


@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize("what", ["source", "ids"])
@pytest.mark.parametrize("failed", [(0, 1), (3, 4, 9), tuple(range(10))], ids=str)
def test_a_storage_error_concerns_one_minibatch(
    path: Path, reads: Any, what: str, failed: tuple[int, ...]
) -> None:
    def ids_of(ids: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if what == "ids" and (step := int(ids["paper.feat"])) in failed:
            raise StorageError(5, "cannot read the order", "order.npy", step)
        return ids

    with gids.open(path, memory="16MB", window=4, reads=reads) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        source_of_ids: Any = Source(10, failed if what == "source" else ())
        stream = loader.attach(source_of_ids, ids_of, count=10)
        for step in range(10):
            if step in failed:
                with pytest.raises(StorageError) as caught:
                    next(stream)
                assert caught.value.offset == step
            else:
                assert next(stream)[0]["paper.feat"].item() == step
        assert list(stream) == []


@pytest.mark.parametrize("tables", [None, []])
@pytest.mark.parametrize("bulk", [1, 4])
def test_a_node_loader_goes_on_after_a_storage_error_of_its_sampler(
    path: Path, tables: Any, bulk: int
) -> None:
    class Failing(Neighbor):
        def sample(self, topology: Any, seeds: Any, *, step: int, **numbers: Any) -> Any:
            if step in (0, 5, 6):
                raise StorageError(5, "cannot read the topology", "indices.npy", step)
            return super().sample(topology, seeds, step=step, **numbers)

        def sample_bulk(self, topology: Any, seeds: Any, *, first_step: int, **numbers: Any) -> Any:
            return [self.sample(topology, s, step=t, **numbers) for t, s in enumerate(seeds, first_step)]

    with gids.open(path, memory="16MB", window=4) as source:
        options: dict[str, Any] = {"batch_size": 100, "tables": tables}
        seeds = {"paper": torch.arange(900)}
        expected = list(gids.NodeLoader(source, seeds, Neighbor([3]), **{"seed": 0} | options))
        loader = gids.NodeLoader(source, seeds, Failing([3]), **{"seed": 0} | options)
        loader._step_sampling = loader._step_sampling._replace(bulk=bulk)
        epoch = iter(loader)
        for step, minibatch in enumerate(expected):
            if step in (0, 5, 6):
                with pytest.raises(StorageError):
                    next(epoch)
            else:
                assert torch.equal(next(epoch).input_nodes["paper"], minibatch.input_nodes["paper"])
            assert loader.state_dict()["step"] == (step + 1) % len(expected)
        assert list(epoch) == []


@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize("tables", [None, []])
def test_closing_from_another_thread_waits_for_the_minibatch_under_way(
    path: Path, reads: Any, tables: Any
) -> None:
    """The epoch, its loader, or the source, of which another epoch is open."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Neighbor):
        def sample(self, topology: Any, seeds: Any, *, step: int, **numbers: Any) -> Any:
            if step == 2 and threading.current_thread() is not threading.main_thread():
                entered.set()
                assert go_on.wait(60)
            return super().sample(topology, seeds, step=step, **numbers)

    taken: list[Any] = []

    def consume(epoch: Any) -> None:
        try:
            taken.extend(len(minibatch.seeds["paper"]) for minibatch in epoch)
        except BaseException as error:
            taken.append(error)

    for closed in ("epoch", "loader", "source"):
        entered.clear()
        go_on.clear()
        taken.clear()
        with gids.open(path, memory="16MB", window=4, threads=1, reads=reads) as source:
            seeds = {"paper": torch.arange(1500)}
            loader = gids.NodeLoader(source, seeds, Slow([3]), batch_size=100, tables=tables, seed=0)
            if closed == "source":
                next(other := iter(loader))
            epoch = iter(loader)
            consumer = threading.Thread(target=consume, args=(epoch,))
            consumer.start()
            assert entered.wait(60)
            close = {"epoch": epoch.close, "loader": loader.close, "source": source.close}[closed]
            closer = threading.Thread(target=close)
            closer.start()
            go_on.set()
            closer.join(60)
            consumer.join(60)
            assert not closer.is_alive()
            assert not consumer.is_alive()
            assert taken == [100] * len(taken)
            assert list(epoch) == []
            if closed == "source":
                assert list(other) == []
                with pytest.raises(ValueError, match="closed"):
                    iter(loader)


def test_the_count_of_attach_is_checked(path: Path) -> None:
    with gids.open(path, memory="16MB") as source:
        loader = gids.FeatureLoader(source, TABLES)
        with pytest.raises(RuntimeError, match="has 4 minibatches, and its source ended after 3"):
            list(loader.attach(minibatches(3), lambda ids: ids, count=4))
        assert len(list(loader.attach(minibatches(3), lambda ids: ids, count=3))) == 3


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_a_stream_that_raised_an_error_ends_when_it_is_dropped(path: Path, reads: Any) -> None:
    """The error refers to frames of the stream; nothing of the stream may refer to the error."""
    with gids.open(path, memory="16MB", window=4, reads=reads) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        gc.collect()
        gc.disable()
        try:
            for first in (0, 3):
                stream = loader.attach(Source(100, (first,)), lambda ids: ids)  # type: ignore[arg-type]
                raised = False
                try:
                    list(stream)
                except StorageError:
                    raised = True
                assert raised
                dropped = weakref.ref(stream)
                del stream
                assert dropped() is None
                assert not loader.has_open_epoch
        finally:
            gc.enable()


@dataclass(frozen=True)
class FrozenError(Exception):
    """An error whose attributes cannot be set."""

    step: int


class FailingSource(Source):
    """Raises an error of this kind after three minibatches."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, ())
        self._kind = kind

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._step < 2:
            return super().__next__()
        if self._kind == "frozen":
            raise FrozenError(3)
        try:
            raise ValueError("no more")
        except ValueError as error:
            if self._kind == "alone":
                raise
            errors = [error]
        raise ExceptionGroup("no more", errors)


@pytest.mark.parametrize("kind", ["alone", "group", "frozen"])
def test_a_stream_that_holds_an_error_ends_when_it_is_dropped(path: Path, kind: str) -> None:
    """The error of a source, sampled ahead and not due."""
    with gids.open(path, memory="16MB", window=8) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        gc.collect()
        gc.disable()
        try:
            stream = loader.attach(FailingSource(kind), lambda ids: ids)
            next(stream)
            next(stream)
            dropped = weakref.ref(stream)
            del stream
            assert dropped() is None
            assert not loader.has_open_epoch
        finally:
            gc.enable()


@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize("kind", ["alone", "group", "frozen"])
def test_an_error_that_was_met_ahead_is_itself_and_says_where_it_was_raised(
    path: Path, reads: Any, kind: str
) -> None:
    classes = {"alone": ValueError, "group": ExceptionGroup, "frozen": FrozenError}
    with gids.open(path, memory="16MB", window=8, reads=reads) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        stream = loader.attach(FailingSource(kind), lambda ids: ids)
        assert [int(next(stream)[0]["paper.feat"]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(classes[kind]) as caught:
            next(stream)
        (note,) = caught.value.__notes__
        assert "in __next__" in note
        assert not loader.has_open_epoch
        assert list(stream) == []


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_an_error_that_the_user_handles_meanwhile_keeps_its_frames(path: Path, reads: Any) -> None:
    """The error of the source has it as its context."""
    with gids.open(path, memory="16MB", window=8, reads=reads) as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        try:
            raise KeyError("mine")
        except KeyError as mine:
            frames = mine.__traceback__
            with pytest.raises(ValueError, match="no more") as caught:
                list(loader.attach(FailingSource("alone"), lambda ids: ids))
            kept = mine.__traceback__ is frames
        assert kept
        assert isinstance(caught.value.__context__, KeyError)


def test_a_forked_child_closes_what_a_thread_of_its_parent_samples(path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[dict[str, torch.Tensor]]:
        entered.set()
        assert go_on.wait(60)
        yield {"paper.feat": torch.arange(9)}

    with gids.open(path, memory="16MB") as source:
        stream = gids.FeatureLoader(source, ["paper.feat"]).attach(slowly(), lambda ids: ids)
        consumer = threading.Thread(target=list, args=(stream,))
        consumer.start()
        assert entered.wait(60)
        try:
            ended(source.close)
        finally:
            go_on.set()
            consumer.join()


@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize("bad", [0, 5])
def test_a_generator_that_ended_with_its_error_does_not_end_the_epoch_in_silence(
    path: Path, reads: Any, bad: int
) -> None:
    def sampled() -> Iterator[dict[str, torch.Tensor]]:
        for step in range(40):
            if step == bad:
                raise StorageError(5, "cannot read the topology", "indices.npy", 0)
            yield {"paper.feat": torch.arange(step, step + 9)}

    with gids.open(path, memory="16MB", window=4, reads=reads) as source:
        stream = gids.FeatureLoader(source, ["paper.feat"]).attach(sampled(), lambda ids: ids, count=40)
        for _ in range(bad):
            next(stream)
        with pytest.raises(StorageError):
            next(stream)
        with pytest.raises(RuntimeError, match=f"has 40 minibatches, and its source ended after {bad + 1}"):
            next(stream)
        with pytest.raises(ValueError, match="count=-1"):
            stream = gids.FeatureLoader(source, ["paper.feat"]).attach([], lambda ids: ids, count=-1)


def check_rows(loader: gids.NodeLoader, minibatch: Any) -> None:
    table = loader.store.table("paper.feat")
    nodes = minibatch.input_nodes["paper"]
    assert torch.equal(minibatch.features["paper.feat"], table.read_rows(nodes))


@pytest.fixture
def two_loaders(path: Path) -> Iterator[tuple[gids.NodeLoader, gids.NodeLoader]]:
    with gids.open(path, memory=16 << 20, window=4, tuning=gids.Tuning(planned=1)) as source:
        make = partial(gids.NodeLoader, source, sampler=[3], batch_size=20, tables=["paper.feat"], seed=0)
        with (
            make(seeds={"paper": torch.arange(200)}) as train,
            make(seeds={"paper": torch.arange(200, 330)}) as val,
        ):
            yield train, val


def test_iterators_that_are_new_or_at_their_end_do_not_hold_the_window(
    two_loaders: tuple[gids.NodeLoader, gids.NodeLoader], caplog: pytest.LogCaptureFixture
) -> None:
    train, val = two_loaders
    untouched, by_length = iter(val), iter(val)
    for _ in range(len(val)):  # never asked for one more
        check_rows(val, next(by_length))
    assert not train.feature_loader.has_open_epoch
    list(train)
    assert "another iterator" not in caplog.text
    assert len(list(untouched)) == len(val)
    assert next(by_length, None) is None


def test_the_iterator_that_began_last_has_the_window_and_gives_it_back(
    two_loaders: tuple[gids.NodeLoader, gids.NodeLoader], caplog: pytest.LogCaptureFixture
) -> None:
    train, val = two_loaders
    outer = iter(train)

    def ahead() -> int:
        """Minibatches that were read with lookahead."""
        return int(train.feature_loader.stats()["tables"]["paper.feat"]["steps"])

    check_rows(train, next(outer))
    check_rows(train, next(outer))
    inner = iter(val)
    check_rows(val, next(inner))
    before = ahead()
    check_rows(train, next(outer))  # without lookahead
    assert ahead() == before
    assert "another iterator of another loader of this source is open" in caplog.text
    for minibatch in inner:
        check_rows(val, minibatch)
    before, rest = ahead(), 3
    for minibatch in outer:
        check_rows(train, minibatch)
        rest += 1
    assert rest == len(train)
    assert ahead() - before == rest - 3
    assert caplog.text.count("another iterator") == 1


def test_an_open_iterator_keeps_the_memory_from_loaders_of_other_tables(path: Path) -> None:
    """Also while another one has the window, and after that one's end."""
    with gids.open(path, memory=16 << 20, window=4) as source:
        make = partial(gids.NodeLoader, source, {"paper": torch.arange(200)}, [3], batch_size=20, seed=0)
        first, second, other = (
            make(tables=["paper.feat"]),
            make(tables=["paper.feat"]),
            make(tables=["author.feat"]),
        )
        outer, inner = iter(first), iter(second)
        next(outer)
        next(inner)
        inner.close()
        with pytest.raises(gids.MemoryBudgetError, match="has an open epoch"):
            next(iter(other))
        assert len(list(outer)) == len(first) - 1
        assert len(list(other)) == len(other)


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_sampler_may_read_rows_by_another_loader_of_the_same_tables(
    two_loaders: tuple[gids.NodeLoader, gids.NodeLoader], at: int
) -> None:
    train, val = two_loaders

    class Reading(Neighbor):
        def sample(self, topology: Any, seeds: Any, *, step: int, **numbers: Any) -> Any:
            if step == at:
                for minibatch in val:
                    check_rows(val, minibatch)
            return super().sample(topology, seeds, step=step, **numbers)

    train.sampler = Reading([3])
    train._step_sampling = train._step_sampling._replace(bulk=1)
    seeds = []
    for minibatch in train:
        check_rows(train, minibatch)
        seeds += minibatch.seeds["paper"].tolist()  # type: ignore[call-overload]
    assert seeds == list(range(200))


def test_reads_that_a_close_cancels_are_no_failures(path: Path) -> None:
    for _ in range(100):  # until a close finds reads that wait
        with gids.open(path, memory=16 << 20, window=4, tuning=gids.Tuning(queue_depth=2)) as source:
            loader = gids.NodeLoader(source, {"paper": torch.arange(200)}, [5], batch_size=20, seed=0)
            epoch = iter(loader)
            next(epoch), next(epoch)
            epoch.close()
            stats = loader.stats()
        assert stats["failures"] == 0
        if stats["misses"] > stats["pages_read"]:
            return
    pytest.fail("no close has cancelled a read")


@pytest.mark.slow
def test_an_iterator_may_be_dropped_in_another_thread_while_the_next_one_begins(
    two_loaders: tuple[gids.NodeLoader, gids.NodeLoader],
) -> None:
    train, _ = two_loaders
    for _ in range(15):
        epoch = iter(train)
        for _ in range(4):
            next(epoch)
        held, ready = [epoch], threading.Event()
        del epoch
        thread = threading.Thread(target=lambda held=held, ready=ready: (ready.wait(), held.clear()))  # type: ignore[misc]
        thread.start()
        ready.set()
        for minibatch in train:
            check_rows(train, minibatch)
        thread.join()


def test_an_iterator_that_is_dropped_just_before_the_next_one_begins_is_waited_for(
    path: Path, source: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end forgets all that entered the cache."""
    closing, go_on, close = threading.Event(), threading.Event(), CacheReader.close

    def close_slowly(reader: CacheReader) -> None:
        closing.set()
        go_on.wait(20)
        close(reader)

    with gids.open(path, memory="16MB", window=4) as opened, gids.FeatureLoader(opened, TABLES) as loader:
        held = [loader.attach(minibatches(6), ids_of)]
        next(held[0])
        thread, wait = threading.Thread(target=held.clear), loader._end_dropped

        def wait_and_drop() -> bool:
            if not held:
                go_on.set()
                return wait()
            closed = wait()
            with monkeypatch.context() as patch:
                patch.setattr(CacheReader, "close", close_slowly)
                thread.start()
                closing.wait(20)
            return closed

        monkeypatch.setattr(loader, "_end_dropped", wait_and_drop)
        for number, (minibatch, features) in enumerate(loader.attach(minibatches(6, 1), ids_of)):
            check(source, minibatch, features)
            if number == 2:  # others are being read
                go_on.set()
                thread.join(20)
