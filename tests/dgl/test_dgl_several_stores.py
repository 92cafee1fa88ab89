"""gids= with several datasets: every column is that of its own source, and what is unclear is refused."""

from dataclasses import replace

import dgl_model as model
import pytest
import torch
from dgl.dataloading import NeighborSampler, ShaDowKHopSampler, as_edge_prediction_sampler

import gids.dgl
from gids.store import FeatureStore
from gids.write import DatasetWriter

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")


def write_columns(path, graph, columns, **options):
    """A dataset of columns without topology."""
    with DatasetWriter(path, **options) as writer:
        for node_type in graph.ntypes:
            writer.add_nodes(node_type, graph.num_nodes(node_type))
        for (kind, type_, key), rows in columns.items():
            writer.write_table(kind, type_, key, rows)
    return path


@pytest.fixture
def several(dataset, tmp_path):
    """The dataset with a column more of each type; paths: its own, of the added node and edge columns."""
    generator = torch.Generator().manual_seed(3)
    added = {
        (kind, type_, "added"): torch.randint(1000, (len(rows), 2, 3), generator=generator).int()
        for (kind, type_, _), rows in dataset.columns.items()
    }
    paths = [dataset.path]
    for kind in ("node", "edge"):
        columns = {column: rows for column, rows in added.items() if column[0] == kind}
        paths.append(write_columns(tmp_path / f"{kind}.gids", dataset.graph, columns, page_bytes=512))
    return replace(dataset, columns=dataset.columns | added), paths


def asking_for_all(data, kind):
    """{type: [keys]} of one kind, as samplers take them."""
    asked = {}
    for column_kind, type_, key in data.columns:
        if column_kind == kind:
            asked.setdefault(type_, []).append(key)
    return asked if len(data.graph.ntypes) > 1 else next(iter(asked.values()))


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "num_workers"), [("edge", 0), ("shadow", 2)])
@pytest.mark.parametrize("dataset", ["homogeneous", "heterogeneous"], indirect=True)
def test_columns_of_nodes_and_edges_come_from_the_store_that_has_them(several, kind, num_workers):
    data, paths = several
    asked = {f"prefetch_{k}_feats": asking_for_all(data, k) for k in ("node", "edge")}
    seeds, sampler = data.seeds, ShaDowKHopSampler([3, 4], **asked)
    if kind == "edge":
        sampler, seeds = as_edge_prediction_sampler(NeighborSampler([3, 4], **asked)), data.edge_seeds
    found = set()
    loader = gids.dgl.DataLoader(
        data.graph, seeds, sampler, gids=paths, batch_size=16, shuffle=True, num_workers=num_workers
    )
    for batch in loader:
        assert model.assert_rows_equal_source(batch, data) >= len(data.columns)
        for graph in model.graphs_in(batch):
            found |= {(k, t, key) for k, t, frame in model.frames_of(graph) for key in list(frame)}
    assert found >= set(data.columns)
    assert len(loader.stats()["tables"]) == len(data.columns)
    loader.close()


@pytest.fixture
def twin(homogeneous, tmp_path):
    """A store with a column of the same name, of other rows."""
    rows = -homogeneous.columns["node", "_N", "feat"]
    return FeatureStore(
        write_columns(tmp_path / "twin.gids", homogeneous.graph, {("node", "_N", "feat"): rows})
    )


def test_a_column_that_two_stores_have_is_the_first_ones_unless_another_is_given(homogeneous, twin):
    sampler = NeighborSampler([3], prefetch_node_feats=["feat"])
    both = [homogeneous.path, twin]
    for sign, options in (
        (1, {}),
        (1, {"gids_feats": "feat"}),
        (-1, {"gids_feats": [twin.table("feat")]}),
        (-1, {"gids": [twin, homogeneous.path]}),
    ):
        given = {"gids": both, **options}
        with gids.dgl.DataLoader(homogeneous.graph, homogeneous.seeds, sampler, **given) as loader:
            input_nodes, _, blocks = next(iter(loader))
            expected = sign * homogeneous.columns["node", "_N", "feat"][input_nodes]
            assert model.bits(blocks[0].srcdata["feat"]) == model.bits(expected)
    two = [store.table("feat") for store in (homogeneous.store, twin)]
    with pytest.raises(ValueError, match=r"two tables are called '_N\.feat'"):
        gids.dgl.DataLoader(homogeneous.graph, homogeneous.seeds, sampler, gids=both, gids_feats=two)
