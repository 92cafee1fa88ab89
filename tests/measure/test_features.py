"""Rows kept of each minibatch: compared bit for bit, in bounded memory and time."""

from types import SimpleNamespace

import pytest
import torch

from gids.measure import features
from gids.measure.features import KeptRows


def table(dim):
    return SimpleNamespace(shape=(dim,), dtype=torch.float32)


@pytest.fixture
def source():
    """1000 rows, among them a NaN and a zero."""
    rows = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    rows[3, 2], rows[4, 2] = float("nan"), 0.0
    return rows


def test_equal_rows_are_right_and_single_bits_count(source):
    kept = KeptRows(3, table(5))
    for _ in range(3):
        ids = torch.arange(64)
        rows = source[ids].clone()
        rows[4, 2] = -0.0
        rows[9, 0] += 1
        kept.add(ids, rows)
    assert kept.compare(lambda ids: source[ids]) == (3 * 64, 3 * 2)


def test_a_small_minibatch_is_kept_whole(source):
    kept = KeptRows(1, table(5))
    kept.add(torch.tensor([7, 3, 999]), source[[7, 3, 0]])
    compared, wrong = kept.compare(lambda ids: source[ids])
    assert compared == 64  # some of them several times
    assert 0 < wrong < compared


def test_missing_minibatches_are_not_compared(source):
    kept = KeptRows(10, table(5))
    kept.add(torch.arange(100), source[:100])
    assert kept.compare(lambda ids: source[ids]) == (64, 0)


@pytest.mark.parametrize("batches", [100, 1000, 5000])
def test_a_long_training_takes_no_more_memory_and_is_compared_throughout(source, batches, monkeypatch):
    monkeypatch.setattr(features, "_KEPT_BYTES", 20_000)  # 1000 rows of 20 B
    kept = KeptRows(batches, table(5))
    assert kept._rows.nbytes <= 20_000
    for step in range(batches):
        kept.add(torch.arange(100), source[:100] + (step >= 0.9 * batches))
    compared, wrong = kept.compare(lambda ids: source[ids])
    assert 500 <= compared <= 1000
    assert wrong == pytest.approx(compared / 10, rel=0.02)


def test_comparing_with_a_slow_source_stops_in_time(source, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(features.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(features, "_THREADS", 1)
    kept = KeptRows(10, table(5))
    for _ in range(10):
        kept.add(torch.arange(100), source[:100])

    def slow(ids):
        now[0] += 4.0
        return source[ids]

    assert kept.compare(slow, seconds=10.0) == (3 * 64, 0)
    assert kept.compare(slow, seconds=0.0) == (64, 0)  # some always are
