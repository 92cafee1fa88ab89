"""Tables stored in fewer bits through every loader: the rows of the model, in the dtype that is wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice
from model import int8_with_a_scale
from open_options import feature_loader

import gids
from gids.cuda import Device
from gids.store.dtypes import TABLE_DTYPES
from gids.store.names import Relation
from gids.write import DatasetWriter

PAPERS, DIM = 1500, 60
CITES: Relation = ("paper", "cites", "paper")
KINDS: dict[str, tuple[torch.dtype, str | None]] = {
    "half": (torch.float16, None),
    "brain": (torch.bfloat16, None),
    "row": (torch.int8, "row"),
    "column": (torch.int8, "column"),
    "flag": (torch.bool, None),
}
Rows = dict[str, torch.Tensor]


def as_read(values: torch.Tensor, kind: str) -> torch.Tensor:
    """What becomes of values stored so."""
    dtype, scale = KINDS[kind]
    if dtype == torch.bool:
        return values > 0
    if scale is None:
        return values.to(dtype)
    steps, scales = int8_with_a_scale(values.numpy(), scale)
    return torch.from_numpy(steps * scales)


@pytest.fixture(scope="module")
def expected() -> Rows:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(PAPERS, DIM, generator=generator) * torch.rand(PAPERS, 1, generator=generator)
    return {f"paper.{kind}": as_read(values, kind) for kind in KINDS} | {"values": values}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, expected: Rows) -> Path:
    """A table of nodes of each kind, and a table of edges, int8 with a scale per row."""
    path = tmp_path_factory.mktemp("stored") / "a.gids"
    rng = np.random.default_rng(2)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 9, PAPERS))])
    with DatasetWriter(path, page_bytes=1024, stripe=2) as writer:
        for kind, (dtype, scale) in KINDS.items():
            values = expected["paper.flag" if kind == "flag" else "values"]
            writer.write_table("node", "paper", kind, values, dtype=dtype, scale=scale)
        writer.write_graph(CITES, indptr, rng.integers(0, PAPERS, indptr[-1]), num_src=PAPERS)
        weights = torch.linspace(-3, 3, int(indptr[-1]) * 3).view(-1, 3)
        writer.write_table("edge", CITES, "weight", weights, dtype=torch.int8, scale="row")
    return path


def check(features: Rows, ids: Rows, expected: Rows, dtype: torch.dtype | None) -> None:
    for name, rows in features.items():
        as_it_is = dtype is None or expected[name].dtype == torch.bool
        wanted = expected[name] if as_it_is else expected[name].to(dtype)
        assert rows.dtype == wanted.dtype
        assert torch.equal(rows.cpu(), wanted[ids[name].cpu()]), name


def minibatches(count: int, most: int = 200) -> list[Rows]:
    rng = np.random.default_rng(count)
    return [
        {f"paper.{kind}": torch.from_numpy(rng.integers(0, PAPERS, rng.integers(1, most))) for kind in KINDS}
        for _ in range(count)
    ]


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_bytes_that_are_no_bool_come_as_true(
    path: Path, tmp_path: Path, expected: Rows, cuda_is: Callable[[Device], None], where: str
) -> None:
    """In a row from a line, straight from the disk, and without the window."""
    damaged = shutil.copytree(path, tmp_path / "a.gids")
    for shard in (damaged / "tables" / "paper.flag").glob("shard-*.bin"):
        shard.write_bytes(shard.read_bytes().replace(b"\x01", b"\xff"))
    if where == "device":
        cuda_is(EmulatedDevice())
    ids = [{"paper.flag": batch["paper.flag"]} for batch in minibatches(4)]
    for cache_bytes in (0, 20_000):
        with feature_loader(
            damaged,
            ["paper.flag"],
            device="cuda" if where == "device" else "cpu",
            memory=1 << 26,
            device_memory=1 << 26,
            cache=cache_bytes,
            staging=1 << 18,
        ) as loader:
            stream = loader.attach(ids, lambda ids: ids)
            beside = loader.attach(ids, lambda ids: ids)
            for (batch, features), (_, again) in zip(stream, beside, strict=True):
                assert set(features["paper.flag"].view(torch.uint8).unique().tolist()) == {0, 1}
                check(features, batch, expected, None)
                check(again, batch, expected, None)


def test_outputs_count_as_they_are_handed_out(path: Path, expected: Rows) -> None:
    """Four bytes a value, not the one that is stored; 1250 rows of it do not fit, of int8 they would."""
    ids = {"paper.column": torch.arange(PAPERS)}
    row_bytes = 4 * DIM
    with feature_loader(path, ["paper.column"], memory=1 << 26, cache=0) as loader:
        list(loader.attach([ids], lambda ids: ids))
        assert loader.stats()["memory"]["outputs"] >= PAPERS * row_bytes
    with (
        pytest.raises(gids.MemoryBudgetError, match="outputs"),
        feature_loader(path, ["paper.column"], memory=2 * PAPERS * row_bytes) as loader,
    ):
        list(loader.attach([ids], lambda ids: ids))


def documented() -> list[list[list[str]]]:
    """The rows of the table of types in docs/storage.md: for each, the names in its three columns."""
    lines = (Path(__file__).parents[2] / "docs/storage.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| stored as | without `dtype`"))
    rows = [line.strip("| ").split("|") for line in lines[first + 2 :]]
    return [[cell.strip().split(", ") for cell in row] for row in rows[: [len(r) for r in rows].index(1)]]


def test_loaders_return_the_documented_types(tmp_path: Path) -> None:
    stored = {}
    with DatasetWriter(tmp_path / "a.gids") as writer:
        for names, without, with_dtype in documented():
            for name in names:
                scaled, dtype = "with a scale" in name, getattr(torch, name.split()[0])
                values = (
                    torch.rand(20, 3) if scaled or dtype.is_floating_point else torch.ones(20, 3).to(dtype)
                )
                key = name.replace(" ", "-")
                scale = "row" if scaled else None
                writer.write_table("node", "n", key, values, dtype=dtype, scale=scale)
                stored[f"n.{key}"] = dtype, without[0], with_dtype[0]
    assert {dtype for dtype, *_ in stored.values()} == set(TABLE_DTYPES.values())
    for wanted in (None, torch.float32, torch.float16, torch.bfloat16):
        with gids.FeatureLoader(str(tmp_path / "a.gids"), list(stored), dtype=wanted) as loader:
            (_, rows), *_ = loader.attach([0], lambda _: {name: torch.arange(5) for name in stored})
        for name, (dtype, without, with_dtype) in stored.items():
            told = without if wanted is None else with_dtype
            expected = {"the stored type": dtype, "`dtype`": wanted, "float32": torch.float32}[told]
            assert rows[name].dtype == expected, (name, wanted)


@pytest.mark.parametrize("reads", ["random", "pack"])
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_value_that_does_not_fit_is_raised_with_its_minibatch(
    tmp_path: Path, cuda_is: Callable[[Device], None], where: str, reads: Any
) -> None:
    with DatasetWriter(tmp_path / "a.gids") as writer:
        for key in ("fits", "large"):
            values = torch.rand(300, 9)
            values[123, 4] = 65519.0 if key == "fits" else 65520.0
            values[7] = torch.inf
            writer.write_table("node", "n", key, values)
    if where == "device":
        cuda_is(EmulatedDevice())
    ids = [torch.arange(first, first + 30) for first in range(0, 300, 30)]
    options = {"reads": reads, "memory": 1 << 26, "device_memory": 1 << 26, "staging": 1 << 18}
    tables = ["n.fits", "n.large"]
    with feature_loader(
        tmp_path / "a.gids",
        tables,
        dtype=torch.float16,
        device="cuda" if where == "device" else "cpu",
        **options,
    ) as loader:
        stream = loader.attach(ids, lambda ids: dict.fromkeys(tables, ids), count=10)
        for expected in ids[:4]:
            assert next(stream)[0].equal(expected)
        with pytest.raises(
            OverflowError, match=r"'n\.large' has a value that does not fit in torch\.float16"
        ):
            next(stream)
