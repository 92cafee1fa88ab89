"""EpochStream: no epoch ends early in silence; an error comes when its minibatch is due, and ends the epoch;
one epoch has the window."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import ended
from loader_example import TABLES, Ids, check, ids_of, minibatches

import gids
from gids.errors import StorageError
from gids.sampler import Neighbor

OVER = r"ended this epoch after {} of {} minibatches: begin it again, or resume it"


def one_row_each(count: int) -> Iterator[Ids]:
    """Minibatches until an error."""
    for step in range(count):
        yield {"paper.feat": torch.tensor([step])}
    raise StorageError(5, "cannot read the topology", "indices.npy", count)


@pytest.fixture
def opened(path: Path) -> Iterator[gids.Source]:
    with gids.open(path, memory="16MB", window=4) as source:
        yield source


@pytest.mark.parametrize(("what", "at"), [("source", 0), ("source", 9), ("ids", 3)])
def test_an_error_is_raised_when_its_minibatch_is_due_and_ends_the_epoch(
    opened: gids.Source, what: str, at: int
) -> None:
    def ids_of(ids: Ids) -> Ids:
        if what == "ids" and int(ids["paper.feat"]) == at:
            raise StorageError(5, "cannot read the order", "order.npy", at)
        return ids

    loader = gids.FeatureLoader(opened, ["paper.feat"])
    stream = loader.attach(one_row_each(at if what == "source" else 100), ids_of, count=10)
    for step in range(at):
        assert next(stream)[0]["paper.feat"].item() == step
    with pytest.raises(StorageError) as caught:
        next(stream)
    assert caught.value.offset == at
    if what == "source" and at:
        (note,) = caught.value.__notes__
        assert "in one_row_each" in note, "where it was raised"
    assert not loader.has_open_epoch
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an error " + OVER.format(at, 10)):
            next(stream)


@pytest.mark.parametrize(
    ("tables", "threads", "kind"),
    [(None, 2, StorageError), ([], 1, StorageError), (None, 2, KeyboardInterrupt)],
)
def test_a_state_after_an_error_or_ctrl_c_resumes_with_the_minibatch_that_failed(
    path: Path, tables: Any, threads: int, kind: type[BaseException]
) -> None:
    """An error comes when its minibatch is due, Ctrl-C at once."""
    fails = False

    class Failing(Neighbor):
        def sample(self, topology: Any, seeds: Any, *, step: int, **numbers: Any) -> Any:
            if step == 6 and fails:
                raise kind(5, "cannot read the topology", "indices.npy")
            return super().sample(topology, seeds, step=step, **numbers)

        def sample_bulk(self, topology: Any, seeds: Any, *, first_step: int, **numbers: Any) -> Any:
            return [self.sample(topology, s, step=t, **numbers) for t, s in enumerate(seeds, first_step)]

    with gids.open(path, memory="16MB", window=8) as source:

        def make() -> gids.NodeLoader:
            sampler = Failing([3], threads=threads)
            seeds = {"paper": torch.arange(900)}
            return gids.NodeLoader(source, seeds, sampler, batch_size=100, tables=tables, seed=0)

        expected = [minibatch.input_nodes["paper"] for minibatch in make()]
        loader, received, fails = make(), [], True
        epoch = iter(loader)
        with pytest.raises(kind):
            received.extend(minibatch.input_nodes["paper"] for minibatch in epoch)
        assert len(received) == 6 or (kind is KeyboardInterrupt and len(received) < 6)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=OVER.format(len(received), 9)):
                next(epoch)
        other, fails = make(), False
        other.load_state_dict(loader.state_dict())
        received.extend(minibatch.input_nodes["paper"] for minibatch in other)
        assert len(received) == 9
        assert all(map(torch.equal, expected, received))
        assert len(list(loader)) == 9


def test_ctrl_c_while_rows_are_read_leaves_the_next_epoch_right(opened: gids.Source, source: Ids) -> None:
    """At any call of gids within next()."""
    left = 0

    def interrupt(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and frame.f_globals["__name__"].startswith("gids."):
            left -= 1
            if not left:
                raise KeyboardInterrupt

    loader, done = gids.FeatureLoader(opened, TABLES), 0
    for calls in range(1, 800, 73):
        stream, left = loader.attach(minibatches(9), ids_of), calls
        interrupted = False
        while not interrupted:
            sys.setprofile(interrupt)
            try:
                minibatch, features = next(stream)
            except KeyboardInterrupt:
                interrupted = True
            except StopIteration:
                break
            finally:
                sys.setprofile(None)
            if not interrupted:
                check(source, minibatch, features)
        if interrupted:
            done += 1
            with suppress(RuntimeError, StopIteration):  # or it was interrupted before it began
                check(source, *next(stream))
        for minibatch, features in loader.attach(minibatches(4, calls), ids_of):
            check(source, minibatch, features)
    assert done > 8


def test_the_count_of_attach_is_checked(opened: gids.Source) -> None:
    loader = gids.FeatureLoader(opened, TABLES)
    stream = loader.attach(minibatches(3), ids_of, count=4)
    assert [next(stream) for _ in range(3)]
    with pytest.raises(RuntimeError, match="has 4 minibatches, and its source ended after 3"):
        next(stream)
    assert len(list(loader.attach(minibatches(3), ids_of, count=3))) == 3
    with pytest.raises(ValueError, match="count=-1"):
        loader.attach([], ids_of, count=-1)


def test_a_stream_that_holds_an_error_ends_when_it_is_dropped(opened: gids.Source) -> None:
    """The error of a source, sampled ahead and not due."""
    loader = gids.FeatureLoader(opened, ["paper.feat"])
    gc.collect()
    gc.disable()
    try:
        stream = loader.attach(one_row_each(4), ids_of)
        next(stream)
        next(stream)
        dropped = weakref.ref(stream)
        del stream
        assert dropped() is None
        assert not loader.has_open_epoch
    finally:
        gc.enable()


def test_a_forked_child_opens_its_own_source(opened: gids.Source, path: Path) -> None:
    loader = gids.FeatureLoader(opened, TABLES)
    epoch = iter(gids.NodeLoader(opened, {"paper": torch.arange(99)}, [3], batch_size=9, tables=[]))
    stream = loader.attach(minibatches(9), ids_of)
    next(stream)
    next(epoch)

    def use() -> None:
        for use in (lambda: next(stream), lambda: next(epoch), lambda: next(loader.attach([{}], ids_of))):
            with pytest.raises(RuntimeError, match="a forked child opens its own source"):
                use()
        with gids.open(path, memory="16MB") as own:
            assert len(list(gids.FeatureLoader(own, TABLES).attach(minibatches(3), ids_of))) == 3
        loader.close()  # which the parent does not notice

    ended(use)
    assert len(list(stream)) == 8
    assert len(list(epoch)) == 10


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
    assert len(list(untouched)) == len(val)
    assert next(by_length, None) is None
    for _ in val:
        break
    list(train)
    assert not caplog.records


def test_the_epoch_that_began_last_has_the_window_and_the_other_one_goes_on_without_look_ahead(
    two_loaders: tuple[gids.NodeLoader, gids.NodeLoader], caplog: pytest.LogCaptureFixture
) -> None:
    train, val = two_loaders
    outer = iter(train)

    def ahead() -> int:
        """Minibatches that were read with look-ahead."""
        return int(train.stats()["tables"]["paper.feat"]["steps"])

    check_rows(train, next(outer))
    check_rows(train, next(outer))
    before = ahead()
    for minibatch in val:
        check_rows(val, minibatch)
    assert ahead() - before >= len(val)
    assert not caplog.records
    before, rest = ahead(), 2
    for minibatch in outer:
        check_rows(train, minibatch)
        rest += 1
    assert rest == len(train)
    assert ahead() == before
    [said] = [r.getMessage() for r in caplog.records]
    assert "for a validation in the middle of an epoch open a second source with its own memory" in said
    before = ahead()
    list(train)
    assert ahead() - before == len(train)


def test_a_sampler_may_read_rows_by_another_loader_of_the_same_tables(
    two_loaders: tuple[gids.NodeLoader, gids.NodeLoader],
) -> None:
    train, val = two_loaders

    class Reading(Neighbor):
        def sample(self, topology: Any, seeds: Any, *, step: int, **numbers: Any) -> Any:
            if step == 4:
                for minibatch in val:
                    check_rows(val, minibatch)
            return super().sample(topology, seeds, step=step, **numbers)

    train.sampler = Reading([3], threads=1)
    seeds = []
    for minibatch in train:
        check_rows(train, minibatch)
        seeds += minibatch.seeds["paper"].tolist()  # type: ignore[call-overload]
    assert seeds == list(range(200))
