"""Every DGL sampler: the very minibatches of stock DGL over features in memory, from a store."""

import dgl_model as model
import pytest
import torch

import gids.dgl
from gids.sampler import Neighbor

import dgl  # isort: skip  (importable once gids.dgl is)
from dgl.dataloading import NeighborSampler

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")

DATASETS = [("homogeneous", sampler) for sampler in model.SAMPLERS] + [
    ("heterogeneous", sampler) for sampler in [*model.BLOCK_SAMPLERS, "shadow"]
]
CASES = [(*both, i % 2 * 2) for i, both in enumerate(DATASETS)]


@pytest.mark.few(7)
@pytest.mark.parametrize(("dataset", "sampler", "num_workers"), CASES, indirect=["dataset"])
def test_minibatches_are_those_of_stock_dgl(dataset, sampler, num_workers, tmp_path):
    options = {
        "batch_size": 4 if sampler == "cluster" else 1 if sampler.startswith("saint") else 16,
        "shuffle": True,
        "num_workers": num_workers,
    }
    stock = model.epochs(model.stock_loader(dataset, *model.make(sampler, dataset, tmp_path), **options), 2)
    made = model.make(sampler, dataset, tmp_path)
    loader = model.gids_loader(dataset, *made, memory=32 << 20, **options)
    ours = model.epochs(loader, 2)
    assert [len(epoch) for epoch in ours] == [len(loader)] * 2
    for epoch, stock_epoch in zip(ours, stock, strict=True):
        for batch, stock_batch in zip(epoch, stock_epoch, strict=True):
            assert model.assert_rows_equal_source(batch, dataset) > 0
            model.assert_same(batch, stock_batch)
    loader.close()


def test_edges_of_weight_0_are_never_sampled(homogeneous):
    """The meaning of DGL, and of gids.sampler.Neighbor. In gids.pyg they may be, as in PyG."""
    graph, stored = homogeneous.graph.clone(), homogeneous.store.graph()
    weights = (torch.arange(graph.num_edges()) % 3).float()  # by edge id
    graph.edata["w"] = weights
    in_order = weights[torch.tensor(stored.edge_ids)]
    nodes = torch.arange(graph.num_nodes())
    positive = torch.bincount(graph.edges()[1][weights > 0], minlength=len(nodes))
    for fanout in (-1, 2, 50):
        sampler = NeighborSampler([fanout], prob="w", prefetch_node_feats=["feat"])
        with gids.open(homogeneous.path) as source:
            [(_, _, [block])] = gids.dgl.DataLoader(graph, nodes, sampler, gids=source, batch_size=len(nodes))
        ours = Neighbor([fanout], weights=in_order).sample(stored, nodes).blocks[0]
        expected = positive if fanout == -1 else positive.clamp(max=fanout)
        for degrees, edges in (
            (block.in_degrees(), block.edata[dgl.EID]),
            (ours.indptr.diff(), ours.edge_ids),
        ):
            assert torch.equal(degrees, expected)
            assert (weights[edges] > 0).all()
