"""What gids.dgl refuses: when a loader or graph is made, and while it is iterated."""

import dgl_model as model
import pytest
import torch

import gids.dgl
from gids.store import FeatureStore
from gids.write import DatasetWriter
from gids.write.partition import partition

import dgl  # isort: skip
from dgl.dataloading import NeighborSampler, SAINTSampler, ShaDowKHopSampler, as_edge_prediction_sampler

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")

FEAT = NeighborSampler([3], prefetch_node_feats=["feat"])
COLOUR = NeighborSampler([3], prefetch_node_feats=["colour"])
WEIGHT = ShaDowKHopSampler([3], prefetch_edge_feats=["weight"])
PLAIN = NeighborSampler([3])
EDGES = as_edge_prediction_sampler(FEAT)
WALKS = SAINTSampler(mode="walk", budget=(10, 3), prefetch_ndata=["feat"])
CUDA = r"CPU-only build.* Install a CUDA build"
NODES_ONLY = "names nodes, but {} takes others"
OTHER = {"graph": lambda g: dgl.add_nodes(dgl.remove_edges(g, [0]), 1)}


@pytest.mark.parametrize(
    ("error", "message", "sampler", "options"),
    [
        (KeyError, r"'colour' .* is neither in the dataset \(has '_N.feat', .*'label'", COLOUR, {}),
        (KeyError, r"venue\.feat", FEAT, {"gids_feats": ["venue.feat"]}),
        (ValueError, CUDA, FEAT, {"device": "cuda"}),
        (ValueError, CUDA, FEAT, {"use_uva": True}),
        (TypeError, "needs a dgl.DGLGraph, not dict", FEAT, {"graph": lambda _: {}}),
        (ValueError, "gids=None", FEAT, {"gids": None, "gids_feats": ["_N.feat"]}),
        (KeyError, "no split 'valid'", FEAT, {"indices": "valid"}),
        (ValueError, NODES_ONLY.format("EdgePredictionSampler"), EDGES, {"indices": "train"}),
        (ValueError, NODES_ONLY.format("SAINTSampler"), WALKS, {"indices": {"_N": "train"}}),
        (ValueError, "has 301 nodes .* or a subgraph made with relabel", FEAT, OTHER),
        (ValueError, "1800 rows, but the graph has 1799 edges", WEIGHT, OTHER),
    ],
)
def test_wrong_arguments(homogeneous, error, message, sampler, options):
    given = {"gids": homogeneous.path, "indices": homogeneous.seeds, **options}
    graph = given.pop("graph", lambda g: g)(homogeneous.graph)
    with pytest.raises(error, match=message):
        gids.dgl.DataLoader(graph, given.pop("indices"), sampler, **given)


def test_tables_that_do_not_fit(homogeneous, heterogeneous, tmp_path):
    given = homogeneous.graph, homogeneous.seeds, PLAIN
    with pytest.raises(ValueError, match=r"node type 'paper', which the graph does not have \(has '_N'\)"):
        gids.dgl.DataLoader(*given, gids=heterogeneous.path, gids_feats=["paper.feat"])
    twin = model.write(tmp_path / "twin.gids", homogeneous.graph, homogeneous.columns)
    two = [store.table("feat") for store in (homogeneous.store, twin)]
    with pytest.raises(ValueError, match=r"two tables are called '_N\.feat'"):
        gids.dgl.DataLoader(*given, gids=[homogeneous.path, twin], gids_feats=two)


def test_graphs(homogeneous, tmp_path):
    with DatasetWriter(tmp_path / "features.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.ones(4, 2))
    partition(homogeneous.store.path, tmp_path / "parts", 2)
    with pytest.raises(ValueError, match=r"features.gids has features, but no topology"):
        gids.dgl.graph(FeatureStore(tmp_path / "features.gids"))
    with pytest.raises(ValueError, match=r"part-000\.gids is part 0 of 2: .*dgl\.graph needs all parts"):
        gids.dgl.graph(tmp_path / "parts/part-000.gids")
    with pytest.raises(ValueError, match="'csc' must be among them"):
        gids.dgl.graph(homogeneous.store, formats="coo")


# Minibatches


def without_ids(graph, indices):
    subgraph = graph.subgraph(indices)
    del subgraph.ndata[dgl.NID]
    subgraph.ndata["feat"] = dgl.LazyFeature("feat")
    return subgraph


def with_a_missing_column(graph, indices):
    subgraph = graph.subgraph(indices)
    subgraph.edata["colour"] = dgl.LazyFeature("colour")
    return subgraph


class Secretive(NeighborSampler):
    """Asks for a table that it does not declare."""

    def sample(self, g, indices):
        result = super().sample(g, indices)
        result[2][0].edata["weight"] = dgl.LazyFeature("weight")
        return result


NOTHING = r"prefetch_node_feats=.* or the loader gids_feats=.*'_N.feat'"


@pytest.mark.parametrize(
    ("error", "message", "sampler"),
    [
        (ValueError, NOTHING, PLAIN),
        (ValueError, NOTHING, NeighborSampler([3], prefetch_labels=["label"])),
        (KeyError, r"no dgl\.NID of node type '_N', so its rows", model.OwnSampler(without_ids)),
        (KeyError, "edge feature 'colour'", model.OwnSampler(with_a_missing_column)),
        (
            KeyError,
            r"did not declare: add gids_feats=\['_N._E._N.weight'\]",
            Secretive([3], prefetch_node_feats=["feat"]),
        ),
    ],
)
def test_columns_that_cannot_be_read(homogeneous, error, message, sampler):
    with pytest.raises(error, match=message):
        next(iter(model.gids_loader(homogeneous, homogeneous.seeds, sampler)))


# dgl.NID and dgl.EID must be ids of the loader's graph


def neighborhood(graph, seeds):
    """A subgraph of the nodes within two hops."""
    nodes = seeds
    for _ in range(2):
        nodes = torch.cat([nodes, graph.in_edges(nodes)[0]]).unique()
    return graph.subgraph(nodes)


def shadow_of_a_shadow(graph, seeds):
    return neighborhood(neighborhood(graph, seeds), torch.arange(5))


def blocks_of_a_subgraph(graph, seeds):
    """As in DGL's guide to samplers."""
    subgraph = neighborhood(graph, seeds)
    return dgl.to_block(dgl.sampling.sample_neighbors(subgraph, torch.arange(5), 3), torch.arange(5))


def blocks_of_a_frontier(graph, seeds):
    """Edge ids are those of the frontier, node ids those of the graph."""
    return dgl.to_block(dgl.sampling.sample_neighbors(graph, seeds, 3), seeds)


def with_a_random_edge_more(graph, seeds):
    subgraph = neighborhood(graph, seeds)
    return dgl.add_edges(subgraph, torch.arange(9), torch.arange(9).flip(0))


def of_another_relation(graph, seeds):
    subgraph = neighborhood(graph, seeds)
    other = dgl.heterograph({("_N", "near", "_N"): subgraph.edges()}, {"_N": subgraph.num_nodes()})
    other.ndata[dgl.NID] = subgraph.ndata[dgl.NID]
    return other


def reversed_with_ids(graph, seeds):
    return dgl.reverse(neighborhood(graph, seeds), copy_edata=True)


@pytest.mark.parametrize(
    ("sample", "wrong"),
    [
        (neighborhood, ()),
        (reversed_with_ids, ()),
        (shadow_of_a_shadow, ("feat", "weight")),
        (blocks_of_a_subgraph, ("feat", "weight")),
        (with_a_random_edge_more, ("feat", "weight")),
        (of_another_relation, ("feat",)),
        (blocks_of_a_frontier, ("weight",)),
    ],
)
def test_a_sampler_of_ones_own_gets_right_rows_or_an_error(homogeneous, sample, wrong):
    graph = homogeneous.graph.clone()
    graph.ndata["number"], graph.edata["number"] = torch.arange(300), torch.arange(1800)
    for key, frame in (("feat", "ndata"), ("weight", "edata")):
        if key == "weight" and sample is of_another_relation:
            continue
        options = {"gids": homogeneous.path, "gids_feats": key, "batch_size": 25}
        with gids.dgl.DataLoader(graph, homogeneous.seeds, model.OwnSampler(sample), **options) as loader:
            if key in wrong:
                with pytest.raises(ValueError, match=r"not in the loader's graph.*LazyFeature\(name, ids\)"):
                    next(iter(loader))
                continue
            for batch in loader:
                data = batch.srcdata if batch.is_block and frame == "ndata" else getattr(batch, frame)
                rows = getattr(homogeneous.full, frame)[key]
                assert torch.equal(data[key], rows[data["number"]])  # sliced by DGL from the graph
                assert torch.equal(data[key], rows[data[dgl.NID]])


def test_an_edge_of_a_graph_with_all_pairs_is_told_by_its_id(tmp_path):
    """Each pair of nodes of a subgraph is an edge there, too."""
    u, v = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    graph = dgl.graph((u.flatten(), v.flatten()))
    rows = {("edge", ("_N", "_E", "_N"), "weight"): torch.arange(400.0)}
    store, sampler = model.write(tmp_path / "all.gids", graph, rows), model.OwnSampler(blocks_of_a_subgraph)
    options = {"gids": store, "gids_feats": "weight"}
    with gids.dgl.DataLoader(graph, torch.tensor([11, 7]), sampler, **options) as loader:
        with pytest.raises(ValueError, match="with these ids"):
            next(iter(loader))
