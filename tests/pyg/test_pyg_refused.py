"""What gids.pyg refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_model import CITES, PAPERS
from torch_geometric.data import Data
from torch_geometric.data.graph_store import EdgeAttr
from torch_geometric.sampler import NegativeSampling
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gids
from gids.pyg import LinkNeighborLoader, MappedFeatures, MappedGraph, NeighborLoader
from gids.pyg.hops import HopSampler
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

LOADERS = NeighborLoader, LinkNeighborLoader


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, one: Data) -> Path:
    """A dataset with tables that are neither times nor weights."""
    path = tmp_path_factory.mktemp("wrong") / "wrong.gids"
    count = one.num_edges
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "two", torch.ones(PAPERS, 2, dtype=torch.int64))
        writer.write_table("edge", CITES, "pairs", torch.rand(count, 2))
        writer.write_table("edge", CITES, "float", torch.rand(count, 1))
        writer.write_table("edge", CITES, "below", -torch.rand(count, 1))
        edges = edge_list(*one.edge_index, num_src=PAPERS, num_dst=PAPERS)
        writer.write_times("paper", torch.arange(PAPERS))
        writer.write_edges(CITES, edges, times=torch.arange(count))
    return path


@pytest.fixture(scope="module")
def paths(
    one_path: Path, several_path: Path, wrong: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("refused")
    with DatasetWriter(folder / "nodes.gids") as writer:
        writer.write_table("node", "paper", "feat", torch.ones(3, 2))
    with DatasetWriter(folder / "x.gids") as writer:
        writer.write_table("node", "paper", "x", torch.ones(PAPERS, 2))
    partition(one_path, folder / "parts", 2)
    found = {"one": one_path, "several": several_path, "wrong": wrong, "nodes": folder / "nodes.gids"}
    return found | {"x": folder / "x.gids", "part": folder / "parts/part-000.gids"}


Case = tuple[type[Exception], str, str, Any, Any, dict[str, Any]]
TIMES = torch.zeros(PAPERS, dtype=torch.int64)
NODES: list[Case] = [
    (gids.FormatError, "nodes.gids has no topology", "nodes", [2], None, {}),
    (ValueError, r"part-000\.gids is part 0 of 2: .*open\(\)", "part", [2], None, {}),
    (ValueError, r"num_neighbors=\[-2\]; give a number", "one", [-2], None, {}),
    (TypeError, "give a list, a number per hop$", "one", {CITES: [2]}, None, {}),
    (ValueError, "neighbors for edge type", "several", {CITES: [2]}, "paper", {}),
    (TypeError, r"NeighborLoader\(data, num_neighbors, input_nodes\)", "one", torch.tensor([4]), [2, 2], {}),
    (ValueError, "must be a split, a node type", "several", [2], None, {}),
    (KeyError, "no split and no node type 'venue'", "several", [2], "venue", {}),
    (ValueError, r"is bool\[3\]; a mask is bool\[600\]", "one", [2], torch.ones(3, dtype=torch.bool), {}),
    (IndexError, "ids run from 0 to 599", "one", [2], [600], {}),
    (ValueError, "for each of the 600 seeds", "one", [2], None, {"input_id": torch.arange(6)}),
    (ValueError, "subgraph_type='both' must be", "one", [2], None, {"subgraph_type": "both"}),
    (ValueError, "with device='cuda'", "one", [2], None, {"subgraph_type": "induced", "device": "cuda"}),
    (ValueError, "pin_memory=True with device='cuda'", "one", [2], None, {"device": "cuda", "pin_memory": 1}),
    (ValueError, "have the name 'y' of 'paper', which", "one", [2], None, {"tables": {"y": "paper.feat"}}),
    (KeyError, "weight_attr='w': one.gids has no edges", "one", [2], None, {"weight_attr": "w"}),
    (KeyError, "time_attr='t': neither nodes nor edges", "one", [2], None, {"time_attr": "t"}),
    (ValueError, "strategy='first' must be", "one", [2], None, {"temporal_strategy": "first"}),
    (ValueError, "one number for each of the", "wrong", [2], None, {"weight_attr": "pairs"}),
    (ValueError, "must be 0 or more", "wrong", [2], None, {"weight_attr": "below"}),
    (ValueError, "time_attr='time': both nodes and edges of", "wrong", [2], None, {"time_attr": "time"}),
    (ValueError, r"'two' of 'paper' has shape \[600, 2\]; it must", "wrong", [2], None, {"time_attr": "two"}),
    (TypeError, r"torch\.float32; times must be integers", "wrong", [2], None, {"time_attr": "float"}),
    (ValueError, "input_time= needs time_attr=", "one", [2], None, {"input_time": TIMES}),
    (ValueError, "strategy='last' needs time_attr", "one", [2], None, {"temporal_strategy": "last"}),
]


@pytest.mark.parametrize(
    ("error", "said", "path", "counts", "nodes", "options"), NODES, ids=[case[1] for case in NODES]
)
def test_arguments_of_a_neighbor_loader(
    paths: dict[str, Path], error: Any, said: str, path: str, counts: Any, nodes: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=said):
        NeighborLoader(paths[path], counts, nodes, **{"seed": 0} | options)


EDGES = torch.arange(18).view(2, 9)
SHORT = NegativeSampling("binary", dst_weight=torch.ones(3))
BELOW = NegativeSampling("binary", dst_weight=-torch.ones(PAPERS))
TRIPLETS = {"neg_sampling": "triplet", "edge_label": torch.ones(9)}
LINKS: list[tuple[type[Exception], str, str, Any, dict[str, Any]]] = [
    (ValueError, "must be an edge type, or", "several", EDGES, {}),
    (KeyError, r"0 edge types of several.gids match \('paper', 'x'\)", "several", ("paper", "x"), {}),
    (TypeError, r"float32 of shape \[2, 3\]; give int64", "one", torch.ones(2, 3), {}),
    (IndexError, "sources of edge_label_index run from", "one", EDGES + PAPERS - 1, {}),
    (ValueError, "_time' is set, but 'time_attr' is not", "one", EDGES, {"edge_label_time": 1}),
    (ValueError, "leave edge_label out", "one", EDGES, TRIPLETS),
    (ValueError, "_ratio=, not both", "one", EDGES, {"neg_sampling": "binary", "neg_sampling_ratio": 1.0}),
    (ValueError, "one number for each of the 600 nodes", "one", EDGES, {"neg_sampling": SHORT}),
    (ValueError, "must be 0 or more, and not all 0", "one", EDGES, {"neg_sampling": BELOW}),
]


@pytest.mark.parametrize(
    ("error", "said", "path", "edges", "options"), LINKS, ids=[case[1] for case in LINKS]
)
def test_arguments_of_a_link_loader(
    paths: dict[str, Path], error: Any, said: str, path: str, edges: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=said):
        LinkNeighborLoader(paths[path], [2], edges, **options)


NOT_TAKEN: list[tuple[str, Any, str]] = [
    ("neighbor_sampler", object(), "PyG's own loaders take it, with gids.pyg.MappedFeatures"),
    ("batch_sampler", [[1, 2]], "give the seeds in your order"),
    ("custom_cls", Data, "in transform="),
    ("directed", False, "give subgraph_type='induced'"),
    ("generator", torch.Generator(), "give seed="),
]


@pytest.mark.parametrize("make", LOADERS)
def test_data_in_memory_and_arguments_that_gids_does_not_take(make: Any, one: Data, one_path: Path) -> None:
    for data in (one, (MyFeatureStore(), MyGraphStore()), 5):
        said = f"data is {type(data).__name__}, and gids.pyg.{make.__name__} takes a dataset on disk: gids"
        with pytest.raises(TypeError, match=re.escape(said) + ".*PyG's own loader for Data"):
            make(data, [2])
    for name, value, cure in NOT_TAKEN:
        with pytest.raises(ValueError, match=rf"gids\.pyg\.{make.__name__} does not take {name}=: .*{cure}"):
            make(one_path, [2], **{name: value})
    for name, said in (("window", "an option of gids.open"), ("trasform", "did you mean 'transform'")):
        with pytest.raises(TypeError, match=f"has no argument '{name}'.*{said}"):
            make(one_path, [2], **{name: 1})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"no pinned memory allocator|accelerator|NVIDIA"):
            make(one_path, [2], pin_memory=True)


def test_two_tables_of_one_name(paths: dict[str, Path]) -> None:
    x = gids.FeatureStore(paths["x"]).table("x")
    with pytest.raises(ValueError, match="two tables would have the name 'x' of 'paper': give names"):
        NeighborLoader(paths["one"], [3], tables=["paper.feat", x])


@pytest.mark.parametrize(
    ("error", "said", "options"),
    [
        (ValueError, "the seeds need times, because time_attr= names times of edges", {"time_attr": "since"}),
        (TypeError, r"is torch\.float32: give int64", {"time_attr": "since", "input_time": TIMES - 6.7}),
    ],
)
def test_seeds_without_times_when_they_are_sampled(
    one: Data, tmp_path: Path, error: Any, said: str, options: dict[str, Any]
) -> None:
    with DatasetWriter(tmp_path / "d.gids") as writer:
        writer.write_table("edge", CITES, "since", torch.arange(one.num_edges)[:, None])
        writer.write_edges(CITES, edge_list(*one.edge_index, num_src=PAPERS, num_dst=PAPERS))
    with NeighborLoader(tmp_path / "d.gids", [2], seed=0, **options) as loader:
        with pytest.raises(error, match=said):
            next(iter(loader))


MASK, NO_PAPER, PUT = torch.ones(3, dtype=torch.bool), torch.tensor([PAPERS]), torch.zeros(3)
STORES: list[tuple[type[Exception], str, Callable[[MappedFeatures, MappedGraph], Any]]] = [
    (
        KeyError,
        r"no 'z' of 'paper' \(it has 'paper' 'x'",
        lambda f, _: f.get_tensor("paper", "z", index=None),
    ),
    (IndexError, "out of range", lambda f, _: f.get_tensor("paper", "x", index=NO_PAPER)),
    (IndexError, "out of range", lambda f, _: f.get_tensor("paper", "y", index=-PAPERS - 1)),
    (IndexError, "the mask has shape", lambda f, _: f.get_tensor("paper", "x", index=MASK)),
    (TypeError, "cannot be changed", lambda f, _: f.put_tensor(PUT, "paper", "x", index=None)),
    (TypeError, "cannot be changed", lambda _, g: g.put_edge_index((PUT, PUT), EdgeAttr(CITES, "coo"))),
    (KeyError, "no relation", lambda _, g: g.get_edge_index(("paper", "x", "paper"), "csc")),
    (KeyError, "several types", lambda _, g: g.get_edge_index(None, "csc")),
]


def test_calls_of_stores(paths: dict[str, Path]) -> None:
    stores = MappedFeatures(paths["several"]), MappedGraph(paths["several"])
    for error, said, call in STORES:
        with pytest.raises(error, match=said):
            call(*stores)
    for kind in (MappedFeatures, MappedGraph):
        with pytest.raises(ValueError, match=r"part-000\.gids is part 0 of 2: .*open\(\)"):
            kind(paths["part"])


def test_numbers_of_hops() -> None:
    by_type: list[Any] = [{("a", "to", "a"): 3}, {("a", "x", "a"): [1], ("a", "y", "a"): []}]
    for counts in ([1.5], [True], [-2], *by_type):
        with pytest.raises(ValueError, match="give a number for each hop"):
            HopSampler(counts)
