"""Placement: the algorithm as the paper prints it, the best of all placements, and lookups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gids import _core
from gids.distributed import Placement, place
from gids.distributed.place import NOBODY, Moved, Rule, worth

Rng = np.random.Generator


def transcription(
    heat: np.ndarray, capacities: list[int], peer_cost: float, host_cost: float, rule: Rule
) -> list[set[int]]:
    """Algorithm 1 with lists and sets, without losing the new row of a device that is skipped."""
    by_heat = sorted(range(len(heat)), key=lambda v: (-float(heat[v]), v))
    devices = [set(by_heat[:capacity]) for capacity in capacities]
    fresh = [v for v in by_heat if not any(v in device for device in devices)]
    first, copy = worth(len(capacities), peer_cost, host_cost, rule)
    gained = [0.0] * len(capacities)
    for old in reversed(by_heat):
        holding = [d for d, held in enumerate(devices) if old in held]
        for d in sorted(holding, key=lambda d: (gained[d], d))[:-1]:
            if not fresh or not first * float(heat[fresh[0]]) > copy * float(heat[old]):
                return devices
            new = fresh.pop(0)
            devices[d].remove(old)
            devices[d].add(new)
            gained[d] += first * float(heat[new]) - copy * float(heat[old])
    return devices


def cost_of(devices: list[set[int]], heat: np.ndarray, peer_cost: float, host_cost: float) -> float:
    """The mean cost of a read, one device and one row after the other."""
    nearer = min(peer_cost, host_cost)
    cost = 0.0
    for held in devices:
        for v, h in enumerate(heat):
            anywhere = any(v in other for other in devices)
            cost += float(h) * (0.0 if v in held else nearer if anywhere else host_cost)
    return cost / (float(heat.sum()) * len(devices)) if heat.sum() else 0.0


def draw_heat(rng: Rng, n: int) -> np.ndarray:
    """Distinct, with ties, with zeros, or all equal; float32, float64 or integers."""
    heats = (
        rng.random(n),
        rng.integers(0, 4, n),
        np.maximum(rng.random(n) - 0.5, 0).astype(np.float32),
        np.ones(n, np.float32),
        rng.random(n) ** -2,
    )
    return heats[rng.integers(len(heats))]


def draw_case(rng: Rng) -> tuple[np.ndarray, list[int], float, float]:
    count = int(rng.choice([1, 2, 3, 4, 8, 9, 17, 33]))
    n = int(rng.integers(0, 60))
    if rng.random() < 0.5:
        capacities = [int(rng.integers(0, n + 5))] * count
    else:
        capacities = [int(c) for c in rng.integers(0, n + 5, count)]
    peer, host = rng.choice([0, 0.3, 1, 2, 5], 2)
    return draw_heat(rng, n), capacities, float(peer), float(host)


def test_placement_is_that_of_the_published_algorithm_and_never_worse_than_its_extremes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        heat, capacities, peer, host = draw_case(rng)
        for rule in ("total", "own"):
            placed = place(heat, capacities, peer, host, rule=rule)
            expected = transcription(heat, capacities, peer, host, rule)
            assert [set(rows.tolist()) for rows in placed.devices] == expected
            assert all(np.array_equal(rows, np.unique(rows)) for rows in placed.devices)
            assert [len(rows) for rows in placed.devices] == [min(c, len(heat)) for c in capacities]
            cost = cost_of(expected, heat, peer, host)
            assert np.isclose(placed.expected_cost(heat), cost)
            hottest = cost_of(transcription(heat, capacities, 1, 1, rule), heat, peer, host)
            assert cost <= hottest * (1 + 1e-12)
            if rule == "total":
                distinct = cost_of(transcription(heat, capacities, 0, 1, rule), heat, peer, host)
                assert cost <= distinct * (1 + 1e-12)


def test_no_placement_costs_less() -> None:
    """Against every placement of up to 5 rows on up to 3 devices."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        n = int(rng.integers(1, 6))
        capacities = [int(c) for c in rng.integers(0, n + 1, rng.integers(1, 4))]
        heat, peer, host = draw_heat(rng, n).astype(float), *sorted(rng.random(2))
        choices = [list(itertools.combinations(range(n), capacity)) for capacity in capacities]
        best = min(cost_of([set(c) for c in some], heat, peer, host) for some in itertools.product(*choices))
        assert np.isclose(place(heat, capacities, peer, host).expected_cost(heat), best)


def test_own_advantage_alone_can_cost_more_than_no_copies() -> None:
    heat = np.array([1.0, 0.6])
    costs = {rule: place(heat, [1, 1], 1, 1.5, rule=rule).expected_cost(heat) for rule in ("own", "total")}
    assert costs == {"own": pytest.approx(0.6 * 1.5 / 1.6), "total": pytest.approx(0.5)}


def test_rows_are_read_from_the_device_itself_then_from_the_next_that_holds_them() -> None:
    rows = [np.array([0, 1]), np.array([2]), np.array([1, 3])]
    placed = Placement.of(rows, 6, peer_cost=1, host_cost=3)
    ids = np.array([0, 1, 2, 3, 4, 1])
    assert [placed.answering(ids, d).tolist() for d in range(3)] == [
        [0, 0, 1, 2, NOBODY, 0],
        [0, 2, 1, 2, NOBODY, 2],
        [0, 2, 1, 2, NOBODY, 2],
    ]
    assert placed.moved(ids, 0) == Moved(own=3, peer=2, host=1)
    assert placed.cost(placed.moved(ids, 0)) == 5
    assert [d.tolist() for d in placed.devices] == [[0, 1], [2], [1, 3]]
    slow = Placement.of(rows, 6, peer_cost=4, host_cost=3)
    assert slow.answering(ids, 0).tolist() == [0, 0, NOBODY, NOBODY, NOBODY, 0]
    assert slow.moved(ids, 0) == Moved(own=3, peer=0, host=3)


def test_lookups_agree_with_the_rows_of_each_device() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 5, 8, 12, 40, 64):
        heat = rng.random(300) ** -1
        placed = place(heat, [int(c) for c in rng.integers(0, 90, count)], 1, 3)
        ids = rng.integers(0, 300, 500)
        held = [set(rows.tolist()) for rows in placed.devices]
        for device in {0, count // 2, count - 1}:
            answers = placed.answering(ids, device)
            turn = [(device + step) % count for step in range(count)]
            assert answers.tolist() == [next((d for d in turn if v in held[d]), NOBODY) for v in ids.tolist()]
            moved = placed.moved(ids, device)
            assert moved.own == np.count_nonzero(answers == device)
            assert moved.host == np.count_nonzero(answers == NOBODY)
            assert sum(moved) == len(ids)


def test_sort_is_stable_and_exact_for_heats_of_any_size() -> None:
    rng = np.random.default_rng(4)
    for dtype in (np.float32, np.float64):
        tiny, large = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
        spread = (10.0 ** rng.uniform(-30, 30, 5000)).astype(dtype)
        few = rng.choice(np.array([0, -0.0, tiny, 1, np.nextafter(dtype(1), dtype(2)), large], dtype), 5000)
        for heat in (spread, few, few[:1], few[:0]):
            rows = np.empty(len(heat), np.uint32)
            _core.by_heat(heat, rows)
            assert np.array_equal(rows, np.argsort(-heat, kind="stable"))


def test_wrong_arguments_are_refused() -> None:
    heat = np.ones(4)
    for wrong, error, said in (
        (lambda: place(np.array([1, np.nan]), [1], 1, 2), ValueError, "heat must be 0 or more"),
        (lambda: place(np.array([1, np.inf]), [1], 1, 2), ValueError, "finite"),
        (lambda: place(np.array([1, -1]), [1], 1, 2), ValueError, "got -1"),
        (lambda: place(np.ones((2, 2)), [1], 1, 2), TypeError, r"float64\[2, 2\]"),
        (lambda: place(np.array(["a"]), [1], 1, 2), TypeError, "must be numbers"),
        (lambda: place(heat, [], 1, 2), ValueError, "1 to 64 devices"),
        (lambda: place(heat, [1] * 65, 1, 2), ValueError, "got 65"),
        (lambda: place(heat, [1, -1], 1, 2), ValueError, "each must be 0 or more"),
        (lambda: place(heat, [1], -1, 2), ValueError, "peer_cost and host_cost"),
        (lambda: place(heat, [1], 1, np.inf), ValueError, "peer_cost and host_cost"),
        (lambda: place(heat, [1], 1, 2, rule="best"), ValueError, "'total' or 'own'"),
        (lambda: Placement(np.zeros(4, np.uint16), 2, 1, 2), ValueError, "must be uint8"),
        (lambda: Placement.of([], 4, peer_cost=1, host_cost=2), ValueError, "1 to 64 devices"),
    ):
        with pytest.raises(error, match=said):
            wrong()
