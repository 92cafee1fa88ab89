"""time_attr and disjoint of gids.pyg's loaders on a device, and negatives with times on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_model import AUTHORS, CITES, PAPERS, WRITES, WRITTEN, assert_same, stores
from torch_geometric.data import Data, HeteroData

import gids.pyg
from gids.cuda import Device
from gids.write import DatasetWriter, edge_list

LATEST = 1000
COUNTS = {"paper": PAPERS, "author": AUTHORS}


def timed(path: Path, data: Data | HeteroData) -> Path:
    """A dataset of data whose nodes have the times "when" and whose edges have the times "since"."""
    generator = torch.Generator().manual_seed(5)

    def times(count: int) -> torch.Tensor:
        return torch.randint(LATEST, (count, 1), generator=generator)

    with DatasetWriter(path) as writer:
        for ntype, count in COUNTS.items():
            if isinstance(data, HeteroData) or ntype == "paper":
                writer.write_table("node", ntype, "feat", stores(data).get(ntype, data).x)
                writer.write_table("node", ntype, "when", times(count))
        for relation in (CITES, WRITES, WRITTEN) if isinstance(data, HeteroData) else (CITES,):
            row, col = stores(data).get(relation, data).edge_index
            writer.write_table("edge", relation, "since", times(len(row)))
            num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
            writer.write_edges(relation, edge_list(row, col, num_src=num_src, num_dst=num_dst))
    return path


@pytest.fixture(scope="module")
def one_timed(tmp_path_factory: pytest.TempPathFactory, one: Data) -> Path:
    return timed(tmp_path_factory.mktemp("times") / "one.gids", one)


@pytest.fixture(scope="module")
def several_timed(tmp_path_factory: pytest.TempPathFactory, several: HeteroData) -> Path:
    return timed(tmp_path_factory.mktemp("times") / "several.gids", several)


def test_trees_of_a_device_are_those_of_the_cpu(
    one_timed: Path, several_timed: Path, device: Device, cuda_is: Callable[[Device], None]
) -> None:
    cuda_is(device)
    times = torch.randint(LATEST, (70,), generator=torch.Generator().manual_seed(1))
    by_time: dict[str, Any] = {"time_attr": "when", "input_time": times}
    for path, seeds in ((one_timed, torch.arange(70)), (several_timed, ("author", torch.arange(70)))):
        for options in (
            {"disjoint": True},
            {"disjoint": True, "subgraph_type": "bidirectional"},
            {"time_attr": "when"},
            {**by_time, "replace": True},
            {**by_time, "temporal_strategy": "last", "transform_sampler_output": lambda output: output},
            {**by_time, "time_attr": "since", "temporal_strategy": "last"},
            {**by_time, "time_attr": "since", "weight_attr": "since", "subgraph_type": "bidirectional"},
        ):
            given: dict[str, Any] = {"batch_size": 30, "shuffle": True, **options}
            with gids.pyg.NeighborLoader(path, [3, -1], seeds, **given) as loader:
                expected = list(loader)
            with gids.pyg.NeighborLoader(path, [3, -1], seeds, device="cuda", **given) as loader:
                for batch, same in zip(loader, expected, strict=True):
                    for storage in stores(batch).values():
                        for name, value in storage.items():
                            if isinstance(value, torch.Tensor) and name != "input_id":
                                assert value.device == device.torch_device, name
                    assert_same(batch.cpu(), same)


def test_links_with_times_on_a_device_are_those_of_the_cpu(
    one: Data,
    one_timed: Path,
    several_timed: Path,
    device: Device,
    cuda_is: Callable[[Device], None],
) -> None:
    cuda_is(device)
    for path, edges, count in ((one_timed, one.edge_index[:, :90], 90), (several_timed, WRITES, 2400)):
        times = torch.randint(LATEST, (count,), generator=torch.Generator().manual_seed(2))
        for options in (
            {"disjoint": True, "neg_sampling": "triplet"},
            {"time_attr": "when", "edge_label_time": times, "neg_sampling": "binary"},
            {"time_attr": "since", "edge_label_time": times, "neg_sampling": "triplet"},
        ):
            found = []
            for name in ("cpu", "cuda"):
                with gids.pyg.LinkNeighborLoader(
                    path, [3, 2], edges, batch_size=40, shuffle=True, device=name, **options
                ) as loader:
                    found.append([batch.cpu() for batch, _ in zip(loader, range(2), strict=False)])
            for batch, same in zip(*found, strict=True):
                assert_same(batch, same)


def test_induced_subgraphs_are_refused_on_a_device(one_path: Path) -> None:
    with pytest.raises(ValueError, match="subgraph_type='induced' is not supported with device='cuda': use"):
        gids.pyg.NeighborLoader(one_path, [2], device="cuda", subgraph_type="induced", disjoint=True)
