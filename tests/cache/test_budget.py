"""Sharing memory out."""

from __future__ import annotations

from pathlib import Path

import pytest
from raw_table import RawTable

from gids.cache import budget
from gids.errors import MemoryBudgetError


def share(table: RawTable, **changed: object) -> budget.MemoryPlan:
    arguments: dict[str, object] = {
        "memory_bytes": 1 << 24,
        "cache_bytes": None,
        "rows": {table.name: 100},
        "output_row_bytes": {table.name: table.row_bytes},
        "window_batches": 4,
        "planned_batches": 2,
        "most_planned_batches": 2,
        "minibatch_bytes": 1000,
        "waiting_batches": 0,
        "bounce_bytes": 4096,
        **changed,
    }
    return budget.share_memory([table], **arguments)  # type: ignore[arg-type]


@pytest.fixture
def table(tmp_path: Path) -> RawTable:
    import torch
    from raw_table import write_raw_table

    return write_raw_table(tmp_path, torch.zeros(10_000, 256))


def test_what_is_left_becomes_lines(table: RawTable) -> None:
    memory_bytes = 1 << 23
    plan = share(table, memory_bytes=memory_bytes)
    assert 0 < plan.lines[table.name] < table.page_count
    assert sum(plan.purposes.values()) <= memory_bytes
    assert sum(plan.purposes.values()) > memory_bytes - 2 * (4096 + 16)


def test_there_are_no_more_lines_than_pages_and_no_more_than_the_cache_may_have(table: RawTable) -> None:
    assert share(table, memory_bytes=1 << 30).lines[table.name] == table.page_count
    assert share(table, cache_bytes=0).lines[table.name] == 0
    assert share(table, cache_bytes=10 * (4096 + 16)).lines[table.name] == 10


def test_minibatches_that_wait_for_the_window_count_with_it(table: RawTable) -> None:
    without, with_three = share(table), share(table, waiting_batches=3)
    more = with_three.purposes["window"] - without.purposes["window"]
    assert 3 * 1000 <= more < 3 * 2000
    assert sum(with_three.purposes.values()) <= 1 << 24


def test_too_little_lists_the_sum(table: RawTable) -> None:
    with pytest.raises(MemoryBudgetError, match=r"outputs .* = \d+ bytes"):
        share(table, memory_bytes=100_000)


def test_the_least_of_the_control_groups_limits_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit, usage in (("", "max", 0), ("a", 5000, 1000), ("a/b", 9000, 10)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "max").write_text(str(limit))
        (tmp_path / name / "now").write_text(str(usage))
    groups = [(tmp_path / name, "max", "now") for name in ("a/b", "a", "", "gone")]
    monkeypatch.setattr(budget, "_memory_groups", lambda: iter(groups))
    assert budget.available_bytes() == 4000


def test_this_process_has_memory() -> None:
    assert budget.available_bytes() > 1 << 20
