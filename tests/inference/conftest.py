"""Fixtures of this folder: a homogeneous and a heterogeneous dataset, and their contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_model import COUNTS, RELATIONS, uneven_in_edges

from gids.write import DatasetWriter


@pytest.fixture(autouse=True)
def _small_blocks(one_thread: None) -> None: ...


@pytest.fixture(scope="session")
def rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    dims = {"paper": 100, "author": 24, "field": 7, "nobody": 5}
    return {t: torch.randn(COUNTS[t], dim, generator=generator) for t, dim in dims.items()}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, torch.Tensor]) -> Path:
    """The folder of both datasets. Each test has copies of its own."""
    folder = tmp_path_factory.mktemp("inference")
    with DatasetWriter(folder / "one.gids", stripe=2) as writer:
        writer.write_table("node", "_N", "feat", rows["paper"])
        writer.write_graph(("_N", "_E", "_N"), *uneven_in_edges(1500, 1500, 1))
    with DatasetWriter(folder / "mag.gids") as writer:
        for ntype, values in rows.items():
            writer.write_table("node", ntype, "feat", values)
        for seed, relation in enumerate(RELATIONS):
            src, dst = COUNTS[relation[0]], COUNTS[relation[2]]
            indptr, indices = uneven_in_edges(src, dst, seed)
            ids = np.random.default_rng(seed).permutation(len(indices)) if relation == RELATIONS[3] else None
            writer.write_graph(relation, indptr, indices, num_src=src, edge_ids=ids)
    return folder


@pytest.fixture
def one_type(tmp_path: Path, written: Path) -> Path:
    return shutil.copytree(written / "one.gids", tmp_path / "one.gids")


@pytest.fixture
def several_types(tmp_path: Path, written: Path) -> Path:
    return shutil.copytree(written / "mag.gids", tmp_path / "mag.gids")
