"""Quantizing weights of rows to the heat of pages."""

from __future__ import annotations

import numpy as np
import pytest

from gids.cache import feature_cache as module
from gids.cache import page_heat


def model(weights: np.ndarray, rows_per_page: int) -> np.ndarray:
    pages = [weights[i : i + rows_per_page].sum() for i in range(0, len(weights), rows_per_page)]
    top, lightest = max(pages), min(p for p in pages if p > 0)
    logs = np.log2(1 + np.array(pages) / max(lightest, top / 2**24))
    return np.rint(255 * logs / logs.max())


@pytest.mark.parametrize("rows_per_page", [1, 3, 8])
@pytest.mark.parametrize("unit", [1.0, 1e-9, 1e9])
def test_the_scale_is_logarithmic_in_any_unit(
    monkeypatch: pytest.MonkeyPatch, rows_per_page: int, unit: float
) -> None:
    monkeypatch.setattr(module, "_BLOCK_PAGES", 16)
    rng = np.random.default_rng(1)
    weights = np.where(rng.random(500) < 0.2, 0, rng.pareto(1.0, 500)).astype(np.float32) * unit
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


@pytest.mark.parametrize("rows", [0, 5])
def test_rows_without_weight_have_no_heat(rows: int) -> None:
    assert page_heat(np.zeros(rows), 2).tolist() == [0] * -(-rows // 2)
