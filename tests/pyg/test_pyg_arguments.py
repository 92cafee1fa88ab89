"""The arguments of PyG's two loaders, one after the other, in gids.pyg's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from host_allocator import HostAllocator
from pyg_model import CITES, PAPERS, AllNeighbors, assert_all_same
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gids
import gids.pyg
from gids.cli import main
from gids.write import DatasetWriter, edge_list

DOCS = Path(__file__).parents[2] / "docs/pyg.md"
LOADERS = gids.pyg.NeighborLoader, gids.pyg.LinkNeighborLoader


@pytest.mark.parametrize("kind", [PygNeighborLoader, PygLinkNeighborLoader])
def test_every_argument_is_known_and_in_the_docs(kind: type, one_path: Path) -> None:
    ours = getattr(gids.pyg, kind.__name__)
    by_position = [
        name for name, p in inspect.signature(ours).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert list(inspect.signature(kind).parameters)[: len(by_position)] == by_position
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


@pytest.mark.parametrize("make", LOADERS)
def test_data_in_memory_and_arguments_that_gids_does_not_take_are_refused(
    make: Any, one: Data, several: HeteroData, one_path: Path
) -> None:
    for data in (one, several, (MyFeatureStore(), MyGraphStore()), 5):
        said = (
            f"data is {type(data).__name__}, and gids.pyg.{make.__name__} takes a dataset on disk: gids.open"
        )
        with pytest.raises(TypeError, match=re.escape(said) + ".*PyG's own loader for Data"):
            make(data, [2])
    for name, value, cure in (
        ("neighbor_sampler", object(), "PyG's own loaders take it, with gids.pyg.MappedFeatures"),
        ("transform_sampler_output", print, "PyG's own loaders take it"),
        ("sampler", [1, 2], "give the seeds in your order"),
        ("batch_sampler", [[1, 2]], "give the seeds in your order"),
        ("custom_cls", Data, "in transform="),
        ("directed", False, "give subgraph_type='induced'"),
        ("generator", torch.Generator(), "give seed="),
        ("collate_fn", list, "give transform="),
        ("dataset", [1], "give the seeds as input_nodes"),
    ):
        with pytest.raises(ValueError, match=rf"gids\.pyg\.{make.__name__} does not take {name}=: .*{cure}"):
            make(one_path, [2], **{name: value})
    for name, said in (
        ("window", "an option of gids.open()"),
        ("trasform", "did you mean 'transform'"),
        ("options", "(it has data,"),
    ):
        with pytest.raises(TypeError, match=f"has no argument '{name}'.*{re.escape(said)}"):
            make(one_path, [2], **{name: 1})


def test_pin_memory_pins_every_tensor_before_the_transform(
    one_path: Path, several_path: Path, pinning: HostAllocator
) -> None:
    seen = []

    def look(data: Data | HeteroData) -> Data | HeteroData:
        tensors = [v for store in data.stores for v in store.values() if isinstance(v, torch.Tensor)]
        assert len(tensors) > 3
        seen.append(all(map(pinning.is_pinned, tensors)))
        return data

    several: Any = {relation: [2, 2] for relation in gids.FeatureStore(several_path).relations}
    pairs = torch.tensor([[1, 2, 3], [3, 4, 5]])
    for make, path, counts, seeds in (
        (gids.pyg.NeighborLoader, one_path, [2, 2], torch.arange(100)),
        (gids.pyg.NeighborLoader, several_path, several, "author"),
        (gids.pyg.LinkNeighborLoader, one_path, [2, 2], pairs),
    ):
        options: dict[str, Any] = {"batch_size": 2, "seed": 0}
        with (
            make(path, counts, seeds, **options, pin_memory=True, transform=look) as loader,
            make(path, counts, seeds, **options) as other,
        ):
            assert_all_same(loader, other)
    assert len(seen) > 100
    assert all(seen)


@pytest.mark.parametrize("make", LOADERS)
def test_pin_memory_needs_the_cpu_and_a_driver(make: Any, one_path: Path) -> None:
    with pytest.raises(ValueError, match="pin_memory=True with device='cuda': minibatches are in the memory"):
        make(one_path, [2], device="cuda", pin_memory=True)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"no pinned memory allocator|accelerator|NVIDIA"):
            make(one_path, [2], pin_memory=True)


class BothWays(AllNeighbors):
    def _sample(self, *seeds: Any) -> Any:
        return super()._sample(*seeds).to_bidirectional()


def test_bidirectional_edges_and_no_hops(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    for data, path, nodes in ((one, one_path, None), (several, several_path, "author")):
        options: dict[str, Any] = {"batch_size": 40, "subgraph_type": "bidirectional"}
        sampler = BothWays(gids.FeatureStore(path), [None, None])
        with gids.pyg.NeighborLoader(path, [-1, -1], nodes, **{"seed": 0} | options) as loader:
            assert_all_same(loader, NodeLoader(data, sampler, input_nodes=nodes, batch_size=40))
        sampler = AllNeighbors(gids.FeatureStore(path), [])
        with gids.pyg.NeighborLoader(path, [], nodes, batch_size=40, seed=0) as loader:
            assert_all_same(loader, NodeLoader(data, sampler, input_nodes=nodes, batch_size=40))


def test_trees_are_those_that_their_seeds_have_alone(one_path: Path) -> None:
    with (
        gids.pyg.NeighborLoader(one_path, [-1, -1], batch_size=20, disjoint=True, seed=0) as loader,
        gids.pyg.NeighborLoader(one_path, [-1, -1], batch_size=1, seed=0) as alone,
    ):
        batch = next(iter(loader))
        for tree, single in zip(range(20), alone, strict=False):
            assert torch.equal(batch.n_id[batch.batch == tree], single.n_id)
            assert torch.equal(batch.e_id[batch.batch[batch.edge_index[1]] == tree], single.e_id)
        assert torch.equal(*batch.batch[batch.edge_index])


@pytest.mark.parametrize("disjoint", [False, True])
def test_induced_edges_are_all_edges_among_the_nodes(one: Data, one_path: Path, disjoint: bool) -> None:
    """Of each tree, if trees are disjoint: these are those of shaDow."""
    options: dict[str, Any] = {"disjoint": disjoint, "subgraph_type": "induced", "batch_size": 20}
    with gids.pyg.NeighborLoader(one_path, [3, 3], torch.arange(60), **{"seed": 0} | options) as loader:
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


def test_times_that_gids_convert_stores(one: Data, several: HeteroData, tmp_path: Path) -> None:
    """The same minibatches as from a table with these times, and no copy of the topology."""
    generator = torch.Generator().manual_seed(6)
    seeds = torch.arange(0, 150, 2)
    times = torch.randint(1000, (75,), generator=generator)
    for number, (data, kinds, nodes) in enumerate(
        ((one, [None], seeds), (several, ["paper", "author"], ("author", seeds)), (one, [], seeds))
    ):
        saved = data.to_dict()
        for kind, count in [(k, data[k].num_nodes if k else PAPERS) for k in kinds] or [
            (None, one.num_edges)
        ]:
            of_kind = saved if kind is None else saved[kind]
            of_kind["time"] = of_kind["when"] = torch.randint(1000, (count,), generator=generator)
        source, path = tmp_path / f"{number}.pt", tmp_path / f"{number}.gids"
        torch.save(saved, source)
        assert main(["convert", str(source), str(path)]) == 0
        for input_time in (times, None) if kinds else (times,):
            options: dict[str, Any] = {"batch_size": 30, "input_time": input_time}
            with (
                gids.pyg.NeighborLoader(
                    path, [2, -1], nodes, time_attr="time", **{"seed": 0} | options
                ) as loader,
                gids.pyg.NeighborLoader(
                    path, [2, -1], nodes, time_attr="when", **{"seed": 0} | options
                ) as other,
            ):
                assert_all_same(loader, other)
    with DatasetWriter(tmp_path / "both.gids") as writer:
        writer.write_times("paper", torch.arange(9))
        edges = edge_list(torch.arange(9), torch.arange(9), num_src=9, num_dst=9)
        writer.write_edges(CITES, edges, times=torch.arange(9))
    with pytest.raises(ValueError, match="time_attr='time': both nodes and edges of both"):
        gids.pyg.NeighborLoader(tmp_path / "both.gids", [2], time_attr="time")
