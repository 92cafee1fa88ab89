"""The arguments of PyG's two loaders, one after the other, in gids.pyg's."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyg_model import (
    AUTHORS,
    CITES,
    PAPERS,
    WRITES,
    WRITTEN,
    assert_all_same,
    assert_drawn_by_weight,
    assert_part_of,
    assert_same,
)
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader, ZipLoader
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gids
import gids.pyg
from gids.cli import main
from gids.errors import FormatError
from gids.store import graphs_of
from gids.write import DatasetWriter, edge_list

DOCS = Path(__file__).parents[2] / "docs/pyg.md"


@pytest.mark.parametrize("kind", [PygNeighborLoader, PygLinkNeighborLoader])
def test_every_argument_is_known_and_in_the_docs(kind: type, one: Data, one_path: Path) -> None:
    ours = getattr(gids.pyg, kind.__name__)
    positional = list(inspect.signature(kind).parameters)[:-1]
    assert list(inspect.signature(ours).parameters)[: len(positional)] == positional
    listed = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", DOCS.read_text(), re.M))))
    kinds = DataLoader, LinkLoader if kind is PygLinkNeighborLoader else NodeLoader, kind
    defaults = {
        name: p.default for of in kinds for name, p in inspect.signature(of.__init__).parameters.items()
    }
    own = {"self", "node_sampler", "link_sampler", "kwargs", "args"}
    for name in {name for name in defaults if name not in own and not name.startswith("_")}:
        assert name in listed
        if name in ("data", "num_neighbors"):
            continue
        default = defaults[name]
        ours(one_path, [2], **({} if default is inspect.Parameter.empty else {name: default})).close()


class Papers(Data):
    pass


class Library(HeteroData):
    pass


def test_custom_cls_and_input_id(one_path: Path, several_path: Path) -> None:
    numbers = torch.arange(PAPERS) + 1000
    with gids.pyg.NeighborLoader(
        one_path, [2], batch_size=50, custom_cls=Papers, input_id=numbers, shuffle=True
    ) as loader:
        batch = next(iter(loader))
        assert type(batch) is Papers
        assert torch.equal(batch.input_id, numbers[batch.n_id[:50]])
    with gids.pyg.NeighborLoader(several_path, [2], "paper", custom_cls=Library) as loader:
        assert type(next(iter(loader))) is Library


def test_a_sampler_gives_the_order(one_path: Path) -> None:
    nodes = torch.arange(100, 200)

    def open_with(**options: Any) -> gids.pyg.NeighborLoader:
        return gids.pyg.NeighborLoader(one_path, [np.int64(2)], nodes, **options)

    def epochs(**options: Any) -> list[list[list[int]]]:
        """The positions of the seeds of each minibatch, in two epochs."""
        with open_with(**options) as loader:
            assert (loader.batch_size is None) == ("batch_sampler" in options or None in options.values())
            both = [list(loader) for _ in range(2)]
            assert len(both[0]) == len(loader)
            for batch in itertools.chain(*both):
                assert torch.equal(batch.n_id[: batch.batch_size], nodes[batch.input_id])
            return [[batch.input_id.tolist() for batch in batches] for batches in both]

    assert epochs(sampler=[5, 3, 99, 3, 0], batch_size=2) == [[[5, 3], [99, 3], [0]]] * 2
    first, second = epochs(sampler=SubsetRandomSampler(range(9)))
    assert sorted(first) == sorted(second) == [[i] for i in range(9)]
    assert first != second
    for lists in ([[7], [1, 2, 3], [4, 5]], [[], [3, 4]]):
        assert epochs(batch_sampler=lists) == epochs(sampler=lists, batch_size=None) == [lists] * 2
    batches = BatchSampler(range(10), 4, drop_last=True)
    assert epochs(batch_sampler=batches) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    for wrong, size, error, said in (
        ([[7], [1, 2, 3]], 2, ValueError, "the sampler yields lists: give it as batch_sampler="),
        ([0.5, 2], 2, TypeError, r"the sampler yields \[0.5, 2\]: it must yield whole numbers"),
        ([100], 1, IndexError, "positions from 100 to 100; there are 100 seeds"),
    ):
        with open_with(sampler=wrong, batch_size=size) as loader, pytest.raises(error, match=said):
            next(iter(loader))
    with open_with(sampler=[5]) as loader:
        assert loader.state_dict is loader.load_state_dict is None


def test_a_generator_gives_the_seed(one_path: Path) -> None:
    def order(number: int) -> list[int]:
        generator = torch.Generator().manual_seed(number)
        with gids.pyg.NeighborLoader(one_path, [1], generator=generator, shuffle=True) as loader:
            return [int(batch.input_id) for batch, _ in zip(loader, range(20), strict=False)]

    assert order(1) == order(1) != order(2)


def test_transforms_of_the_samplers_output_come_before_the_features(one: Data, one_path: Path) -> None:
    def first_hop(output: Any) -> Any:
        nodes, edges = sum(output.num_sampled_nodes[:2]), output.num_sampled_edges[0]
        output.node = output.node[:nodes]
        output.row, output.col, output.edge = (v[:edges] for v in (output.row, output.col, output.edge))
        output.num_sampled_nodes, output.num_sampled_edges = None, None
        return output

    options: dict[str, Any] = {"batch_size": 50, "shuffle": True}
    with (
        gids.pyg.NeighborLoader(one_path, [3, 2], transform_sampler_output=first_hop, **options) as loader,
        gids.pyg.NeighborLoader(one_path, [3], **options) as plain,
    ):
        for batch, same in zip(loader, plain, strict=True):
            assert torch.equal(batch.x, one.x[batch.n_id])
            del same.num_sampled_nodes, same.num_sampled_edges
            assert_same(batch, same)


def test_any_sampler_of_pyg_samples_for_a_dataset(several: HeteroData, several_path: Path) -> None:
    """Here gids' own, over data in memory, as another one."""
    counts: dict[Any, list[int]] = {CITES: [-1], WRITES: [-1], WRITTEN: [-1]}
    sampler = gids.pyg.NeighborSampler(several, counts)
    wrapped = NodeLoader(several, sampler, input_nodes="author", batch_size=50)
    with gids.pyg.NeighborLoader(
        several_path, None, "author", neighbor_sampler=wrapped.node_sampler, batch_size=50
    ) as loader:
        assert_all_same(loader, wrapped)
    with pytest.raises(
        ValueError, match="replace= is an argument of the sampler: give it to neighbor_sampler"
    ):
        gids.pyg.NeighborLoader(several_path, [2], "author", replace=True, neighbor_sampler=sampler)


def test_a_given_sampler_keeps_its_own_order_of_edges(one: Data, one_path: Path) -> None:
    """Its weights are by the position of edges in its own topology."""
    data, order = one.clone(), torch.arange(one.num_edges).flip(0)
    data.edge_index, data.w = one.edge_index[:, order], (order % 2).float()

    class ById(gids.pyg.NeighborSampler):
        edge_permutation = order

    sampler = ById(data, [1, 1], weight_attr="w")
    with gids.pyg.NeighborLoader(one_path, None, neighbor_sampler=sampler, batch_size=100) as loader:
        for batch in loader:
            assert_drawn_by_weight(batch.e_id, torch.arange(one.num_edges) % 2, one.edge_index[1])
            assert torch.equal(batch.n_id[batch.edge_index], one.edge_index[:, batch.e_id])
            assert torch.equal(batch.edge_attr, one.edge_attr[batch.e_id])


def test_a_loader_can_be_called_and_zipped(one: Data, one_path: Path, several_path: Path) -> None:
    with (
        gids.pyg.NeighborLoader(one_path, [-1], torch.arange(9, 59), transform=Data.clone) as papers,
        gids.pyg.NeighborLoader(several_path, [2], "author") as authors,
    ):
        assert (str(papers), papers.dataset, papers.batch_size) == ("NeighborLoader()", range(50), 1)
        batch = papers([3, 0])
        assert batch.n_id[:2].tolist() == [12, 9]
        assert torch.equal(batch.x, one.x[batch.n_id])
        assert torch.equal(batch.y, one.y[batch.n_id])
        assert torch.equal(batch.edge_attr, one.edge_attr[batch.e_id])
        with gids.pyg.NeighborLoader(one_path, [-1], torch.tensor([12, 9]), batch_size=2) as alone:
            expected = next(iter(alone))
            expected.input_id = torch.tensor([3, 0])
            assert_same(batch, expected)
        for workers, filtered in ((0, False), (2, None)):
            zipped = ZipLoader([papers, authors], filtered, batch_size=20, num_workers=workers)
            found = list(zipped)
            assert len(found) == 3
            for one_batch, typed in found:
                assert torch.equal(one_batch.x, one.x[one_batch.n_id])
                assert typed["author"].batch_size == one_batch.batch_size
    with gids.pyg.NeighborLoader(one_path, [2], filter_per_worker=True) as loader:
        assert isinstance(loader.collate_fn([1, 2]), Data)
        assert isinstance(loader([1, 2]), Data)


def test_subgraphs_trees_and_no_hops(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    """The same as PyG's own loader makes of gids' samples in memory, as nothing is drawn."""
    for data, path, nodes in ((one, one_path, None), (several, several_path, "author")):
        for options in (
            {"subgraph_type": "bidirectional"},
            {"subgraph_type": "induced"},
            {"disjoint": True},
            {"disjoint": True, "subgraph_type": "induced"},
            {"disjoint": True, "subgraph_type": "bidirectional"},
        ):
            given: dict[str, Any] = {"batch_size": 40, **options}
            theirs = gids.pyg.NeighborLoader(data, [-1, -1], nodes, **given)
            assert type(theirs) is PygNeighborLoader
            with gids.pyg.NeighborLoader(path, [-1, -1], nodes, **given) as loader:
                assert_all_same(loader, theirs)
        with gids.pyg.NeighborLoader(path, [], nodes, batch_size=40) as loader:
            batch = next(iter(loader))
            assert (batch if nodes is None else batch[nodes]).n_id.tolist() == list(range(40))
            assert all(
                edges.size(1) == 0
                for edges in ([batch.edge_index] if nodes is None else batch.edge_index_dict.values())
            )


@pytest.mark.parametrize("disjoint", [False, True])
def test_induced_edges_are_all_edges_among_the_nodes(one: Data, one_path: Path, disjoint: bool) -> None:
    """Of each tree, if trees are disjoint: these are those of shaDow."""
    options: dict[str, Any] = {"disjoint": disjoint, "subgraph_type": "induced", "batch_size": 20}
    with gids.pyg.NeighborLoader(one_path, [3, 3], torch.arange(60), **options) as loader:
        for batch in loader:
            trees = batch.batch if disjoint else torch.zeros_like(batch.n_id)
            assert torch.equal(trees[:20], torch.arange(20) * disjoint)
            for root in range(20 if disjoint else 1):
                nodes = batch.n_id[trees == root]
                edges = batch.e_id[trees[batch.edge_index[0]] == root]
                assert len(nodes.unique()) == len(nodes) <= (1 + 3 + 9) * (1 if disjoint else 20)
                inside = torch.isin(one.edge_index, nodes).all(0)
                assert sorted(edges.tolist()) == inside.nonzero().view(-1).tolist()
            assert torch.equal(*trees[batch.edge_index])
            assert torch.equal(batch.n_id[batch.edge_index], one.edge_index[:, batch.e_id])


def test_neighbors_are_not_later_than_the_seed(one: Data, tmp_path: Path) -> None:
    """Times of nodes and of edges, from tables of any name; in memory and on disk."""
    generator = torch.Generator().manual_seed(5)
    data = one.clone()
    data.when = torch.randint(1000, (PAPERS,), generator=generator)
    data.since = torch.randint(1000, (one.num_edges,), generator=generator)
    with DatasetWriter(tmp_path / "t.gids") as writer:
        writer.write_table("node", "paper", "feat", data.x)
        writer.write_table("node", "paper", "when", data.when[:, None])
        writer.write_table("edge", CITES, "since", data.since[:, None])
        row, col = data.edge_index
        writer.write_edges(CITES, edge_list(row, col, num_src=PAPERS, num_dst=PAPERS))
    seeds, times = torch.arange(100), torch.randint(1000, (100,), generator=generator)
    for source in (tmp_path / "t.gids", data):
        for attr, strategy in (("when", "uniform"), ("since", "uniform"), ("since", "last")):
            loader = gids.pyg.NeighborLoader(
                source, [2, -1], seeds, times, time_attr=attr, temporal_strategy=strategy, batch_size=30
            )
            found = 0
            for batch in loader:
                assert torch.equal(batch.seed_time, times[batch.input_id])
                tree = batch.batch[batch.edge_index[1]]
                time = (
                    data.since[batch.e_id] if attr == "since" else data.when[batch.n_id[batch.edge_index[0]]]
                )
                assert (time <= batch.seed_time[tree]).all()
                assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
                found += len(tree)
            assert found > 50
            own = gids.pyg.NeighborLoader(source, [2], seeds, time_attr="when", batch_size=30)
            for batch in own:  # without input_time the seeds' own times
                tree = batch.batch[batch.edge_index[1]]
                assert (
                    data.when[batch.n_id[batch.edge_index[0]]] <= data.when[seeds[batch.input_id]][tree]
                ).all()
    edges, label_times = one.edge_index[:, :90], times[:90] + 200
    for negatives in ("binary", "triplet"):
        for source in (tmp_path / "t.gids", data):
            loader = gids.pyg.LinkNeighborLoader(
                source,
                [-1],
                edges,
                None,
                label_times,
                time_attr="when",
                neg_sampling=negatives,
                batch_size=30,
            )
            for batch in loader:
                seed_time = batch.edge_label_time[:30] if negatives == "binary" else batch.seed_time
                assert torch.equal(seed_time, label_times[batch.input_id])
                tree = batch.batch[batch.edge_index[1]]
                assert (data.when[batch.n_id[batch.edge_index[0]]] <= seed_time[tree]).all()


def test_times_that_gids_convert_stores(one: Data, several: HeteroData, tmp_path: Path) -> None:
    """The same minibatches as from times in memory, and no copy of the topology."""
    generator = torch.Generator().manual_seed(6)
    homogeneous, typed, by_edge = one.clone(), several.clone(), one.clone()
    homogeneous.time = torch.randint(1000, (PAPERS,), generator=generator)
    by_edge.time = torch.randint(1000, (one.num_edges,), generator=generator)
    for ntype, count in (("paper", PAPERS), ("author", AUTHORS)):
        typed[ntype].time = torch.randint(1000, (count,), generator=generator)
    seeds = torch.arange(0, 150, 2)
    times = torch.randint(1000, (75,), generator=generator)
    for number, (data, nodes) in enumerate(
        ((homogeneous, seeds), (typed, ("author", seeds)), (by_edge, seeds))
    ):
        source, path = tmp_path / f"{number}.pt", tmp_path / f"{number}.gids"
        torch.save(data.to_dict(), source)
        assert main(["convert", str(source), str(path)]) == 0
        store = gids.FeatureStore(path)
        for input_time in (times, None):
            if input_time is None and data is by_edge:
                continue
            options: dict[str, Any] = {"batch_size": 30, "input_time": input_time, "time_attr": "time"}
            theirs = gids.pyg.NeighborLoader(data, [-1, -1], nodes, **options)
            with gids.pyg.NeighborLoader(store, [-1, -1], nodes, **options) as loader:
                for graph, stored in zip(loader.node_sampler.graphs, graphs_of(store), strict=True):
                    assert isinstance(stored.indices, np.memmap)
                    assert isinstance(graph.indices, np.memmap)  # no copy
                assert_all_same(loader, theirs)
    typed[CITES].time = torch.arange(2400)
    with pytest.raises(ValueError, match="time_attr='time': both nodes and edges of the data have"):
        gids.pyg.NeighborSampler(typed, [2], time_attr="time")
    with DatasetWriter(tmp_path / "both.gids") as writer:
        writer.write_times("paper", torch.arange(9))
        edges = edge_list(torch.arange(9), torch.arange(9), num_src=9, num_dst=9)
        writer.write_edges(CITES, edges, times=torch.arange(9))
    with pytest.raises(ValueError, match="time_attr='time': both nodes and edges of both"):
        gids.pyg.NeighborSampler(tmp_path / "both.gids", [2], time_attr="time")
    homogeneous.time = homogeneous.time.float()
    with pytest.raises(TypeError, match="times must be integers"):
        gids.pyg.NeighborSampler(homogeneous, [2], time_attr="time")


def test_data_without_edges_and_seeds_without_neighbors() -> None:
    data = Data(num_nodes=100)
    for batch in gids.pyg.NeighborLoader(data, [2], batch_size=60):
        assert batch.n_id.tolist() == batch.input_id.tolist()
    typed = HeteroData(paper={"num_nodes": 100})
    (batch,) = gids.pyg.NeighborLoader(typed, [], "paper", batch_size=100)
    assert batch["paper"].n_id.tolist() == list(range(100))
    edges = ("paper", "paper"), torch.ones(2, 3).long()
    with pytest.raises(ValueError, match="the data has no edges: negatives and disjoint=True need some"):
        next(iter(gids.pyg.LinkNeighborLoader(typed, [], edges, neg_sampling="binary")))


def test_a_dataset_of_one_node_type_needs_no_edges(one: Data, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "nodes.gids") as writer:
        writer.write_table("node", "paper", "feat", one.x)
    alone = Data(x=one.x, edge_index=torch.empty(2, 0, dtype=torch.int64))
    for options in ({}, {"disjoint": True}, {"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"}):
        given: dict[str, Any] = {"batch_size": 250, **options}
        theirs = gids.pyg.NeighborLoader(alone, [2, 2], **given)
        with gids.pyg.NeighborLoader(tmp_path / "nodes.gids", [2, 2], **given) as loader:
            assert_all_same(loader, theirs)
    pairs = torch.arange(90).view(2, 45)
    with gids.pyg.LinkNeighborLoader(
        tmp_path / "nodes.gids", [2], pairs, neg_sampling="binary", batch_size=45
    ) as links:
        (batch,) = links
        assert torch.equal(batch.x[batch.edge_label_index[:, :45]], one.x[pairs])
        assert batch.edge_index.shape == (2, 0)
    with pytest.raises(FormatError, match=r"nodes\.gids has no topology"):
        gids.NodeLoader(tmp_path / "nodes.gids", torch.arange(9), [2])


def test_other_peoples_stores_are_a_source(several: HeteroData, one: Data) -> None:
    features, graphs = MyFeatureStore(), MyGraphStore()
    for ntype in ("paper", "author"):
        features.put_tensor(several[ntype].x, group_name=ntype, attr_name="x", index=None)
    features.put_tensor(torch.ones(2400), group_name=CITES, attr_name="w", index=None)
    for relation in (CITES, WRITES, WRITTEN):
        row, col = several[relation].edge_index
        counts = {"paper": PAPERS, "author": AUTHORS}
        size = (counts[relation[0]], counts[relation[2]])
        graphs.put_edge_index((row, col), edge_type=relation, layout="coo", size=size)
    stores = features, graphs
    loader = gids.pyg.NeighborLoader(stores, [-1, 2], "author", batch_size=50, weight_attr="w")
    for batch in loader:
        assert_part_of(batch, several)
    links = gids.pyg.LinkNeighborLoader(
        stores, [2], (WRITES, several[WRITES].edge_index[:, :9]), batch_size=9
    )
    assert next(iter(links))[WRITES].edge_label_index.shape == (2, 9)
    with pytest.raises(ValueError, match="tables= needs a dataset on disk, and data is tuple"):
        gids.pyg.NeighborLoader(stores, [2], "author", tables=[])
    with pytest.raises(TypeError, match="has no argument 'batchsize'; did you mean 'batch_size'"):
        gids.pyg.NeighborLoader(one, [2], batchsize=3)


def test_a_typed_dataset_with_one_type_and_one_relation(one: Data, one_path: Path) -> None:
    features = gids.pyg.FeatureStore(one_path, typed=True)
    stores = features, gids.pyg.GraphStore(features.store, typed=True)
    assert {attr.group_name for attr in features.get_all_tensor_attrs()} == {"paper", CITES}
    sampler = gids.pyg.NeighborSampler(stores, {CITES: [3, 2]})
    for batch in NodeLoader(stores, sampler, input_nodes=("paper", torch.arange(50)), batch_size=20):
        assert torch.equal(batch["paper"].x, one.x[batch["paper"].n_id])
        row, col = batch[CITES].edge_index
        ends = batch["paper"].n_id[torch.stack([row, col])]
        assert torch.equal(ends, one.edge_index[:, batch[CITES].e_id])
    with gids.pyg.LinkNeighborLoader(one_path, [2], CITES, batch_size=50, neg_sampling="binary") as loader:
        batch = next(iter(loader))
        assert torch.equal(
            batch["paper"].n_id[batch[CITES].edge_label_index[:, :50]],
            one.edge_index[:, batch[CITES].input_id],
        )


def test_models_of_pyg_infer_by_a_loader_in_memory(one: Data) -> None:
    model = GraphSAGE(24, 8, num_layers=2, out_channels=3).eval()
    loader = gids.pyg.NeighborLoader(one, [-1], batch_size=100)
    assert loader.node_sampler.edge_permutation is None
    with torch.no_grad():
        expected = model(one.x, one.edge_index)
        assert torch.allclose(model.inference(loader), expected, atol=1e-5)
        sampler = gids.pyg.NeighborSampler(one, [-1])
        own = PygNeighborLoader(one, [-1], neighbor_sampler=sampler, batch_size=100)
        assert torch.allclose(model.inference(own), expected, atol=1e-5)
