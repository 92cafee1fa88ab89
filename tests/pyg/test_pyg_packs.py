"""gids.pyg.NeighborLoader by packs: the same Data as by random reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_model import AUTHORS, CITES, WRITES, WRITTEN
from torch_geometric.data import Data, HeteroData

import gids
import gids.pyg
from gids.loader import pack_switch, sampled_ahead


def epochs(path: Path, reads: Any, counts: Any, nodes: Any, **options: Any) -> list[list[Data | HeteroData]]:
    with (
        gids.open(path, memory=64 << 20, reads=reads) as source,
        gids.pyg.NeighborLoader(
            source, counts, nodes, batch_size=16, shuffle=True, seed=3, **options
        ) as loader,
    ):
        found = [list(loader) for _ in range(2)]
        assert loader.stats()["packs"]["minibatches"] == (0 if reads == "random" else 2 * len(loader))
    return found


def assert_same(a: Any, b: Any) -> None:
    """Two dictionaries of to_dict()."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.mark.parametrize("options", [{}, {"replace": True}], ids=str)
@pytest.mark.parametrize("typed", [False, True])
def test_data_is_that_of_random_reads(
    one_path: Path,
    several_path: Path,
    typed: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Any = {CITES: [3, 0], WRITES: [3, 2], WRITTEN: [2, 2]} if typed else [4, 3]
    nodes = ("author", torch.arange(AUTHORS)) if typed else None
    path = several_path if typed else one_path
    expected = epochs(path, "random", counts, nodes, **options)
    monkeypatch.setattr(pack_switch, "EARLY", 2)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", 3)
    for epoch, expected_epoch in zip(epochs(path, "pack", counts, nodes, **options), expected, strict=True):
        for a, b in zip(epoch, expected_epoch, strict=True):
            assert_same(a.to_dict(), b.to_dict())
