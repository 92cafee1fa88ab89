"""Packs with samplers and objects of other people: every minibatch has its own rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_in_edges, same_bits
from packs_example import cut_small
from test_spool import UNFIT, Raises, TwoArguments

import gids
from gids.sampler import Neighbor
from gids.write import DatasetWriter

NODES = 1500


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One node type, whose features tell the node."""
    path = tmp_path_factory.mktemp("foreign") / "one.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "n", "x", torch.arange(NODES * 16.0).reshape(NODES, 16))
        writer.write_graph(("n", "e", "n"), *random_in_edges(NODES, NODES, 8 * NODES), num_src=NODES)
    return path


class Random:
    """A user's sampler, which draws other neighbors each time."""

    def __init__(self) -> None:
        self.own = Neighbor([4, 4])

    def sample(self, topology: Any, seeds: Any, **numbers: int) -> Any:
        return self.own.sample(topology, seeds, seed=int(torch.randint(1 << 40, ())))


def test_a_random_sampler(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch, minibatches=7)
    with gids.open(one, memory="16MB", reads="pack", window=4) as source:
        loader = gids.NodeLoader(source, torch.arange(NODES), Random(), batch_size=50, shuffle=True, seed=0)
        for minibatch in [*loader, *loader]:
            assert torch.equal(minibatch.features["n.x"][:, 0], minibatch.input_nodes * 16.0)
        assert loader.stats()["packs"]["minibatches"] == 2 * len(loader)


def test_weights_that_change_in_place(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch, minibatches=7)
    with gids.open(one, memory="16MB", reads="pack", window=4) as source:
        weights = torch.rand(source.graphs()[0].num_edges) + 0.1
        sampler = Neighbor([4, 4], weights=weights)
        loader = gids.NodeLoader(source, torch.arange(NODES), sampler, batch_size=50, seed=0)
        for minibatch in loader:
            assert torch.equal(minibatch.features["n.x"][:, 0], minibatch.input_nodes * 16.0)
            weights.copy_(torch.rand_like(weights) + 0.1)
        assert loader.stats()["packs"]["minibatches"] == len(loader)


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda unfit: type(unfit).__name__)
@pytest.mark.parametrize("first", [0, 1, 9])
def test_minibatches_that_do_not_come_back_are_read_at_random(
    one: Path, unfit: Any, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [torch.arange(i, i + 50) for i in range(20)]
    batches = [(rows, unfit if i >= first else None) for i, rows in enumerate(ids)]
    with gids.open(one, memory="16MB", reads="pack", window=4) as source:
        loader = gids.FeatureLoader(source, ["n.x"])
        stream = loader.attach(batches, lambda minibatch: {"n.x": minibatch[0]}, count=len(batches))
        for batch, (minibatch, features) in zip(batches, stream, strict=True):
            assert torch.equal(batch[0], minibatch[0])
            assert minibatch[1] is batch[1]
            assert same_bits(features["n.x"][:, 0], batch[0] * 16.0)
        assert loader.stats()["packs"]["minibatches"] == first
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "pickle" in warning


@pytest.mark.parametrize(
    "error",
    [TwoArguments("a", "b"), KeyError("k"), Raises(ValueError)],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("bad", [0, 5, 12])
def test_an_error_of_a_sampler_stays_what_it_is(
    one: Path, error: Any, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a framework's epoch, which goes on after it."""
    from gids.loader.framework_epoch import FrameworkEpoch
    from gids.loader.learned import Learned

    cut_small(monkeypatch, minibatches=7)
    raised = error if isinstance(error, Exception) else RuntimeError(error)

    class Source:
        step = -1

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> torch.Tensor:
            self.step += 1
            if self.step == bad:
                raise raised
            if self.step == 20:
                raise StopIteration
            return torch.arange(self.step, self.step + 40)

    with gids.open(one, memory="16MB", reads="pack", window=4) as source:
        loader = gids.FeatureLoader(source, ["n.x"])
        epoch = FrameworkEpoch(
            loader,
            Source(),
            lambda ids: {"n.x": ids},
            bytes_of=lambda ids: ids.nbytes,
            in_workers=False,
            learned=Learned(),
        )
        for step in range(20):
            if step == bad:
                with pytest.raises(type(raised)) as caught:
                    next(epoch)
                assert caught.value is raised
            else:
                ids, features = next(epoch)
                assert ids[0] == step
                assert same_bits(features["n.x"][:, 0], ids * 16.0)
        assert next(epoch, None) is None
        assert loader.stats()["packs"]["minibatches"] == 20 - (bad == 0)


class Batch:
    """Pickles without its extra rows."""

    def __init__(self, step: int, *, extra: bool) -> None:
        self.step, self.extra = step, torch.arange(100, 110) if extra else None

    def __getstate__(self) -> Any:
        return self.__dict__ | {"extra": None}

    def rows(self) -> torch.Tensor:
        own = torch.arange(self.step, self.step + 5)
        return own if self.extra is None else torch.cat([own, self.extra])


def test_a_later_minibatch_that_changes_is_read_at_random(
    one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [Batch(step, extra=step > 10) for step in range(20)]
    with gids.open(one, memory="16MB", reads="pack", window=4) as source:
        loader = gids.FeatureLoader(source, ["n.x"])
        stream = loader.attach(batches, lambda batch: {"n.x": batch.rows()}, count=20)
        for step, (batch, features) in enumerate(stream):
            assert batch.step == step
            assert torch.equal(features["n.x"][:, 0], batches[step].rows() * 16.0)
        assert step == 19
        assert loader.stats()["packs"]["minibatches"] == 11
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "reads other rows" in warning


def test_attributes_of_tensors_come_back(one: Path) -> None:
    def tagged(step: int) -> torch.Tensor:
        ids = torch.arange(step, step + 5)
        ids.tag = step  # type: ignore[attr-defined]
        return ids

    with gids.open(one, memory="16MB", reads="pack", window=4) as source:
        loader = gids.FeatureLoader(source, ["n.x"])
        stream = loader.attach(map(tagged, range(10)), lambda ids: {"n.x": ids}, count=10)
        assert [ids.tag for ids, _ in stream] == list(range(10))  # type: ignore[attr-defined]
        assert loader.stats()["packs"]["minibatches"] == 10
