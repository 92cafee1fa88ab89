"""What a loader learns about its epochs: its own, and not that of a validation of a few minibatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packs_example import assert_all_same, open_loader, open_source, take_over_at

import gids
from gids.loader import pack_chooser, pack_switch
from gids.loader.learned import Learned
from gids.packs import costs


@pytest.fixture
def _packs_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of any size count as large, and packs win from ten minibatches on."""
    monkeypatch.setattr(pack_switch, "LEAST_WAIT_S", 0.0)
    take_over_at(monkeypatch, 0)
    monkeypatch.setattr(gids.FeatureLoader, "may_use_packs", _may_use_packs)
    monkeypatch.setattr(pack_chooser, "_pays", lambda packed_s, random_s: random_s >= 1000)
    monkeypatch.setattr(pack_chooser.PackChooser, "choose_early", _early)
    monkeypatch.setattr(pack_chooser.PackChooser, "random_s", _random_s)


def _may_use_packs(self: Any, learned: Learned, count: int | None) -> bool:
    return not learned.random(count) and not self.has_open_epoch


def _random_s(self: Any, sampled: Any) -> float:
    return 1000.0 if len(sampled.spool) >= 10 else 0.0


def _early(self: Any, sampled: Any, count: int | None) -> bool:
    return False


OPTIONS = {"batch_size": 32}


def validation(source: gids.Source) -> gids.NodeLoader:
    return gids.NodeLoader(
        source,
        {"paper": torch.arange(30)},
        [4, 4],
        tables=list(source.store.tables),
        batch_size=16,
        seed=0,
    )


def ways(loader: gids.NodeLoader) -> list[str]:
    return [choice["way"] for choice in loader.stats()["packs"]["choices"]]


@pytest.mark.few(1)
@pytest.mark.usefixtures("_packs_pay")
@pytest.mark.parametrize("first", ["training", "validation", "sanity check"])
def test_training_is_read_by_packs_whatever_validation_is(
    path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    measure = costs._long_reads_per_s
    monkeypatch.setattr(costs, "_long_reads_per_s", lambda *a: (measured.append(1), measure(*a))[1])
    monkeypatch.setattr(costs, "_known", {})
    with open_source(path, "random") as source:
        loader = open_loader(source, **OPTIONS)
        expected = [list(loader) for _ in range(2)]
    with open_source(path, "auto") as source:
        train, valid = open_loader(source, **OPTIONS), validation(source)
        assert train.feature_loader is valid.feature_loader
        if first == "sanity check":
            epoch = iter(valid)
            next(epoch)
            epoch.close()
        elif first == "validation":
            assert len(list(valid)) == 2
        for epoch in expected:
            before = train.stats()["packs"]["minibatches"]
            assert_all_same(epoch, train)
            assert train.stats()["packs"]["minibatches"] == before + len(epoch)
            assert len(list(valid)) == 2
        assert "random" in ways(valid)
        assert set(ways(train)) == {"pack"}
        assert len(measured) == 1


@pytest.mark.usefixtures("_packs_pay")
def test_a_short_rest_of_an_epoch_says_nothing_about_whole_ones(path: Path) -> None:
    with open_source(path, "auto") as source:
        loader = open_loader(source, **OPTIONS)
        state = loader.state_dict()
        state["step"] = len(loader) - 2
        loader.load_state_dict(state)
        assert len(list(loader)) == 2
        assert ways(loader) == ["random"]
        assert len(list(loader)) == len(loader)
        assert loader.stats()["packs"]["minibatches"] == len(loader)
        before = ways(loader)
        loader.load_state_dict(state)
        assert len(list(loader)) == 2
        assert ways(loader) == before  # it is known to be too short


@pytest.mark.usefixtures("_packs_pay")
def test_epochs_of_unknown_length(path: Path) -> None:
    def epoch(count: int) -> list[dict[str, torch.Tensor]]:
        return [{"paper.feat": torch.arange(i, i + 400)} for i in range(count)]

    with open_source(path, "auto") as source:
        loader = gids.FeatureLoader(source, ["paper.feat"])
        minibatches = 0
        for count, by_packs in ((3, False), (40, False), (40, True), (3, False), (40, True)):
            assert len(list(loader.attach(epoch(count), lambda ids: ids))) == count
            minibatches += count if by_packs else 0
            assert loader.stats()["packs"]["minibatches"] == minibatches
