"""gids.dgl.DataLoader: what it adds to DGL's, what it keeps of it, and what it refuses."""

import errno

import dgl_model as model
import pytest
import torch
from emulator import EmulatedDevice

import gids.dgl

import dgl  # isort: skip
from dgl.dataloading import DataLoader as StockLoader  # before enable(), as user code has it
from dgl.dataloading import NeighborSampler, ShaDowKHopSampler

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")

CITES = ("paper", "cites", "paper")


@pytest.fixture
def sampler(homogeneous):
    return model.node_sampler("neighbor", homogeneous)


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ("homogeneous", "train"),
        ("homogeneous", ("_N", "train")),
        ("heterogeneous", "train"),
        ("heterogeneous", {"paper": "train"}),
        ("heterogeneous", ("paper", "train")),
    ],
    indirect=["dataset"],
)
def test_the_name_of_a_split_gives_its_nodes(dataset, named):
    ids = dataset.store.split("train")
    if len(dataset.graph.ntypes) > 1 or isinstance(named, tuple):
        ids = {dataset.store.split_type("train"): ids}
    loaded = []
    for indices in named, ids:
        model.seed_everything()
        sampler = model.node_sampler("neighbor", dataset)
        loaded.append(list(model.gids_loader(dataset, indices, sampler, batch_size=8)))
    for a, b in zip(*loaded, strict=True):
        model.assert_same(a, b)


@pytest.mark.parametrize("kind", ["edge", "cluster", "saint-walk"])
def test_a_split_is_refused_where_a_sampler_takes_no_nodes(homogeneous, tmp_path, kind):
    _, sampler = model.make(kind, homogeneous, tmp_path)
    for indices in "train", {"_N": "train"}, ("_N", homogeneous.seeds):
        with pytest.raises(ValueError, match=f"names nodes, but {type(sampler).__name__} takes others"):
            model.gids_loader(homogeneous, indices, sampler)


def check(loader, data, count=None):
    """Every stored column of every minibatch of one epoch is right."""
    batches = list(loader)
    assert len(batches) == len(loader) if count is None else count
    for batch in batches:
        assert model.assert_rows_equal_source(batch, data) > 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_an_epoch_and_starting_another(homogeneous, sampler, num_workers):
    options = {"batch_size": 8, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler, **options)
    for _ in range(3):
        for index, batch in enumerate(loader):
            assert model.assert_rows_equal_source(batch, homogeneous)
            if index == 2:
                break
    check(loader, homogeneous)
    loader.close()


def test_one_process_of_distributed_training(homogeneous, sampler, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        options = {"batch_size": 16, "shuffle": True, "use_ddp": True, "drop_last": True}
        ours = model.epochs(model.gids_loader(homogeneous, homogeneous.seeds, sampler, **options), 2)
        stock = model.epochs(model.stock_loader(homogeneous, homogeneous.seeds, sampler, **options), 2)
        for ours_epoch, stock_epoch in zip(ours, stock, strict=True):
            for a, b in zip(ours_epoch, stock_epoch, strict=True):
                assert model.assert_rows_equal_source(a, homogeneous)
                model.assert_same(a, b)
    finally:
        torch.distributed.destroy_process_group()


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


@pytest.mark.few(2)
@pytest.mark.parametrize(("num_workers", "fails"), [(0, 40), (2, 40), (0, 0), (2, 0)])
def test_an_error_of_the_sampler_is_raised_when_its_minibatch_is_due(homogeneous, num_workers, fails):
    for window in (0, 4):
        sampler = Failing([3], prefetch_node_feats=["feat"])
        with gids.dgl.DataLoader(
            homogeneous.graph,
            torch.arange(100),
            sampler,
            gids=gids.open(homogeneous.path, window=window),
            batch_size=10,
            num_workers=num_workers,
        ) as loader:
            sampler.fails = (fails,)
            epoch, first_seeds = iter(loader), []
            with pytest.raises(LookupError, match=f"no sample of {fails}"):
                first_seeds.extend(int(seeds[0]) for _, seeds, _ in epoch)
            before = (
                [0, 50, 10, 60, 20, 70, 30, 80] if num_workers else [0, 10, 20, 30]
            )  # a half for each worker
            assert first_seeds == (before if fails else [])
            with pytest.raises(RuntimeError, match=f"ended this epoch after {len(first_seeds)} of"):
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
    """Also if another loader has the same FeatureLoader."""
    loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler)
    source = loader.feature_loader.source
    other = gids.dgl.DataLoader(homogeneous.graph, homogeneous.seeds, sampler, gids=source)
    assert other.feature_loader is loader.feature_loader
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        iter(loader)


# Tables that the sampler does not ask for


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


class Marking(NeighborSampler):
    """Sets columns of the loader's graph for each minibatch."""

    def sample(self, g, seed_nodes, exclude_eids=None):
        g.ndata["seed"] = torch.zeros(g.num_nodes()).index_fill(0, seed_nodes, 1 + float(seed_nodes[0]))
        return super().sample(g, seed_nodes, exclude_eids)


@pytest.mark.parametrize("feats", [None, ["_N.feat"]])
def test_minibatches_have_what_training_writes_to_the_graph_and_what_the_sampler_sets(homogeneous, feats):
    graph, sampler = homogeneous.graph.clone(), Marking([3, 4], prefetch_edge_feats=["weight"])
    graph.ndata["memory"], graph.edata["count"] = torch.zeros(300), torch.zeros(graph.num_edges())
    with gids.open(homogeneous.path, memory="16MB") as source:
        loader = gids.dgl.DataLoader(
            graph, homogeneous.seeds, sampler, gids=source, gids_feats=feats, batch_size=20
        )
        for _, seeds, blocks in loader:
            for block in blocks:
                for nodes in (block.srcdata, block.dstdata):
                    assert torch.equal(nodes["memory"], graph.ndata["memory"][nodes[dgl.NID]])
                    is_seed = torch.isin(nodes[dgl.NID], seeds)
                    assert torch.equal(nodes["seed"], is_seed * (1 + float(seeds[0])))
                assert torch.equal(block.edata["count"], graph.edata["count"][block.edata[dgl.EID]])
            graph.ndata["memory"][seeds] += 1
            graph.edata["count"] += 1


class Replacing(dgl.dataloading.NeighborSampler):
    """Sets a new tensor after each minibatch, of which those before have no part; at last none."""

    def sample(self, g, seed_nodes, exclude_eids=None):
        sampled = super().sample(g, seed_nodes, exclude_eids)
        self.last = float(g.ndata.pop("step")[0])
        if self.last < 4:
            g.ndata["step"] = torch.full((g.num_nodes(),), self.last + 1)
        return sampled


def test_minibatches_have_the_tensor_of_the_time_when_they_were_sampled(homogeneous):
    graph, sampler = homogeneous.graph.clone(), Replacing([3], prefetch_node_feats=["feat"])
    graph.ndata["step"] = torch.zeros(300)
    with gids.open(homogeneous.path, memory="16MB") as source:
        loader = gids.dgl.DataLoader(graph, torch.arange(100), sampler, gids=source, batch_size=20)
        steps = [blocks[0].srcdata["step"].unique().tolist() for _, _, blocks in loader]
    assert steps == [[0.0], [1.0], [2.0], [3.0], [4.0]]


def of_all_nodes(graph, seeds):
    """Its columns of nodes are the graph's own, whole."""
    subgraph = graph.edge_subgraph(seeds, relabel_nodes=False)
    subgraph.edata["weight"] = dgl.LazyFeature("weight", seeds)
    return subgraph


def test_minibatches_have_what_training_writes_to_whole_columns(homogeneous):
    graph = homogeneous.graph.clone()
    graph.ndata["memory"] = torch.zeros(300)
    with gids.open(homogeneous.path, memory="16MB") as source:
        sampler = model.OwnSampler(of_all_nodes)
        loader = gids.dgl.DataLoader(graph, torch.arange(60), sampler, gids=source, batch_size=20)
        for subgraph in loader:
            assert torch.equal(subgraph.ndata["memory"], graph.ndata["memory"])
            graph.ndata["memory"] += 1
    assert bool((graph.ndata["memory"] == 3).all())


# dgl.NID and dgl.EID must be ids of the loader's graph


def neighborhood(graph, seeds):
    """A subgraph of the nodes within two hops."""
    nodes = seeds
    for _ in range(2):
        nodes = torch.cat([nodes, graph.in_edges(nodes)[0]]).unique()
    return graph.subgraph(nodes)


def shadow_of_a_shadow(graph, seeds):
    return neighborhood(neighborhood(graph, seeds), torch.arange(5))


def saint_of_a_subgraph(graph, seeds):
    subgraph = graph.subgraph(torch.cat([seeds, torch.arange(100, 200)]).unique())
    return subgraph.edge_subgraph(torch.arange(0, subgraph.num_edges(), 2))


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


def beyond_the_graph(graph, seeds):
    subgraph = neighborhood(graph, seeds)
    subgraph.ndata[dgl.NID] += 300
    return subgraph


def of_another_relation(graph, seeds):
    subgraph = neighborhood(graph, seeds)
    other = dgl.heterograph({("_N", "near", "_N"): subgraph.edges()}, {"_N": subgraph.num_nodes()})
    other.ndata[dgl.NID] = subgraph.ndata[dgl.NID]
    return other


def reversed_with_ids(graph, seeds):
    return dgl.reverse(neighborhood(graph, seeds), copy_edata=True)


def twice_batched(graph, seeds):
    return dgl.batch([neighborhood(graph, part) for part in seeds.split(5)])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("sample", "wrong"),
    [
        (neighborhood, ()),
        (reversed_with_ids, ()),
        (twice_batched, ()),
        (shadow_of_a_shadow, ("feat", "weight")),
        (saint_of_a_subgraph, ("feat", "weight")),
        (blocks_of_a_subgraph, ("feat", "weight")),
        (with_a_random_edge_more, ("feat", "weight")),
        (beyond_the_graph, ("feat", "weight")),
        (of_another_relation, ("feat",)),
        (blocks_of_a_frontier, ("weight",)),
    ],
)
def test_a_sampler_of_ones_own_gets_right_rows_or_an_error(homogeneous, sample, wrong, num_workers):
    graph = homogeneous.graph.clone()
    graph.ndata["number"], graph.edata["number"] = torch.arange(300), torch.arange(1800)
    for key, frame in (("feat", "ndata"), ("weight", "edata")):
        if key == "weight" and sample is of_another_relation:
            continue
        options = {"gids": homogeneous.path, "gids_feats": key, "batch_size": 10, "num_workers": num_workers}
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
    store = model.write(tmp_path / "all.gids", graph, rows)
    sampler = model.OwnSampler(blocks_of_a_subgraph)
    with gids.dgl.DataLoader(
        graph, torch.tensor([11, 7]), sampler, gids=store, gids_feats="weight"
    ) as loader:
        with pytest.raises(ValueError, match="with these ids"):
            next(iter(loader))


def test_a_minibatch_that_asks_for_nothing_names_the_two_ways_to_ask(homogeneous):
    for sampler in (NeighborSampler([3]), NeighborSampler([3], prefetch_labels=["label"])):
        loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler)
        with pytest.raises(ValueError, match=r"prefetch_node_feats=.* or the loader gids_feats=.*'_N.feat'"):
            next(iter(loader))


# Samplers of the user's own


def with_other_names(graph, indices):
    """Nested containers, with a column under another name and of other ids than the graph's."""
    subgraph = graph.subgraph(indices)
    other = (indices + 7) % 300
    subgraph.ndata["mine"] = dgl.LazyFeature("feat")
    subgraph.ndata["others"] = dgl.LazyFeature("feat", other)
    subgraph.ndata["label_later"] = dgl.LazyFeature("label")
    return {"graphs": [subgraph], "ids": (indices, other)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lazy_features_under_other_names_and_ids(homogeneous, num_workers):
    sampler, options = model.OwnSampler(with_other_names), {"batch_size": 16, "num_workers": num_workers}
    loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler, **options)
    feat = homogeneous.columns["node", "_N", "feat"]
    for batch in loader:
        [subgraph], (ids, other) = batch["graphs"], batch["ids"]
        assert torch.equal(subgraph.ndata["mine"], feat[ids])
        assert torch.equal(subgraph.ndata["others"], feat[other])
        assert torch.equal(subgraph.ndata["label_later"], homogeneous.graph.ndata["label"][ids])
    loader.close()


def without_ids(graph, indices):
    subgraph = graph.subgraph(indices)
    del subgraph.ndata[dgl.NID]
    subgraph.ndata["feat"] = dgl.LazyFeature("feat")
    return subgraph


def with_a_missing_column(graph, indices):
    subgraph = graph.subgraph(indices)
    subgraph.edata["colour"] = dgl.LazyFeature("colour")
    return subgraph


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (without_ids, r"no dgl\.NID of node type '_N', so its rows"),
        (with_a_missing_column, "edge feature 'colour'"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(homogeneous, mark, message):
    with pytest.raises(KeyError, match=message):
        next(iter(model.gids_loader(homogeneous, homogeneous.seeds, model.OwnSampler(mark))))


class SecretiveSampler(NeighborSampler):
    def sample(self, g, indices):
        result = super().sample(g, indices)
        result[2][0].edata["weight"] = dgl.LazyFeature("weight")
        return result


def test_a_table_that_was_not_announced_names_the_cure(homogeneous):
    sampler = SecretiveSampler([3], prefetch_node_feats=["feat"])
    with pytest.raises(KeyError, match=r"did not declare: add gids_feats=\['_N._E._N.weight'\]"):
        next(iter(model.gids_loader(homogeneous, homogeneous.seeds, sampler)))
    loader = model.gids_loader(homogeneous, homogeneous.seeds, sampler, gids_feats=["weight"])
    assert model.assert_rows_equal_source(next(iter(loader)), homogeneous) == 2


# Refused when the loader is made


def prefetching(*names):
    return NeighborSampler([3], prefetch_node_feats=list(names))


@pytest.mark.parametrize(
    ("error", "message", "sampler", "options"),
    [
        (
            KeyError,
            r"'colour' .* is neither in the dataset \(has '_N.feat', .*'label'",
            prefetching("colour"),
            {},
        ),
        (KeyError, r"venue\.feat", prefetching("feat"), {"gids_feats": ["venue.feat"]}),
        (ValueError, r"CPU-only build.* Install a CUDA build", prefetching("feat"), {"device": "cuda"}),
        (ValueError, r"CPU-only build.* Install a CUDA build", prefetching("feat"), {"use_uva": True}),
        (TypeError, r"needs a dgl.DGLGraph, not dict", prefetching("feat"), {"graph": {}}),
        (ValueError, "gids=None", prefetching("feat"), {"gids": None, "gids_feats": ["_N.feat"]}),
        (KeyError, "no split 'valid'", prefetching("feat"), {"indices": "valid"}),
    ],
)
def test_wrong_arguments_are_refused(homogeneous, error, message, sampler, options):
    given = {"graph": homogeneous.graph, "gids": homogeneous.path, "indices": homogeneous.seeds, **options}
    with pytest.raises(error, match=message):
        gids.dgl.DataLoader(given.pop("graph"), given.pop("indices"), sampler, **given)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (
            NeighborSampler([3], prefetch_node_feats=["feat"]),
            "has 301 nodes .* or a subgraph made with relabel",
        ),
        (ShaDowKHopSampler([3], prefetch_edge_feats=["weight"]), "1800 rows, but the graph has 1799 edges"),
    ],
)
def test_features_of_another_graph_are_refused(homogeneous, heterogeneous, sampler, message):
    other = dgl.add_nodes(dgl.remove_edges(homogeneous.graph, [0]), 1)
    with pytest.raises(ValueError, match=message):
        gids.dgl.DataLoader(other, homogeneous.seeds, sampler, gids=homogeneous.path)
    options = {"gids": heterogeneous.path, "gids_feats": ["paper.feat"]}
    with pytest.raises(ValueError, match=r"node type 'paper', which the graph does not have \(has '_N'\)"):
        gids.dgl.DataLoader(homogeneous.graph, homogeneous.seeds, NeighborSampler([3]), **options)


def test_a_subgraph_with_all_nodes_fits(homogeneous):
    """For inductive training. Its edges have other ids, so tables of edges do not fit."""
    part = dgl.node_subgraph(homogeneous.graph, torch.arange(150), relabel_nodes=False)
    sampler = NeighborSampler([3, 3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    check(
        gids.dgl.DataLoader(part, torch.arange(150), sampler, gids=homogeneous.path, batch_size=50),
        homogeneous,
    )


def test_the_cache_may_lie_on_a_device(heterogeneous, cuda_is):
    cuda_is(EmulatedDevice())
    sampler = model.node_sampler("neighbor", heterogeneous)
    options = {"batch_size": 16, "gids_device": "cuda", "staging": "1MiB"}
    with model.gids_loader(heterogeneous, heterogeneous.seeds, sampler, **options) as loader:
        check(loader, heterogeneous)
        assert "staging" in loader.stats()["memory"]


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
