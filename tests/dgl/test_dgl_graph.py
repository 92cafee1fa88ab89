"""gids.dgl.graph: the store's topology as a DGLGraph."""

import dgl_model as model
import pytest
import torch

import gids.dgl


@pytest.mark.parametrize("dataset", ["homogeneous", "heterogeneous"], indirect=True)
def test_it_is_the_graph_that_was_stored(dataset):
    g = gids.dgl.graph(dataset.store)
    assert sorted(g.ntypes) == sorted(dataset.graph.ntypes)
    assert sorted(g.canonical_etypes) == sorted(dataset.graph.canonical_etypes)
    for node_type in g.ntypes:
        assert g.num_nodes(node_type) == dataset.graph.num_nodes(node_type)
    for relation in g.canonical_etypes:
        every = torch.arange(g.num_nodes(relation[2]))
        ours = g[relation].in_edges(every, form="all")
        theirs = dataset.graph[relation].in_edges(every, form="all")
        assert sorted(zip(*(x.tolist() for x in ours), strict=True)) == sorted(
            zip(*(x.tolist() for x in theirs), strict=True)
        )
    for node_type, labels in dataset.store.labels.items():
        assert torch.equal(g.nodes[node_type].data["label"], labels)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", ["homogeneous", "heterogeneous"], indirect=True)
def test_it_trains_without_any_other_format(dataset, num_workers):
    g = gids.dgl.graph(dataset.store)
    loader = gids.dgl.DataLoader(
        g,
        dataset.seeds,
        model.node_sampler("neighbor", dataset),
        gids=dataset.store,
        batch_size=32,
        num_workers=num_workers,
    )
    assert model.assert_rows_equal_source(list(loader), dataset)
    assert g.formats() == {"created": ["csc"], "not created": []}
    loader.close()


def test_other_formats_are_made_where_they_are_allowed(homogeneous):
    g = gids.dgl.graph(homogeneous.store, formats=["csc", "coo"])
    indices, sampler = model.make("edge", homogeneous, None)
    loader = gids.dgl.DataLoader(g, indices, sampler, gids=homogeneous.store, batch_size=30)
    assert model.assert_rows_equal_source(list(loader), homogeneous)
    with pytest.raises(ValueError, match="'csc' must be among them"):
        gids.dgl.graph(homogeneous.store, formats="coo")


def test_splits_become_masks_when_asked_for(homogeneous):
    assert set(gids.dgl.graph(homogeneous.store).ndata) == {"label"}
    g = gids.dgl.graph(homogeneous.store, masks=True)
    for name, ids in homogeneous.store.splits["_N"].items():
        assert g.ndata[f"{name}_mask"].dtype == torch.bool
        assert torch.equal(g.ndata[f"{name}_mask"].nonzero().squeeze(1), ids.sort().values)
