"""Placement: the algorithm as the paper prints it, the best of all placements, and lookups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

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


def test_placement_is_that_of_the_published_algorithm() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        heat, capacities, peer, host = draw_case(rng)
        for rule in ("total", "own"):
            placed = place(heat, capacities, peer, host, rule=rule)
            expected = transcription(heat, capacities, peer, host, rule)
            assert [set(rows.tolist()) for rows in placed.devices] == expected
            assert all(np.array_equal(rows, np.unique(rows)) for rows in placed.devices)
            assert [len(rows) for rows in placed.devices] == [min(c, len(heat)) for c in capacities]
            assert np.isclose(placed.expected_cost(heat), cost_of(expected, heat, peer, host))


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


# --- costs that depend on the peer ---


def grouped(sizes: list[int], inside: float, between: float) -> np.ndarray:
    """Costs of devices in groups of these sizes."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    costs = np.where(group[:, None] == group, inside, between).astype(float)
    np.fill_diagonal(costs, 0)
    return costs


def draw_costs(rng: Rng, count: int) -> np.ndarray:
    """Any costs, of which a device's own memory is the cheapest in its row."""
    costs = rng.random((count, count)) * 10
    np.fill_diagonal(costs, costs.min(1) * rng.integers(0, 2))
    return costs


def least_cost(heat: np.ndarray, capacities: list[int], costs: np.ndarray, host_cost: float) -> float:
    """Of all placements. least: after some rows, the least cost for the numbers of rows that still fit."""
    count = len(capacities)
    sets = [s for size in range(count + 1) for s in itertools.combinations(range(count), size)]
    paid = {s: sum(min([host_cost, *(row[d] for d in s)]) for row in costs) for s in sets}
    least = {tuple(capacities): 0.0}
    for h in heat:
        reached: dict[tuple[int, ...], float] = {}
        for left, cost in least.items():
            for s in sets:
                if all(left[d] for d in s):
                    rest = tuple(room - (d in s) for d, room in enumerate(left))
                    reached[rest] = min(reached.get(rest, np.inf), cost + float(h) * paid[s])
        least = reached
    return min(least.values()) / (float(heat.sum()) * count) if heat.sum() else 0.0


def test_with_pairs_of_devices_no_placement_costs_less() -> None:
    """Against every placement of up to 6 rows on 2 + 2 devices."""
    rng = np.random.default_rng(6)
    for _ in range(25):
        heat, capacity = draw_heat(rng, int(rng.integers(1, 7))).astype(float), int(rng.integers(0, 4))
        costs, host = grouped([2, 2], 1, float(rng.choice([2, 4, 8]))), float(rng.choice([3, 10, 20]))
        placed = place(heat, [capacity] * 4, costs, host)
        assert np.isclose(placed.expected_cost(heat), least_cost(heat, [capacity] * 4, costs, host))


def test_with_any_costs_a_placement_saves_most_of_what_the_best_one_saves() -> None:
    """Half of it is proven. Capacities and costs differ by device; the cases are fixed."""
    rng, shares = np.random.default_rng(7), []
    for _ in range(60):
        count, n = int(rng.integers(2, 4)), int(rng.integers(1, 6))
        heat, capacities = draw_heat(rng, n).astype(float), rng.integers(0, n + 2, count).tolist()
        costs = draw_costs(rng, count)
        host = float(costs.diagonal().max() + rng.random() * 10)
        most = host - least_cost(heat, capacities, costs, host)
        saved = host - place(heat, capacities, costs, host).expected_cost(heat)
        shares.append(saved / most if heat.any() and most > 1e-9 else 1.0)
    assert min(shares) > 0.9
    assert max(shares) < 1 + 1e-9


def test_rows_are_read_from_the_cheapest_device_that_holds_them() -> None:
    rng = np.random.default_rng(9)
    for count in (1, 3, 8, 12, 40, 64):
        costs = draw_costs(rng, count).round() if count < 40 else grouped([1] * count, 0, 2)
        costs[np.diag_indices(count)] = 0
        heat = rng.random(80) ** -1
        placed = place(heat, [int(c) for c in rng.integers(0, 20, count)], costs, 5)
        held = [set(rows.tolist()) for rows in placed.devices]
        ids = rng.integers(0, 80, 200)
        for device in range(count):
            expected = []
            for v in ids.tolist():
                asked = [d for d in range(count) if v in held[d] and costs[device, d] <= 5]
                expected.append(
                    min(asked, key=lambda d: (costs[device, d], (d - device) % count), default=NOBODY)
                )
            assert placed.answering(ids, device).tolist() == expected
            paid = [5 if d == NOBODY else costs[device, d] for d in expected]
            assert placed.row_costs(ids, device).tolist() == paid
            moved = placed.moved(ids, device)
            assert moved == Moved(
                expected.count(device), len(ids) - expected.count(device) - moved.host, expected.count(NOBODY)
            )


def test_own_advantage_alone_can_cost_more_than_no_copies() -> None:
    heat = np.array([1.0, 0.6])
    costs = {rule: place(heat, [1, 1], 1, 1.5, rule=rule).expected_cost(heat) for rule in ("own", "total")}
    assert costs == {"own": pytest.approx(0.6 * 1.5 / 1.6), "total": pytest.approx(0.5)}


def test_wrong_arguments_are_refused() -> None:
    heat = np.ones(4)
    for wrong, error, said in (
        (lambda: place(np.array([1, np.nan]), [1], 1, 2), ValueError, "heat must be 0 or more"),
        (lambda: place(np.ones((2, 2)), [1], 1, 2), TypeError, r"float64\[2, 2\]"),
        (lambda: place(heat, [], 1, 2), ValueError, "1 to 64 devices"),
        (lambda: place(heat, [1, -1], 1, 2), ValueError, "each must be 0 or more"),
        (lambda: place(heat, [1], -1, 2), ValueError, "costs must be 0 or more, and finite .got -1 and 2"),
        (lambda: place(heat, [1, 1], [[0, 1], [1]], 2), TypeError, "a matrix of numbers"),
        (lambda: place(heat, [1], 1, 2, rule="best"), ValueError, "'total' or 'own'"),
        (lambda: place(heat, [1, 1], np.ones((2, 3)), 2), ValueError, r"matrix \[2, 2\] .*got \[2, 3\]"),
        (lambda: place(heat, [1, 1], [[0, 1], [1, 1.5]], 2), ValueError, "of a device's own memory"),
        (lambda: place(heat, [1] * 3, grouped([2, 1], 1, 2), 3, rule="own"), ValueError, "one peer_cost"),
        (lambda: Placement(np.zeros(4, np.uint8), 2, grouped([2, 1], 1, 2), 2), ValueError, "2 devices"),
    ):
        with pytest.raises(error, match=said):
            wrong()
