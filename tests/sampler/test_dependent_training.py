"""Models learn as well from dependent minibatches, and from those with a locality bias, as from others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gids.convert.synthetic import GraphSpec
from gids.heat import hottest_nodes
from gids.sampler import Labor, LocalityBias, Neighbor, Sampler
from gids.store import FeatureStore

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from graphs import make_dataset
from training import FANOUTS, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

WITHIN = 0.05  # two standard deviations of the difference of two shares of 800 test nodes
CACHE_BYTES = 50_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    spec = GraphSpec(3000, degree=12, dim=32, classes=8, train_count=1600, val_count=0, test_count=800)
    return make_dataset(tmp_path_factory.mktemp("training"), spec, "--page-bytes", "512")


def accuracy(store: FeatureStore, sampler: Sampler) -> float:
    found = train(store, sampler, epochs=2, batch_size=16, seed=1, cache_bytes=CACHE_BYTES).accuracy
    print(f"{sampler}: {found:.3f}")
    return found


def test_accuracy_does_not_depend_on_kappa_and_factor(store: FeatureStore) -> None:
    independent = accuracy(store, Neighbor(FANOUTS))
    assert independent > 0.7  # a row alone tells the class in half of the cases
    held = hottest_nodes(store, "_N.feat", CACHE_BYTES)
    others: list[Sampler] = [
        *(Neighbor(FANOUTS, batch_dependency=kappa) for kappa in (16, 256)),
        *(Labor(FANOUTS, batch_dependency=kappa) for kappa in (1, 16, 256)),
        *(Labor(FANOUTS, batch_dependency=kappa, nested=True) for kappa in (16, 256)),
        Neighbor(FANOUTS, locality=LocalityBias(held, 4)),
    ]
    for sampler in others:
        assert abs(accuracy(store, sampler) - independent) < WITHIN, sampler
