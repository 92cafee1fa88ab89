"""enable(): DGL's own class takes gids=."""

import dgl_model as model
import pytest

import gids.dgl

import dgl  # isort: skip
from dgl.dataloading import DataLoader  # before enable(), as user code has it

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")


@pytest.fixture
def enabled():
    gids.dgl.enable()
    yield
    gids.dgl.disable()


@pytest.fixture
def sampler(homogeneous):
    return model.node_sampler("neighbor", homogeneous)


def test_the_flag_works_on_dgls_class_however_it_was_imported(homogeneous, sampler, enabled):
    assert dgl.dataloading.DataLoader is DataLoader
    loader = DataLoader(homogeneous.graph, homogeneous.seeds, sampler, batch_size=16, gids=homogeneous.path)
    assert type(loader) is DataLoader
    batches = list(loader)
    assert len(batches) == len(loader) == 7
    assert all(model.assert_rows_equal_source(batch, homogeneous) == 3 for batch in batches)
    assert loader.stats()
    loader.close()


def test_a_subclass_of_the_loader_reads_from_the_store(homogeneous, sampler, enabled):
    class Mine(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, batch_size=16, **kwargs)

    loader = Mine(homogeneous.graph, homogeneous.seeds, sampler, gids=homogeneous.path)
    assert isinstance(loader, dgl.dataloading.DataLoader)
    assert model.assert_rows_equal_source(list(loader), homogeneous) == 3 * 7
    ours = gids.dgl.DataLoader(homogeneous.graph, homogeneous.seeds, sampler, gids=homogeneous.path)
    assert isinstance(ours, dgl.dataloading.DataLoader)
    assert model.assert_rows_equal_source(next(iter(ours)), homogeneous) == 3


def test_without_the_flag_it_is_stock(homogeneous, sampler):
    def epoch(loader):
        return model.epochs(loader)[0]

    before = DataLoader(homogeneous.full, homogeneous.seeds, sampler, batch_size=16)
    reference = epoch(before)
    gids.dgl.enable()
    try:
        during = DataLoader(
            homogeneous.full, homogeneous.seeds, sampler, batch_size=16, gids=None, gids_feats=None
        )
        for loader in (before, during):
            for a, b in zip(epoch(loader), reference, strict=True):
                model.assert_same(a, b)
    finally:
        gids.dgl.disable()
    for a, b in zip(epoch(during), reference, strict=True):
        model.assert_same(a, b)


def test_disable_undoes_any_number_of_enables(homogeneous, sampler):
    attributes = dict(vars(DataLoader))
    gids.dgl.enable()
    gids.dgl.enable()
    gids.dgl.disable()
    gids.dgl.disable()
    assert dict(vars(DataLoader)) == attributes
    with pytest.raises(TypeError, match="gids"):
        DataLoader(homogeneous.full, homogeneous.seeds, sampler, gids=homogeneous.path)
