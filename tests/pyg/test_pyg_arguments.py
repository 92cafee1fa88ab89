"""The arguments of PyG's two loaders in gids.pyg's: which there are, and what some of them do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from host_allocator import HostAllocator
from pyg_model import PAPERS, AllNeighbors, assert_all_same
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.loader import NeighborLoader as PygNeighborLoader

import gids
import gids.pyg
from gids.cli import main

DOCS = Path(__file__).parents[2] / "docs/pyg.md"


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
    named = {name for name in defaults if name not in own and not name.startswith("_")}
    assert named <= listed
    given = {n: defaults[n] for n in named if defaults[n] is not inspect.Parameter.empty}
    ours(one_path, [2], **given).close()


def test_pin_memory_pins_every_tensor_before_the_transform(
    one_path: Path, several_path: Path, pinning: HostAllocator
) -> None:
    seen = []

    def look(data: Data | HeteroData) -> Data | HeteroData:
        tensors = [v for store in data.stores for v in store.values() if isinstance(v, torch.Tensor)]
        assert len(tensors) > 3
        seen.append(all(map(pinning.is_pinned, tensors)))
        return data

    pairs = torch.tensor([[1, 2, 3], [3, 4, 5]])
    for make, path, seeds in (
        (gids.pyg.NeighborLoader, several_path, "author"),
        (gids.pyg.LinkNeighborLoader, one_path, pairs),
    ):
        options: dict[str, Any] = {"batch_size": 20, "seed": 0}
        with make(path, [2, 2], seeds, **options, pin_memory=True, transform=look) as loader:  # type: ignore[operator]
            with make(path, [2, 2], seeds, **options) as other:  # type: ignore[operator]
                assert_all_same(loader, other)
    assert len(seen) > 8
    assert all(seen)


class BothWays(AllNeighbors):
    def _sample(self, *seeds: Any) -> Any:
        return super()._sample(*seeds).to_bidirectional()


def test_bidirectional_edges_and_no_hops(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    for data, path, nodes in ((one, one_path, None), (several, several_path, "author")):
        store, options = gids.FeatureStore(path), {"input_nodes": nodes, "batch_size": 100}
        given: dict[str, Any] = {"subgraph_type": "bidirectional", "seed": 0}
        with gids.pyg.NeighborLoader(path, [-1, -1], **options, **given) as loader:
            assert_all_same(loader, NodeLoader(data, BothWays(store, [None, None]), **options))
        with gids.pyg.NeighborLoader(path, [], **options, seed=0) as loader:
            assert_all_same(loader, NodeLoader(data, AllNeighbors(store, []), **options))


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
    options: dict[str, Any] = {"disjoint": disjoint, "subgraph_type": "induced", "batch_size": 20, "seed": 0}
    with gids.pyg.NeighborLoader(one_path, [3, 3], torch.arange(20), **options) as loader:
        [batch] = loader
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


@pytest.mark.parametrize("kind", ["nodes", "edges"])
def test_times_that_gids_convert_stores(one: Data, tmp_path: Path, kind: str) -> None:
    """The same minibatches as from a table with these times."""
    generator = torch.Generator().manual_seed(6)
    times = torch.randint(1000, (75,), generator=generator)
    saved = one.to_dict()
    count = PAPERS if kind == "nodes" else one.num_edges
    saved["time"] = saved["when"] = torch.randint(1000, (count,), generator=generator)
    source, path = tmp_path / "data.pt", tmp_path / "data.gids"
    torch.save(saved, source)
    assert main(["convert", str(source), str(path)]) == 0
    for input_time in (times, None) if kind == "nodes" else (times,):
        options: dict[str, Any] = {"batch_size": 30, "input_time": input_time, "seed": 0}
        seeds = torch.arange(0, 150, 2)
        with (
            gids.pyg.NeighborLoader(path, [2, -1], seeds, time_attr="time", **options) as loader,
            gids.pyg.NeighborLoader(path, [2, -1], seeds, time_attr="when", **options) as other,
        ):
            assert_all_same(loader, other)
