"""DeviceBudget: how device memory is shared out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from gids.cache.budget import MemoryPlan, Sizes
from gids.cache.device import DeviceBudget, check_device_memory
from gids.errors import MemoryBudgetError


@dataclass(frozen=True)
class Shape:
    name: str = "paper.feat"
    row_bytes: int = 1024
    page_bytes: int = 4096
    page_count: int = 2500
    order: None = None


SIZES = Sizes(
    rows={"paper.feat": 100},
    page_bytes=100 * 4096,
    minibatch_bytes=0,
    window_batches=4,
    planned_batches=3,
    most_planned_batches=3,
)


def share(
    *,
    memory_bytes: int = 8 << 20,
    cache_bytes: int | None = None,
    host_cache_bytes: int = 0,
    output_row_bytes: int = 1024,
    **changed: object,
) -> MemoryPlan:
    on_device = DeviceBudget(
        tables=[Shape()],
        output_row_bytes={"paper.feat": output_row_bytes},
        bounce_bytes=0,
        memory_bytes=memory_bytes,
        cache_bytes=cache_bytes,
        host_cache_bytes=host_cache_bytes,
    )
    return on_device.share(replace(SIZES, **changed))  # type: ignore[arg-type]


def test_the_rest_of_the_memory_becomes_lines() -> None:
    plan = share()
    assert 0 < plan.lines["paper.feat"] < Shape.page_count
    assert sum(plan.purposes.values()) <= 8 << 20
    assert sum(plan.purposes.values()) > (8 << 20) - 2 * (4096 + 8)


def test_outputs_count_in_their_own_dtype() -> None:
    narrow = share(output_row_bytes=512)
    assert narrow.purposes["outputs"] * 2 == share().purposes["outputs"]


def test_lines_are_limited_by_pages_and_by_cache_bytes() -> None:
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


def test_more_minibatches_are_planned_if_their_outputs_are_small() -> None:
    assert share(most_planned_batches=8).sizes.planned_batches == 3
    assert share(most_planned_batches=8, memory_bytes=1 << 30).sizes.planned_batches == 8


def test_the_error_for_too_little_memory_lists_the_sum_and_advises_enough() -> None:
    with pytest.raises(MemoryBudgetError, match=r"outputs .* = \d+ bytes") as caught:
        share(memory_bytes=100_000)
    found = re.search(r"Give (?:device_)?memory=([\d_]+) or more", str(caught.value))
    assert found is not None
    enough = int(found[1])
    assert sum(share(memory_bytes=enough).purposes.values()) <= enough


def test_with_few_lines_the_window_is_shorter_and_fewer_minibatches_are_planned() -> None:
    """Minibatches of 500 pages, whose outputs take 500 kB each."""
    large: dict[str, object] = {"rows": {"paper.feat": 500}, "page_bytes": 500 * 4096, "window_batches": 16}
    plans = [share(memory_bytes=n, **large) for n in range(2_900_000, 12_000_000, 100_000)]
    for plan, memory_bytes in zip(plans, range(2_900_000, 12_000_000, 100_000), strict=True):
        assert sum(plan.purposes.values()) <= memory_bytes
        window, lines = plan.sizes.window_batches, plan.purposes["lines"]
        assert window <= 1 or window * 500 * 4096 <= 3 * lines
    assert plans[0].sizes.planned_batches == 1
    assert [p.sizes.planned_batches for p in plans] == sorted(p.sizes.planned_batches for p in plans)
    assert (plans[-1].sizes.planned_batches, plans[-1].sizes.window_batches) == (3, 8)


def test_asking_for_more_than_free_memory_reports_what_is_free() -> None:
    check_device_memory({"cache_bytes": None, "memory_bytes": 5}, free_bytes=5, device="cuda:0")
    with pytest.raises(MemoryBudgetError, match=r"cache_bytes=4096 .* cuda:0 has 1.0 kB free"):
        check_device_memory({"cache_bytes": 4096}, free_bytes=1024, device="cuda:0")
