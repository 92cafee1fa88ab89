"""gids.dgl.graph: the store's topology as a DGLGraph."""

from pathlib import Path

import dgl_model as model
import numpy as np
import pytest
import torch

import gids.dgl
from gids.store import FeatureStore
from gids.write import DatasetWriter

import dgl  # isort: skip


def check_edges(ours, theirs):
    """Both graphs have the same edges, under the same ids."""
    for relation in theirs.canonical_etypes:
        every = torch.arange(theirs.num_nodes(relation[2]))
        triples = [
            sorted(zip(*(x.tolist() for x in g[relation].in_edges(every, form="all")), strict=True))
            for g in (ours, theirs)
        ]
        assert triples[0] == triples[1]


@pytest.mark.parametrize("dataset", ["homogeneous", "heterogeneous"], indirect=True)
def test_it_is_the_graph_that_was_stored(dataset):
    g = gids.dgl.graph(dataset.store)
    assert sorted(g.ntypes) == sorted(dataset.graph.ntypes)
    assert sorted(g.canonical_etypes) == sorted(dataset.graph.canonical_etypes)
    for node_type in g.ntypes:
        assert g.num_nodes(node_type) == dataset.graph.num_nodes(node_type)
    check_edges(g, dataset.graph)
    for node_type, labels in dataset.store.labels.items():
        assert torch.equal(g.nodes[node_type].data["label"], labels)


def test_it_trains_without_any_other_format(heterogeneous):
    """DGL makes every format that is allowed if there are workers."""
    g, sampler = gids.dgl.graph(heterogeneous.store), model.node_sampler("neighbor", heterogeneous)
    options = {"gids": heterogeneous.store, "batch_size": 100, "num_workers": 1}
    with gids.dgl.DataLoader(g, heterogeneous.seeds, sampler, **options) as loader:
        assert model.assert_rows_equal_source(list(loader), heterogeneous)
    assert g.formats() == {"created": ["csc"], "not created": []}


def test_other_formats_are_made_where_they_are_allowed(homogeneous):
    g = gids.dgl.graph(homogeneous.store, formats=["csc", "coo"])
    indices, sampler = model.make("edge", homogeneous, None)
    with gids.dgl.DataLoader(g, indices, sampler, gids=homogeneous.store, batch_size=30) as loader:
        assert model.assert_rows_equal_source(list(loader), homogeneous)


@pytest.mark.parametrize("index_dtype", ["int64", "int32"])
def test_int64_topology_is_mapped_and_int32_is_copied(tmp_path, index_dtype):
    nodes, degree = 10_000, 8
    with DatasetWriter(tmp_path / "large.gids") as writer:
        writer.add_nodes("_N", nodes)
        indices = np.random.default_rng(0).integers(0, nodes, nodes * degree)
        writer.write_graph(
            ("_N", "_E", "_N"), np.arange(nodes + 1) * degree, indices, index_dtype=index_dtype
        )
    g = gids.dgl.graph(FeatureStore(tmp_path / "large.gids"))
    assert is_mapped(g.adj_tensors("csc")[1], tmp_path) == (index_dtype == "int64")
    sources, destinations = g.in_edges(torch.arange(100))
    assert torch.equal(sources, torch.from_numpy(indices[: 100 * degree]))
    assert torch.equal(destinations, torch.arange(100).repeat_interleave(degree))


def is_mapped(tensor, folder):
    """Whether the values are those of a file in the folder, by the system's list of mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(folder) in line
    raise AssertionError("the tensor is nowhere in memory")


def test_dgl_may_sort_the_graph_and_the_files_stay_as_they_were(homogeneous):
    g = gids.dgl.graph(homogeneous.store)
    before = homogeneous.store.graph().indices.copy()
    dgl.sampling.global_uniform_negative_sampling(g, 100)  # sorts its rows in place
    assert np.array_equal(homogeneous.store.graph().indices, before)
    check_edges(g, homogeneous.graph)
