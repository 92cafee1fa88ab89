"""gids.dgl.DataLoader: what it adds to DGL's, and what it keeps of it."""

import errno

import dgl_model as model
import pytest
import torch

import gids.dgl
from gids.store import FeatureStore
from gids.write import DatasetWriter

import dgl  # isort: skip
from dgl.dataloading import DataLoader as StockLoader  # before enable(), as user code has it
from dgl.dataloading import NeighborSampler

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")

CITES = ("paper", "cites", "paper")


@pytest.fixture
def sampler(homogeneous):
    return model.node_sampler("neighbor", homogeneous)


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ("homogeneous", "train"),
        ("heterogeneous", "train"),
        ("heterogeneous", {"paper": "train"}),
        ("heterogeneous", ("paper", "train")),
    ],
    indirect=["dataset"],
)
def test_the_name_of_a_split_gives_its_nodes(dataset, named):
    with model.gids_loader(dataset, named, model.node_sampler("full", dataset), batch_size=20) as loader:
        [(_, seeds, _)] = loader
    assert torch.equal(seeds if torch.is_tensor(seeds) else seeds["paper"], dataset.store.split("train"))


def check(loader, data):
    """Every stored column of every minibatch of one epoch is right."""
    batches = list(loader)
    assert len(batches) == len(loader)
    for batch in batches:
        assert model.assert_rows_equal_source(batch, data) > 0


def test_leaving_an_epoch_and_starting_another(homogeneous, sampler):
    options = {"batch_size": 8, "num_workers": 1, "persistent_workers": True}
    with model.gids_loader(homogeneous, homogeneous.seeds, sampler, **options) as loader:
        for index, batch in enumerate(loader):
            assert model.assert_rows_equal_source(batch, homogeneous)
            if index == 2:
                break
        check(loader, homogeneous)


def test_a_page_that_cannot_be_read_ends_the_epoch(homogeneous, sampler):
    loader = model.gids_loader(homogeneous, torch.arange(300), sampler, batch_size=50, cache=0)
    engine = loader.feature_loader._engine
    engine.inject_faults([(0, 0, errno.EIO, 1 << 30)])
    iterator = iter(loader)
    with pytest.raises(gids.StorageError, match="shard-00"):
        next(iterator)
    engine.inject_faults([])
    with pytest.raises(RuntimeError, match="begin it again"):
        next(iterator)
    assert len(list(loader)) == 6
    loader.close()


class Failing(NeighborSampler):
    """Fails for a minibatch, told by its first seed."""

    fails = ()

    def sample(self, g, seed_nodes, exclude_eids=None):
        if int(seed_nodes[0]) in self.fails:
            raise LookupError(f"no sample of {int(seed_nodes[0])}")
        return super().sample(g, seed_nodes, exclude_eids)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_sampler_is_raised_when_its_minibatch_is_due(homogeneous, num_workers):
    sampler, seeds = Failing([3], prefetch_node_feats=["feat"]), torch.arange(100)
    options = {"window": 4, "batch_size": 10, "num_workers": num_workers}
    with model.gids_loader(homogeneous, seeds, sampler, **options) as loader:
        sampler.fails = (40,)
        epoch, first_seeds = iter(loader), []
        with pytest.raises(LookupError, match="no sample of 40"):
            first_seeds.extend(int(seeds[0]) for _, seeds, _ in epoch)
        assert first_seeds == [0, 10, 20, 30]
        with pytest.raises(RuntimeError, match="ended this epoch after 4 of"):
            next(epoch)
        sampler.fails = ()
        check(loader, homogeneous)


class Unsendable(NeighborSampler):
    """Its minibatches cannot be pickled, as their tensors cannot without free file descriptors."""

    def sample(self, *arguments):
        return *super().sample(*arguments), lambda: None


def test_a_minibatch_that_a_worker_cannot_send_ends_the_epoch(homogeneous):
    """Stock DGL waits for it for ever; with timeout=, it raises another error."""
    sampler = Unsendable([3], prefetch_node_feats=["feat"])
    with model.gids_loader(homogeneous, homogeneous.seeds, sampler, num_workers=1, timeout=20) as loader:
        with pytest.raises(RuntimeError, match=r"worker \(pid.*exited unexpectedly"):
            next(iter(loader))


def test_after_close_it_cannot_be_iterated(homogeneous, sampler):
    loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        iter(loader)


# Which tables, and where they are


def test_gids_feats_fill_the_first_blocks_sources_and_every_blocks_edges(heterogeneous):
    names = ["paper.feat", "author.age", "paper.cites.paper.weight"]
    loader = model.gids_loader(
        heterogeneous, heterogeneous.seeds, NeighborSampler([3, 4]), batch_size=16, gids_feats=names
    )
    for _, _, blocks in loader:
        assert model.assert_rows_equal_source(blocks, heterogeneous) == 4
        assert "feat" in blocks[0].srcnodes["paper"].data
        assert "age" in blocks[0].srcnodes["author"].data
        assert "feat" not in blocks[0].srcnodes["author"].data
        assert "feat" not in blocks[1].srcnodes["paper"].data
        assert "feat" not in blocks[0].dstnodes["paper"].data
        assert all("weight" in block.edges[CITES].data for block in blocks)


def test_a_column_that_two_stores_have_is_the_first_ones_unless_another_is_given(homogeneous, tmp_path):
    feat = homogeneous.columns["node", "_N", "feat"]
    with DatasetWriter(tmp_path / "twin.gids") as writer:
        writer.write_table("node", "_N", "feat", -feat)
    twin, sampler = FeatureStore(tmp_path / "twin.gids"), NeighborSampler([3], prefetch_node_feats=["feat"])
    for sign, options in (
        (1, {}),
        (1, {"gids_feats": "feat"}),
        (-1, {"gids_feats": [twin.table("feat")]}),
        (-1, {"gids": [twin, homogeneous.path]}),
    ):
        given = {"gids": [homogeneous.path, twin], **options}
        with gids.dgl.DataLoader(homogeneous.graph, homogeneous.seeds, sampler, **given) as loader:
            input_nodes, _, blocks = next(iter(loader))
            assert model.bits(blocks[0].srcdata["feat"]) == model.bits(sign * feat[input_nodes])


class Marking(NeighborSampler):
    """Sets columns of the loader's graph for each minibatch."""

    def sample(self, g, seed_nodes, exclude_eids=None):
        g.ndata["seed"] = torch.zeros(g.num_nodes()).index_fill(0, seed_nodes, 1 + float(seed_nodes[0]))
        return super().sample(g, seed_nodes, exclude_eids)


@pytest.mark.parametrize("reads", ["random", "pack"])
def test_minibatches_have_what_training_writes_to_the_graph_and_what_the_sampler_sets(homogeneous, reads):
    graph, sampler = homogeneous.graph.clone(), Marking([3, 4], prefetch_edge_feats=["weight"])
    graph.ndata["memory"], graph.edata["count"] = torch.zeros(300), torch.zeros(graph.num_edges())
    with gids.open(homogeneous.path, memory="16MB", reads=reads) as source:
        loader = gids.dgl.DataLoader(graph, homogeneous.seeds, sampler, gids=source, batch_size=20)
        for _, seeds, blocks in loader:
            for block in blocks:
                for nodes in (block.srcdata, block.dstdata):
                    assert torch.equal(nodes["memory"], graph.ndata["memory"][nodes[dgl.NID]])
                    is_seed = torch.isin(nodes[dgl.NID], seeds)
                    assert torch.equal(nodes["seed"], is_seed * (1 + float(seeds[0])))
                assert torch.equal(block.edata["count"], graph.edata["count"][block.edata[dgl.EID]])
            graph.ndata["memory"][seeds] += 1
            graph.edata["count"] += 1


def with_other_names(graph, indices):
    """Nested containers, with a column under another name and of other ids than the graph's."""
    subgraph = graph.subgraph(indices)
    other = (indices + 7) % 300
    subgraph.ndata["mine"] = dgl.LazyFeature("feat")
    subgraph.ndata["others"] = dgl.LazyFeature("feat", other)
    subgraph.ndata["label_later"] = dgl.LazyFeature("label")
    return {"graphs": [subgraph], "ids": (indices, other)}


def test_lazy_features_under_other_names_and_ids(homogeneous):
    sampler, options = model.OwnSampler(with_other_names), {"batch_size": 50, "num_workers": 1}
    feat = homogeneous.columns["node", "_N", "feat"]
    with model.gids_loader(homogeneous, homogeneous.seeds, sampler, **options) as loader:
        for batch in loader:
            [subgraph], (ids, other) = batch["graphs"], batch["ids"]
            assert torch.equal(subgraph.ndata["mine"], feat[ids])
            assert torch.equal(subgraph.ndata["others"], feat[other])
            assert torch.equal(subgraph.ndata["label_later"], homogeneous.graph.ndata["label"][ids])


def test_a_subgraph_with_all_nodes_fits(homogeneous):
    """For inductive training. Its edges have other ids, so tables of edges do not fit."""
    part = dgl.node_subgraph(homogeneous.graph, torch.arange(150), relabel_nodes=False)
    sampler = NeighborSampler([3, 3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    options = {"gids": homogeneous.path, "batch_size": 50}
    check(gids.dgl.DataLoader(part, torch.arange(150), sampler, **options), homogeneous)


# enable()


@pytest.fixture
def enabled():
    before = dict(vars(StockLoader))
    gids.dgl.enable()
    yield
    for name in set(vars(StockLoader)) - set(before):
        delattr(StockLoader, name)
    StockLoader.__init__, StockLoader.__iter__ = before["__init__"], before["__iter__"]


def test_dgls_own_class_and_its_subclasses_take_the_flag(homogeneous, sampler, enabled):
    class Mine(StockLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert dgl.dataloading.DataLoader is StockLoader
    for kind in (StockLoader, Mine, gids.dgl.DataLoader):
        loader = kind(homogeneous.graph, homogeneous.seeds, sampler, batch_size=16, gids=homogeneous.path)
        assert type(loader) is kind
        check(loader, homogeneous)
        assert loader.stats()
        loader.close()


def test_without_a_dataset_a_loader_equals_stock_dgl(homogeneous, sampler, request):
    given = (homogeneous.full, homogeneous.seeds, sampler)
    before = StockLoader(*given, batch_size=16)
    [reference] = model.epochs(before)
    ours = gids.dgl.DataLoader(*given, gids=None, batch_size=16)
    assert ours.stats() == {}
    request.getfixturevalue("enabled")
    for loader in (ours, before, StockLoader(*given, gids=None, gids_feats=None, batch_size=16)):
        for a, b in zip(model.epochs(loader)[0], reference, strict=True):
            model.assert_same(a, b)
    ours.close()
