"""A loader without seed= draws it from torch's default generator. An iterator uses up an epoch as it begins.

The model is the generator itself: torch.manual_seed(n) and one draw.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gids
from gids.sampler import Neighbor
from gids.write import DatasetWriter, edge_list

NODES, EDGES = 90, 600


def node_loader(path: Path, **options: Any) -> Any:
    return gids.NodeLoader(path, torch.arange(NODES), [3], batch_size=20, shuffle=True, **options)


def edge_loader(path: Path, **options: Any) -> Any:
    return gids.EdgeLoader(path, None, [3], batch_size=200, shuffle=True, **options)


every_loader = pytest.mark.parametrize("open_loader", [node_loader, edge_loader])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    src, dst = torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("seeds") / "t.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "_N", "feat", torch.arange(NODES * 2.0).view(-1, 2))
        writer.write_edges(("_N", "_E", "_N"), edge_list(src, dst, num_src=NODES, num_dst=NODES))
    return path


def drawn(seed: int) -> int:
    """The first number of 63 bits that torch draws after manual_seed(seed)."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)))


def seen(minibatches: Any) -> list[list[int]]:
    """The numbers of each minibatch's seeds and nodes."""
    names = ("seeds", "pairs", "input_nodes")
    return [
        [n for a in names if hasattr(m, a) for n in getattr(m, a).flatten().tolist()] for m in minibatches
    ]


@every_loader
def test_the_seed_is_drawn_when_a_loader_is_made(path: Path, open_loader: Callable[..., Any]) -> None:
    torch.manual_seed(7)
    with open_loader(path) as first, open_loader(path) as second:
        after = torch.rand(3)
        assert first.seed == drawn(7) != second.seed
        assert f"seed {first.seed}" in repr(first)
        assert first.stats()["seed"] == first.state_dict()["made_with"]["seed"] == first.seed
        epochs = [seen(first), seen(first), seen(second)]
        assert all(a != b for a, b in zip(epochs, epochs[1:] + epochs[:1], strict=True))
        with open_loader(path, seed=drawn(7)) as given:
            assert [seen(given), seen(given)] == epochs[:2]
    torch.manual_seed(7)
    open_loader(path, seed=3).close()
    open_loader(path).close(), open_loader(path).close()
    assert torch.equal(torch.rand(3), after)  # a given seed and an epoch draw nothing


@every_loader
def test_a_state_brings_the_drawn_seed(path: Path, open_loader: Callable[..., Any]) -> None:
    with open_loader(path) as loader:
        whole = [*seen(loader), *seen(loader)]
    with open_loader(path, seed=loader.seed) as loader:
        epoch = iter(loader)
        assert seen([next(epoch), next(epoch)]) == whole[:2]
        state = json.loads(json.dumps(loader.state_dict()))
    with open_loader(path) as resumed:
        resumed.load_state_dict(state)
        assert resumed.seed == loader.seed
        assert resumed.state_dict() == state
        assert [*seen(resumed), *seen(resumed)] == whole[2:]
    with open_loader(path, seed=5) as other:
        with pytest.raises(ValueError, match=r"seed = \d+, and this one has 5"):
            other.load_state_dict(state)


def test_an_iterator_without_a_minibatch_uses_up_no_epoch(path: Path) -> None:
    with node_loader(path, seed=0) as loader:
        epochs = [seen(loader) for _ in range(3)]
    with node_loader(path, seed=0) as loader:
        kept, closed = iter(loader), iter(loader)
        iter(loader)
        closed.close()
        assert (loader.epoch, loader.state_dict()["step"]) == (0, 0)
        assert list(closed) == []
        assert seen(loader) == epochs[0]
        iter(loader)
        assert seen([next(kept)]) == epochs[1][:1]  # it begins now
        assert (loader.epoch, loader.state_dict()["step"]) == (2, 1)
        assert seen(loader) == epochs[2]
        assert seen(kept) == epochs[1][1:]
    with node_loader(path, seed=0) as loader:  # in step, as of two loaders
        pairs = list(zip(loader, loader, strict=True))
        assert [seen(minibatches) for minibatches in zip(*pairs, strict=True)] == epochs[:2]
        state = loader.state_dict() | {"epoch": 1, "step": 1}
        loader.load_state_dict(state)
        iter(loader)
        assert loader.state_dict() == state
        assert seen(loader) == epochs[1][1:]


def test_a_sampler_draws_the_seed_of_each_call(path: Path) -> None:
    graph, seeds, sampler = gids.FeatureStore(path).graph(), torch.arange(NODES), Neighbor([3])

    def edges(**numbers: Any) -> list[Any]:
        minibatches = [sampler.sample(graph, seeds, **numbers)]
        minibatches += sampler.sample_bulk(graph, [seeds, seeds], **numbers)
        return [m.blocks[0].indices.tolist() for m in minibatches]  # type: ignore[union-attr]

    torch.manual_seed(7)
    first, second = edges(), edges()
    assert first[0] != first[1] != second[1]
    assert edges(seed=drawn(7))[0] == first[0]
    torch.manual_seed(7)
    assert [edges(), edges()] == [first, second]
    assert edges(seed=3) == edges(seed=3)
