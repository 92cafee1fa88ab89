"""Random tables by packs: every dtype, order, page size and number of shards, of one dataset or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges, same_bits
from packs_example import cut_small, open_source

import gids
from gids.write import DatasetWriter

Ids = dict[str, torch.Tensor]
CITES = ("paper", "cites", "paper")


def random_values(rng: np.random.Generator, count: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows, and how they are written."""
    shape = [count, *rng.integers(1, [40, 8][: rng.integers(1, 3)]).tolist()]
    if rng.random() < 0.1:
        shape = [count, 1500]  # longer than a page
    values = torch.from_numpy(rng.standard_normal(shape, np.float32))
    options: dict[str, Any] = {}
    kind = rng.integers(9)
    if kind == 0:
        options = {"dtype": torch.int8, "scale": "row"}
    elif kind == 1:
        options = {"dtype": torch.int8, "scale": "column"}
    elif kind == 2:
        values = values > 0
    elif kind == 3:
        values = (values * 1e6).to(torch.int64)
    elif kind < 6:
        values = values.to([torch.float16, torch.bfloat16][kind - 4])
    elif kind == 6:
        values = values.to(torch.float64)
    if rng.random() < 0.3:
        options["order"] = rng.permutation(count)
    return values, options


def write(path: Path, rng: np.random.Generator, counts: dict[str, int], edges: Any) -> None:
    pages = int(rng.choice([512, 4096]))
    with DatasetWriter(path, stripe=int(rng.integers(1, 6)), page_bytes=pages) as writer:
        for ntype, count in counts.items():
            for i in range(rng.integers(1, 4)):
                values, options = random_values(rng, count)
                writer.write_table("node", ntype, f"f{i}", values, **options)
        writer.write_graph(CITES, *edges, num_src=counts["paper"])
        values, options = random_values(rng, len(edges[1]))
        writer.write_table("edge", CITES, "w", values, **{**options, "order": None})


def random_minibatches(rng: np.random.Generator, tables: dict[str, int]) -> list[Ids]:
    """Tables of a type are read by the same ids, mostly; some minibatches leave tables out."""
    together = rng.random() < 0.7
    found = []
    for _ in range(rng.integers(1, 40)):
        by_type: dict[str, torch.Tensor] = {}
        minibatch = {}
        for name, count in tables.items():
            ntype = name.split(":")[-1].rsplit(".", 1)[0]
            ids = (count * rng.random(rng.integers(0, 400) if count else 0) ** 2).astype(np.int64)
            mine = torch.from_numpy(ids)
            minibatch[name] = by_type.setdefault(ntype, mine) if together else mine
        if rng.random() < 0.1:
            del minibatch[list(minibatch)[rng.integers(len(minibatch))]]
        found.append(minibatch)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", [0, 1, 14, 45, 2])
def test_rows_are_those_of_the_table(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    counts = {"paper": int(rng.integers(300, 2500)), "author": int(rng.integers(1, 300)), "one": 1}
    edges = random_in_edges(counts["paper"], counts["paper"], seed)
    paths = [tmp_path / "a.gids", tmp_path / "b.gids"][: rng.integers(1, 3)]
    for path in paths:
        write(path, rng, counts, edges)
    if rng.random() < 0.7:
        cut_small(monkeypatch, minibatches=int(rng.integers(1, 12)), packs=int(rng.integers(1, 4)))
    source = open_source(
        paths if len(paths) > 1 else paths[0],  # type: ignore[arg-type]
        "pack",
        64 << 20,
        check_crc=bool(rng.integers(2)),
        direct=bool(rng.integers(2)),
        threads=int(rng.integers(1, 4)),
        scratch_bytes=int(rng.integers(1 << 20, 1 << 28)),
    )
    with source:
        chosen = {
            f"{i}:{name}": store.table(name) for i, store in enumerate(source.stores) for name in store.tables
        }
        dtype = [None, torch.float32, torch.float16][rng.integers(3)]
        if dtype is not None:
            chosen = {
                name: t for name, t in chosen.items() if t.dtype.is_floating_point and t.dtype.itemsize < 8
            }
        loader = gids.FeatureLoader(source, chosen or list(source.store.tables), dtype=dtype)
        tables = {t.name: t for t in loader.tables}
        expected = {
            name: t.read_rows(range(t.row_count)).to(dtype or t.dtype) if t.row_count else None
            for name, t in tables.items()
        }
        print(
            seed,
            counts,
            {name: (t.dtype, t.shape, t.order is not None) for name, t in tables.items()},
        )
        for _ in range(2):
            batches = random_minibatches(rng, {name: t.row_count for name, t in tables.items()})
            found = 0
            for minibatch, features in loader.attach(batches, lambda ids: ids, count=len(batches)):
                asked = batches[found]
                assert minibatch.keys() == asked.keys() == features.keys()
                for name, ids in asked.items():
                    assert torch.equal(minibatch[name], ids)
                    assert same_bits(features[name], expected[name][ids]), name
                found += 1
            assert found == len(batches)
        assert loader.stats()["packs"]["minibatches"] > 0


def test_tables_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "empty.gids"
    with DatasetWriter(path) as writer:
        writer.add_nodes("paper", 40)
        writer.write_graph(CITES, torch.zeros(41, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        writer.write_table("edge", CITES, "w", torch.empty(0, 3))
    [table] = gids.FeatureStore(path).tables
    with open_source(path, "pack", 64 << 20) as source:
        loader = gids.FeatureLoader(source, [table])
        batches = [{table: torch.empty(0, dtype=torch.int64)}] * 9
        found = [rows[table].shape for _, rows in loader.attach(batches, lambda ids: ids, count=9)]
        assert found == [(0, 3)] * 9
        assert loader.stats()["packs"]["minibatches"] > 0
