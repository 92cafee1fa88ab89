"""A small dataset with two tables, and minibatches that read both: what the tests of FeatureLoader share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import in_edges

from gids.write import DatasetWriter

ROWS, DIM = 3000, 256  # a row is 1 KiB: four to a page
TABLES = ["paper.feat", "author.feat"]
Ids = dict[str, torch.Tensor]


def make_source() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "paper.feat": torch.randn(ROWS, DIM, generator=generator),
        "author.feat": torch.randn(500, 1024, generator=generator).to(torch.bfloat16),
    }


def write(path: Path, source: dict[str, torch.Tensor], **options: Any) -> Path:
    with DatasetWriter(path, stripe=2, **options) as writer:
        for name, rows in source.items():
            writer.write_table("node", name.split(".")[0], "feat", rows)
        rng = np.random.default_rng(0)
        for relation, src, dst in (
            (("paper", "cites", "paper"), ROWS, ROWS),
            (("author", "writes", "paper"), 500, ROWS),
        ):
            edges = in_edges(rng.integers(0, 8, dst), src, rng, power=3)
            writer.write_graph(relation, *edges, num_src=src)
    return path


def minibatches(count: int, seed: int = 0, *, most: int = 600) -> list[Ids]:
    """most: papers in one of them."""
    rng = np.random.default_rng(seed)

    def minibatch() -> Ids:
        papers = (ROWS * rng.random(rng.integers(0, most)) ** 2).astype(np.int64)
        authors = rng.permutation(500)[: rng.integers(0, most // 6)]
        return {
            "paper.feat": torch.from_numpy(papers),
            "author.feat": torch.from_numpy(authors),
        }

    return [minibatch() for _ in range(count)]


def ids_of(minibatch: Ids) -> Ids:
    return minibatch


def check(source: Ids, minibatch: Ids, features: Ids, dtype: torch.dtype | None = None) -> None:
    """Features are the source's rows, bit for bit; converted where a dtype was asked for."""
    assert features.keys() == minibatch.keys()
    for name, ids in minibatch.items():
        expected = source[name][ids.cpu()]
        assert torch.equal(features[name].cpu(), expected.to(dtype or expected.dtype))
        assert features[name].dtype == (dtype or expected.dtype)
