"""While an epoch is read by packs, the next one is prepared. Minibatches are right, whatever is changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from packs_example import assert_all_same, open_loader, open_source

import gids
from gids.sampler import Labor, Minibatch


@pytest.fixture
def loader(path: Path, epochs: list[list[Minibatch]]) -> Iterator[gids.NodeLoader]:
    """After two epochs, the second of which prepared the third."""
    with open_source(path, "pack") as source, open_loader(source) as loader:
        for epoch in epochs[:2]:
            assert_all_same(epoch, loader)
        yield loader


def test_another_epoch_is_set(loader: gids.NodeLoader, epochs: list[list[Minibatch]]) -> None:
    for epoch in (0, 3):
        loader.epoch = epoch
        assert_all_same(epochs[epoch], loader)


def test_a_validation_between_epochs_leaves_what_is_prepared(
    loader: gids.NodeLoader, epochs: list[list[Minibatch]]
) -> None:
    def written() -> int:
        return int(loader.stats()["packs"]["superbatches"])

    before = written()  # with the third epoch's, or it is still being prepared
    with open_loader(loader.source, every=50) as validation:
        for epoch in epochs[2:4]:
            list(validation)
            assert_all_same(epoch, loader)
    assert written() - before <= 2 + 2 + 1, "each epoch and each validation once, and the next epoch"


def test_another_sampler_is_set(path: Path, loader: gids.NodeLoader) -> None:
    with open_source(path, "random") as source, open_loader(source) as other:
        for changed in (loader, other):
            changed.sampler = Labor([4, 4])
        other.epoch = 2
        assert_all_same(other, loader)
