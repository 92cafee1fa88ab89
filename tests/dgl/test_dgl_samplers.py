"""Every DGL sampler: the very minibatches of stock DGL over features in memory, from a store."""

import dgl_model as model
import pytest

from gids.loader import pack_switch, sampled_ahead

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")

DATASETS = [("homogeneous", sampler) for sampler in model.SAMPLERS] + [
    ("heterogeneous", sampler) for sampler in [*model.BLOCK_SAMPLERS, "shadow"]
]


@pytest.fixture
def small_packs(monkeypatch):
    monkeypatch.setattr(pack_switch, "EARLY", 2)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", 3)


@pytest.mark.few(7)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize(("dataset", "sampler"), DATASETS, indirect=["dataset"])
def test_minibatches_are_those_of_stock_dgl(dataset, sampler, reads, num_workers, tmp_path, small_packs):
    """By packs, sampled minibatches are spooled."""
    options = {
        "batch_size": 4 if sampler == "cluster" else 1 if sampler.startswith("saint") else 16,
        "shuffle": True,
        "num_workers": num_workers,
    }
    stock = model.epochs(model.stock_loader(dataset, *model.make(sampler, dataset, tmp_path), **options), 2)
    made = model.make(sampler, dataset, tmp_path)
    loader = model.gids_loader(dataset, *made, memory=32 << 20, reads=reads, **options)
    ours = model.epochs(loader, 2)
    assert [len(epoch) for epoch in ours] == [len(loader)] * 2
    for epoch, stock_epoch in zip(ours, stock, strict=True):
        for batch, stock_batch in zip(epoch, stock_epoch, strict=True):
            assert model.assert_rows_equal_source(batch, dataset) > 0
            model.assert_same(batch, stock_batch)
    if reads == "pack":
        assert loader.stats()["packs"]["minibatches"] == 2 * len(loader)
    loader.close()


def test_leaving_an_epoch_of_packs_ends_the_workers_and_the_next_one_is_whole(homogeneous, small_packs):
    sampler = model.node_sampler("neighbor", homogeneous)
    options = {"batch_size": 8, "num_workers": 2, "memory": 32 << 20, "reads": "pack"}
    loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler, **options)
    for stop in (1, 4):
        for number, batch in enumerate(loader, start=1):
            assert model.assert_rows_equal_source(batch, homogeneous) > 0
            if number == stop:
                break
    assert len(list(loader)) == len(loader)
    loader.close()
