"""A dataset of every kind of table and array, and its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from datasets import CITES, WRITES

from gids.heat import write_heat
from gids.store import FeatureStore
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

PAPERS, AUTHORS, CITED, WRITTEN = 700, 130, 4000, 1500
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")


def write_rich_dataset(path: Path, *, heterogeneous: bool = True, seed: int = 0) -> Path:
    """Tables of every dtype, of nodes and edges, both scales, an order, times, labels, splits and heat."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def values(count: int, dim: int, dtype: str) -> torch.Tensor:
        found = torch.randint(-100, 100, (count, dim), generator=generator)
        if dtype == "uint8":
            found = found.abs()
        return (found % 2 == 0) if dtype == "bool" else found.to(getattr(torch, dtype))

    with DatasetWriter(path, page_bytes=512) as writer:
        for index, dtype in enumerate(DTYPES):
            writer.write_table("node", "paper", dtype, values(PAPERS, 3 + 11 * index, dtype))
        floats = torch.randn(PAPERS, 37, generator=generator)
        writer.write_table("node", "paper", "by_row", floats, dtype=torch.int8, scale="row")
        writer.write_table("node", "paper", "by_column", floats, dtype=torch.int8, scale="column")
        writer.write_table("node", "paper", "ordered", floats, order=rng.permutation(PAPERS))
        writer.write_table("node", "paper", "long", torch.randn(PAPERS, 200, generator=generator))
        writer.write_times("paper", torch.randint(1990, 2020, (PAPERS,), generator=generator))
        ends = edge_list(
            *torch.randint(PAPERS, (2, CITED), generator=generator), num_src=PAPERS, num_dst=PAPERS
        )
        times = torch.randint(1 << 40, (CITED,), generator=generator)
        writer.write_edges(CITES, ends, times=times, index_dtype="int32")
        writer.write_table("edge", CITES, "weight", values(CITED, 5, "float32"))
        writer.write_table("edge", CITES, "kind", values(CITED, 2, "int8"))
        if heterogeneous:
            writer.write_table("node", "author", "feat", values(AUTHORS, 40, "bfloat16"))
            pairs = (torch.randint(n, (WRITTEN,), generator=generator) for n in (AUTHORS, PAPERS))
            writer.write_edges(WRITES, edge_list(*pairs, num_src=AUTHORS, num_dst=PAPERS))
            writer.write_table("edge", WRITES, "place", values(WRITTEN, 1, "uint8"))
            back = torch.randint(AUTHORS, (300,), generator=generator).sort().values
            indptr = np.searchsorted(back.numpy(), np.arange(AUTHORS + 1))
            sources = torch.randint(PAPERS, (300,), generator=generator)
            writer.write_graph(("paper", "by", "author"), torch.from_numpy(indptr), sources, num_src=PAPERS)
            writer.write_table("edge", ("paper", "by", "author"), "w", values(300, 1, "float64"))
            writer.write_split("author", "val", torch.arange(0, AUTHORS, 7))
        writer.write_labels("paper", torch.randint(9, (PAPERS,), generator=generator))
        writer.write_split("paper", "train", torch.randperm(PAPERS, generator=generator)[:200])
        writer.write_split("paper", "test", torch.arange(600, 650))
    write_heat(path, "sampled", {"paper": rng.random(PAPERS)})
    return path


class Datasets:
    """A dataset, and its parts by their number."""

    def __init__(self, folder: Path, *, heterogeneous: bool = False) -> None:
        self.whole = write_rich_dataset(folder / "whole.gids", heterogeneous=heterogeneous)
        self._folder = folder

    def parts(self, count: int) -> Path:
        out = self._folder / f"parts-{count}"
        if not out.exists():
            partition(self.whole, out, count)
        return out

    def tables(self, kind: str | None = None) -> list[str]:
        return [t.name for t in FeatureStore(self.whole).tables.values() if kind in (None, t.kind)]
