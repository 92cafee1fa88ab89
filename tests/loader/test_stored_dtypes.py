"""Tables through a loader: the documented types, and values that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import EmulatedDevice
from open_loaders import feature_loader

import gids
from gids.cuda import Device
from gids.store.dtypes import TABLE_DTYPES
from gids.write import DatasetWriter


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
                floats = scaled or dtype.is_floating_point
                values = torch.rand(20, 3) if floats else torch.ones(20, 3).to(dtype)
                key, scale = name.replace(" ", "-"), "row" if scaled else None
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


@pytest.mark.parametrize(("where", "reads"), [("cpu", "random"), ("cpu", "pack"), ("device", "pack")])
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
    options: Any = {"reads": reads, "memory": 1 << 26, "device_memory": 1 << 26, "staging": 1 << 18}
    options |= {"dtype": torch.float16, "device": "cuda" if where == "device" else "cpu"}
    tables = ["n.fits", "n.large"]
    with feature_loader(tmp_path / "a.gids", tables, **options) as loader:
        stream = loader.attach(ids, lambda ids: dict.fromkeys(tables, ids), count=10)
        for expected in ids[:4]:
            assert next(stream)[0].equal(expected)
        with pytest.raises(OverflowError, match=r"'n\.large' has a value that does not fit in torch\.fl"):
            next(stream)


def test_outputs_count_as_they_are_handed_out(tmp_path: Path) -> None:
    """Four bytes a value, not the one that is stored."""
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "n", "feat", torch.rand(2000, 256), dtype=torch.int8, scale="column")
    with feature_loader(tmp_path / "a.gids", ["n.feat"], memory=2 * 2000 * 256 * 4) as loader:
        with pytest.raises(gids.MemoryBudgetError, match="outputs"):
            next(loader.attach([torch.arange(2000)], lambda ids: {"n.feat": ids}))
