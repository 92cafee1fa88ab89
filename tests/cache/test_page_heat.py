"""Quantizing weights of rows to the heat of pages."""

from __future__ import annotations

import numpy as np
import pytest

from gids.cache import page_heat


def model(weights: np.ndarray, rows_per_page: int) -> np.ndarray:
    pages = np.add.reduceat(weights, np.arange(0, len(weights), rows_per_page))
    top, lightest = pages.max(), pages[pages > 0].min()
    logs = np.log2(1 + pages / max(lightest, top / 2**24))
    return np.rint(255 * logs / logs.max())


@pytest.mark.parametrize(
    ("rows", "rows_per_page", "unit"),
    [(500, 3, 1e-9), ((1 << 20) + 500, 1, 1e9)],  # the second one is read in two blocks
)
def test_the_scale_is_logarithmic_in_any_unit(rows: int, rows_per_page: int, unit: float) -> None:
    rng = np.random.default_rng(1)
    weights = np.where(rng.random(rows) < 0.2, 0, rng.pareto(1.0, rows)).astype(np.float32) * unit
    found = page_heat(weights, rows_per_page)
    assert found.dtype == np.uint8
    assert np.abs(found - model(weights.astype(np.float64), rows_per_page)).max() <= 1  # float32 rounding
    assert found.max() == 255


def test_heat_keeps_the_order_of_degrees_and_is_not_zero() -> None:
    degrees = np.array([0, 1, 2, 3, 100, 100_000], np.uint32)
    found = page_heat(degrees, 1)
    assert found[0] == 0
    assert (np.diff(found.astype(int)) > 0).all()


def test_one_tiny_weight_does_not_flatten_the_others() -> None:
    weights = np.array([1e-30, 1.0, 2.0, 4.0, 1000.0])
    found = page_heat(weights, 1).astype(int)
    assert found[0] == 0
    assert (np.diff(found[1:4]) >= 9).all()


def test_rows_without_weight_have_no_heat() -> None:
    assert page_heat(np.zeros(5), 2).tolist() == [0] * 3
    assert page_heat(np.zeros(0), 2).tolist() == []
