"""HostBudget and DeviceBudget: how memory is divided."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import ended

from gids.cache import budget
from gids.cache.budget import GROWTH, MemoryPlan, Sizes
from gids.cache.device import DeviceBudget, check_device_memory
from gids.errors import MemoryBudgetError


@dataclass(frozen=True)
class Shape:
    """10,000 rows of 1 KiB, four to a page."""

    name: str = "paper.feat"
    row_bytes: int = 1024
    page_bytes: int = 4096
    page_count: int = 2500
    order: None = None


SIZES = Sizes(
    rows={"paper.feat": 100},
    page_bytes=100 * 4096,
    minibatch_bytes=1000,
    window_batches=4,
    planned_batches=2,
    most_planned_batches=2,
)

both_budgets = pytest.mark.parametrize("on", ["host", "device"])


def budget_of(
    table: Shape = Shape(),
    *,
    on: str = "host",
    memory_bytes: int = 8 << 20,
    cache_bytes: int | None = None,
    host_cache_bytes: int = 0,
    output_row_bytes: int | None = None,
) -> budget.Budget:
    options: dict[str, Any] = {"memory_bytes": memory_bytes, "cache_bytes": cache_bytes, "bounce_bytes": 4096}
    options |= {"tables": [table], "output_row_bytes": {table.name: output_row_bytes or table.row_bytes}}
    if on == "host":
        return budget.HostBudget(**options)
    return DeviceBudget(**options, host_cache_bytes=host_cache_bytes)


def share(table: Shape = Shape(), sizes: Sizes = SIZES, **changed: Any) -> MemoryPlan:
    """changed: arguments of budget_of(), and fields of the sizes."""
    options = {name: changed.pop(name) for name in list(changed) if name in budget_of.__annotations__}
    return budget_of(table, **options).share(replace(sizes, **changed))


def total(plan: MemoryPlan) -> int:
    return sum(plan.purposes.values())


@both_budgets
def test_lines_are_limited_by_pages_and_by_cache_bytes(on: str) -> None:
    assert share(on=on, memory_bytes=1 << 30).lines["paper.feat"] == Shape.page_count
    assert share(on=on, cache_bytes=0).lines["paper.feat"] == 0
    line_bytes = 4096 + {"host": 16, "device": 8}[on]
    assert share(on=on, cache_bytes=10 * line_bytes).lines["paper.feat"] == 10


def test_the_sampler_gets_its_memory() -> None:
    def source_bytes(waiting: int) -> int:
        return 100_000 * (1 + waiting)

    assert share(source_bytes=source_bytes, waiting_batches=2).purposes["sampler"] == 300_000
    tight = share(memory_bytes=400_000, source_bytes=source_bytes, waiting_batches=2)
    assert tight.purposes["sampler"] == 100_000
    assert tight.sizes.waiting_batches == 0
    assert total(tight) <= 400_000
    with pytest.raises(MemoryBudgetError, match="sampler 100 kB"):
        share(memory_bytes=280_000, source_bytes=source_bytes)


def test_a_window_that_reaches_beyond_the_lines_is_shortened() -> None:
    """2500 lines hold six minibatches of 400 pages. See the tables of docs/performance.md."""
    table = Shape(page_count=100_000)
    wide: dict[str, Any] = {
        "rows": {"paper.feat": 400},
        "page_bytes": 400 * 4096,
        "minibatch_bytes": 100_000,
        "window_batches": 16,
    }
    lines = [share(table, memory_bytes=n << 20, **wide) for n in (5, 7, 10, 16, 32)]
    assert [plan.sizes.window_batches for plan in lines] == sorted(p.sizes.window_batches for p in lines)
    for plan in lines:
        reach = plan.sizes.window_batches * plan.sizes.page_bytes
        assert plan.sizes.window_batches == 1 or reach <= 3 * plan.purposes["lines"]
    assert lines[0].sizes.window_batches < 4
    assert lines[-1].sizes.window_batches == 16


@both_budgets
def test_where_memory_is_short_fewer_are_planned_before_room_for_larger_ones_goes(on: str) -> None:
    """Minibatches of 400 rows of 1 KiB; of 500, if a quarter larger."""
    large: dict[str, Any] = {"rows": {"paper.feat": 400}, "page_bytes": 400 * 4096, "on": on}
    with pytest.raises(MemoryBudgetError) as caught:
        share(memory_bytes=100_000, **large)
    least = int(re.findall(r"= (\d+) bytes", str(caught.value))[0])
    plans = [share(memory_bytes=n, **large) for n in range(least, 4 * least, 50_000)]
    ways = [(plan.sizes.rows["paper.feat"], plan.sizes.planned_batches) for plan in plans]
    assert list(dict.fromkeys(ways)) == [(400, 1), (500, 1), (500, 2)]
    for plan in plans:
        if plan.sizes.planned_batches == 2:
            assert plan.line_bytes >= plan.purposes["outputs"]


def test_a_fixed_number_of_planned_minibatches_stays() -> None:
    large: dict[str, Any] = {"rows": {"paper.feat": 400}, "planned_batches": 4, "most_planned_batches": 4}
    for memory_bytes, planned in ((8 << 20, 4), (2_200_000, 1)):
        assert share(memory_bytes=memory_bytes, **large).sizes.planned_batches == planned
    fixed = large | {"least_planned_batches": 4}
    assert share(memory_bytes=2_200_000, **fixed).sizes.planned_batches == 4
    with pytest.raises(MemoryBudgetError):
        share(memory_bytes=1_400_000, **fixed)


@both_budgets
def test_the_error_for_too_little_memory_lists_the_sum_and_advises_enough(on: str) -> None:
    option = {"host": "memory", "device": "device_memory"}[on]
    with pytest.raises(MemoryBudgetError, match=r"outputs .* = \d+ bytes") as caught:
        share(on=on, memory_bytes=100_000)
    found = re.search(rf"Give {option}=([\d_]+) or more", str(caught.value))
    enough = int(found[1])
    assert total(share(on=on, memory_bytes=enough)) <= enough
    with pytest.raises(MemoryBudgetError):
        share(on=on, memory_bytes=int((0.93 if on == "host" else 0.5) * enough))


@both_budgets
def test_the_memory_that_is_advised_for_lines_is_enough(on: str) -> None:
    table, sizes = Shape(page_count=10_000), replace(SIZES, rows={"paper.feat": 400}, page_bytes=400 * 4096)
    for memory_bytes in range(2_800_000, 4_000_000, 200_000):
        given = budget_of(table, on=on, memory_bytes=memory_bytes, host_cache_bytes=50_000)
        plan = given.share(sizes)
        missing = max(0, 200 * 4096 - plan.line_bytes)
        enough = int(given.enough_for_lines(sizes, plan.purposes["lines"] + missing))
        assert replace(given, memory_bytes=enough).share(sizes).line_bytes >= 200 * 4096
        assert enough < 5_500_000


def random_case(rng: np.random.Generator) -> tuple[list[Shape], Sizes, dict[str, int], int]:
    """(tables, sizes, bytes of an output row, bounce pool)."""
    tables = []
    for n in range(rng.integers(1, 4)):
        page = int(512 << rng.integers(0, 5))
        tables.append(Shape(f"t{n}", page // int(rng.integers(1, 9)), page, int(10 ** rng.uniform(1, 7))))
    planned = int(rng.integers(1, 4))
    window = int(rng.integers(0, 17))
    sizes = Sizes(
        rows={t.name: int(10 ** rng.uniform(0, 5)) for t in tables},
        page_bytes=0,
        minibatch_bytes=int(10 ** rng.uniform(2, 7)),
        window_batches=window,
        planned_batches=planned,
        most_planned_batches=int(rng.integers(planned, 9)) if window < 16 else planned,
        least_planned_batches=int(rng.integers(1, planned + 1)),
        waiting_batches=int(rng.integers(0, 4)),
        source_bytes=lambda waiting: 10_000 * (1 + waiting),
        growth=GROWTH if rng.random() < 0.7 else 1.0,
    )
    of_rows = {t.name: t.row_bytes for t in tables}
    pages = sum(sizes.rows[t.name] * t.page_bytes for t in tables)
    return tables, replace(sizes, page_bytes=pages), of_rows, int(rng.integers(0, 1 << 23))


@pytest.mark.parametrize("seed", range(12))
def test_random_budgets_are_never_exceeded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables, sizes, of_rows, bounce = random_case(rng)
    cache_bytes = None if rng.random() < 0.7 else int(10 ** rng.uniform(3, 9))
    smallest = sizes.shortened(0).with_planned(sizes.least_planned_batches)
    host = budget.HostBudget(
        tables=tables, output_row_bytes=of_rows, bounce_bytes=bounce, memory_bytes=0, cache_bytes=cache_bytes
    )
    least = sum(host.needed(smallest).values())
    for memory_bytes in sorted({least - 1, least, *(int(least * 1.1**n) for n in range(1, 60))}):
        given = replace(host, memory_bytes=memory_bytes)
        if memory_bytes < least:
            with pytest.raises(MemoryBudgetError):
                given.share(sizes)
            continue
        plan = given.share(sizes)
        assert total(plan) <= memory_bytes
        assert min(plan.purposes.values()) >= 0
        held = plan.sizes
        assert 0 <= held.window_batches <= sizes.window_batches
        assert sizes.least_planned_batches <= held.planned_batches <= sizes.most_planned_batches
        assert held.live_batches <= 24
        for t in tables:
            assert 0 <= plan.lines[t.name] <= t.page_count
            assert held.rows[t.name] >= sizes.rows[t.name]
        if not plan.capped and len(tables) == 1:
            assert memory_bytes - total(plan) <= tables[0].page_bytes + 16  # not enough for a line


@pytest.mark.parametrize(
    ("page_bytes", "memory_bytes", "asked", "depth"),
    [
        (16 << 20, 1 << 30, 256, 8),
        (16 << 20, 100 << 20, 256, 2),  # at least 2
        (4096, 8 << 20, 256, 256),
        (4096, 1 << 20, 256, 32),
    ],
)
def test_the_queue_depth_follows_from_memory(
    page_bytes: int, memory_bytes: int, asked: int, depth: int
) -> None:
    pages = [Shape(page_bytes=512), Shape(page_bytes=page_bytes)]
    assert budget.affordable_depth(pages, asked, memory_bytes) == depth
    assert budget.bounce_pool_bytes(pages, asked, memory_bytes) == depth * page_bytes


def test_the_lowest_limit_of_the_control_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit, usage in (("", "max", 0), ("a", 5000, 1000), ("a/b", 9000, 10)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "max").write_text(str(limit))
        (tmp_path / name / "now").write_text(str(usage))
    groups = [(tmp_path / name, "max", "now") for name in ("a/b", "a", "", "gone")]
    monkeypatch.setattr(budget, "memory_groups", lambda: iter(groups))
    assert budget.available_bytes() == 4000
    assert budget.available_bytes(4) == 1000
    (tmp_path / "a" / "memory.stat").write_text("file 900\ninactive_file 300\nactive_file 50\nfile_dirty 9\n")
    assert budget.available_bytes() == 4350, "pages of files can be dropped"
    (tmp_path / "a" / "memory.stat").write_text(
        "active_file 1\ntotal_inactive_file 600\ntotal_active_file 100"
    )
    assert budget.available_bytes() == 4700, "v1 counts the group without those below it, then all together"


def test_a_limit_of_the_process_counts() -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))

    def use() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
        assert 128 << 20 <= budget.available_bytes() <= 384 << 20
        assert 128 << 20 <= budget.available_bytes(4) <= 384 << 20, "each process has its own limit"

    ended(use)


# --- on a device ---


def test_outputs_count_in_their_own_dtype() -> None:
    narrow = share(on="device", output_row_bytes=512)
    assert narrow.purposes["outputs"] * 2 == share(on="device").purposes["outputs"]


def test_the_host_tier_holds_what_the_device_does_not() -> None:
    plan = share(on="device", host_cache_bytes=100 * 4096)
    assert plan.host_lines["paper.feat"] == 100
    assert plan.purposes["line owners"] == 8 * (plan.lines["paper.feat"] + 100)
    assert total(plan) <= 8 << 20
    whole = share(on="device", memory_bytes=1 << 30, host_cache_bytes=1 << 30)
    assert (whole.lines["paper.feat"], whole.host_lines["paper.feat"]) == (Shape.page_count, 0)


def test_asking_for_more_than_free_memory_reports_what_is_free() -> None:
    check_device_memory({"cache_bytes": None, "memory_bytes": 5}, free_bytes=5, device="cuda:0")
    with pytest.raises(MemoryBudgetError, match=r"cache_bytes=4096 .* cuda:0 has 1.0 kB free"):
        check_device_memory({"cache_bytes": 4096}, free_bytes=1024, device="cuda:0")
