"""Sharing device memory out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gids.cache import device_budget
from gids.errors import MemoryBudgetError


@dataclass(frozen=True)
class Shape:
    name: str = "paper.feat"
    row_bytes: int = 1024
    page_bytes: int = 4096
    page_count: int = 2500
    order: None = None


def share(**changed: object) -> device_budget.DeviceMemoryPlan:
    arguments: dict[str, object] = {
        "memory_bytes": 8 << 20,
        "cache_bytes": None,
        "host_cache_bytes": 0,
        "rows": {"paper.feat": 100},
        "output_row_bytes": {"paper.feat": 1024},
        "window_batches": 4,
        "planned_batches": 3,
        "most_planned_batches": 3,
        **changed,
    }
    return device_budget.share_device_memory([Shape()], **arguments)  # type: ignore[arg-type]


def test_what_is_left_becomes_lines() -> None:
    plan = share()
    assert 0 < plan.lines["paper.feat"] < Shape.page_count
    assert sum(plan.purposes.values()) <= 8 << 20
    assert sum(plan.purposes.values()) > (8 << 20) - 2 * (4096 + 8)


def test_outputs_count_as_they_are_handed_out() -> None:
    narrow = share(output_row_bytes={"paper.feat": 512})
    assert narrow.purposes["outputs"] * 2 == share().purposes["outputs"]


def test_lines_are_no_more_than_pages_and_no_more_than_the_cache_may_have() -> None:
    assert share(memory_bytes=1 << 30).lines["paper.feat"] == Shape.page_count
    assert share(cache_bytes=0).lines["paper.feat"] == 0
    assert share(cache_bytes=10 * (4096 + 8)).lines["paper.feat"] == 10


def test_the_host_tier_holds_what_the_device_does_not() -> None:
    plan = share(host_cache_bytes=100 * 4096)
    assert plan.host_lines["paper.feat"] == 100
    assert plan.purposes["line owners"] == 8 * (plan.lines["paper.feat"] + 100)
    assert sum(plan.purposes.values()) <= 8 << 20
    whole = share(memory_bytes=1 << 30, host_cache_bytes=1 << 30)
    assert (whole.lines["paper.feat"], whole.host_lines["paper.feat"]) == (Shape.page_count, 0)


def test_more_minibatches_are_planned_where_their_outputs_are_small() -> None:
    assert share(most_planned_batches=8).most_planned_batches == 3
    assert share(most_planned_batches=8, memory_bytes=1 << 30).most_planned_batches == 8


def test_too_little_lists_the_sum() -> None:
    with pytest.raises(MemoryBudgetError, match=r"outputs .* = \d+ bytes"):
        share(memory_bytes=100_000)


def test_more_than_is_free_says_what_is_free() -> None:
    device_budget.check_device_memory({"cache_bytes": None, "memory_bytes": 5}, free_bytes=5, device="cuda:0")
    with pytest.raises(MemoryBudgetError, match=r"cache_bytes=4096 .* cuda:0 has 1.0 kB free"):
        device_budget.check_device_memory({"cache_bytes": 4096}, free_bytes=1024, device="cuda:0")
