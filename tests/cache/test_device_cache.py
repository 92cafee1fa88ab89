"""The cache in device memory against the source rows, bit for bit; on the emulator and, where there is one, a GPU."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from raw_table import RawTable, write_raw_table

from gids.cache import DeviceFeatureCache
from gids.cuda.device import Device
from gids.io import Engine, open_engine

POLICIES = ["lookahead", "window-pin", "random", "static"]
Make = Callable[..., DeviceFeatureCache]


def make_rows(n: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (n, dim * torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).view(n, dim)


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    """make(tables, lines, **options): a cache, closed at the end."""
    opened: list[tuple[DeviceFeatureCache, Engine]] = []

    def build(tables: RawTable | list[RawTable], lines: int, host_lines: int = 0, **options: object) -> DeviceFeatureCache:
        tables = [tables] if isinstance(tables, RawTable) else tables
        engine = open_engine(
            [p for t in tables for p in t.shard_paths], depth=64, max_read_bytes=max(t.page_bytes for t in tables)
        )
        options = {"staging_bytes": 1 << 20, "heats": {}} | options
        cache = DeviceFeatureCache(
            device,
            engine,
            tables,  # type: ignore[arg-type]
            lines={t.name: lines for t in tables},
            host_lines={t.name: host_lines for t in tables},
            **options,  # type: ignore[arg-type]
        )
        opened.append((cache, engine))
        return cache

    yield build
    for cache, engine in opened:
        cache.close()
        engine.close()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def run(
    cache: DeviceFeatureCache, batches: list[dict[str, torch.Tensor]], window: int, planned: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The loader's order: plan ahead of gathering."""
    first = entered = planned_to = cache.next_step
    for t in range(first, first + len(batches)):
        while planned_to < min(first + len(batches), t + planned):
            while entered < min(first + len(batches), planned_to + 1 + window):
                cache.enter(entered, batches[entered - first])
                entered += 1
            cache.plan(planned_to)
            planned_to += 1
        features, error = cache.gather(t)
        assert error is None
        cache.retire(t)
        yield features


def random_batches(rng: np.random.Generator, table: RawTable, count: int, size: int) -> list[dict[str, torch.Tensor]]:
    """Skewed, with repeats; some are empty."""
    out = []
    for _ in range(count):
        ids = (table.row_count * rng.random(rng.integers(0, size + 1)) ** 2).astype(np.int64)
        out.append({table.name: torch.from_numpy(ids)})
    return out


def check(cache: DeviceFeatureCache, tables: list[RawTable], batches: list[dict[str, torch.Tensor]], w: int, d: int) -> None:
    by_name = {t.name: t for t in tables}
    for ids, got in zip(batches, run(cache, batches, w, d), strict=True):
        assert set(got) == set(ids)
        for name, rows in got.items():
            assert same_bits(rows, by_name[name].rows[ids[name]])
        cache.audit()
    for t in tables:
        assert not np.any(cache.page_words(t.name) & np.uint64(0xFFFFFF))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("lines", "host_lines"), [(0, 0), (1, 0), (0, 3), (40, 0), (30, 20), (1000, 0)])
def test_rows_equal_the_source_for_every_policy_and_size(
    tmp_path: Path, make: Make, policy: str, lines: int, host_lines: int
) -> None:
    rng = np.random.default_rng(lines)
    table = write_raw_table(tmp_path, make_rows(700, 128), page_bytes=1024, shards=2)
    cache = make(table, lines, host_lines, policy=policy)
    check(cache, [table], random_batches(rng, table, 12, 300), 6, 3)
