"""Every DGL sampler: the very minibatches of stock DGL over features in memory, from a store."""

import dgl_model as model
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")

CASES = [("homogeneous", sampler, 0) for sampler in model.SAMPLERS]
CASES += [("heterogeneous", sampler, 0) for sampler in ("full", "edge-negative", "shadow")]
CASES += [("homogeneous", "neighbor", 1)]


@pytest.mark.parametrize(("dataset", "sampler", "num_workers"), CASES, indirect=["dataset"])
def test_minibatches_are_those_of_stock_dgl(dataset, sampler, num_workers, tmp_path):
    options = {
        "batch_size": 4 if sampler == "cluster" else 1 if sampler.startswith("saint") else 32,
        "shuffle": True,
        "num_workers": num_workers,
    }
    stock = model.epochs(model.stock_loader(dataset, *model.make(sampler, dataset, tmp_path), **options), 2)
    made = model.make(sampler, dataset, tmp_path)
    with model.gids_loader(dataset, *made, memory=32 << 20, **options) as loader:
        ours = model.epochs(loader, 2)
    assert [len(epoch) for epoch in ours] == [len(loader)] * 2
    for epoch, stock_epoch in zip(ours, stock, strict=True):
        for batch, stock_batch in zip(epoch, stock_epoch, strict=True):
            assert model.assert_rows_equal_source(batch, dataset) > 0
            model.assert_same(batch, stock_batch)
