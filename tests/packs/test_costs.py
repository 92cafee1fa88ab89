"""How long a disk is measured, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gids.packs import Scratch, costs, measure_rates

MIB = 1 << 20


def even(at: float) -> float:
    return 2000 * at


def limited(at: float) -> float:
    """2000 MiB/s until the 80 MiB of each 0.1 s have passed."""
    slices, rest = divmod(at, 0.1)
    return 80 * slices + min(80, 2000 * rest)


def stopped_early(at: float) -> float:
    return 2000 * (at if at < 0.02 else max(0.02, at - 0.06))


@pytest.mark.parametrize(
    ("passed", "seconds", "rate"), [(even, 0.2, 2000), (limited, 0.2, 800), (stopped_early, 0.3, 2000)]
)
def test_an_uneven_disk_is_measured_for_longer(
    monkeypatch: pytest.MonkeyPatch, passed: Callable[[float], float], seconds: float, rate: float
) -> None:
    now = 0.0
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now)
    marks, count = costs._Marks(), 0
    while not marks.enough:
        count += 4
        while passed(now) < count:
            now += 1e-4
        marks.add(4 * MIB)
    assert now == pytest.approx(seconds, abs=0.05)
    assert marks.rate() / MIB == pytest.approx(rate, rel=0.25)


def test_rates_of_a_disk_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_known", {})
    file = tmp_path / "file"
    file.write_bytes(bytes(8 * MIB))
    scratch = Scratch(tmp_path, 256 * MIB)
    for on in (scratch, None):
        found = [
            measure_rates([file], on, page_bytes=512, depth=16, direct=False, engine="threads")
            for _ in range(2)
        ]
        assert found[0] is found[1]
        assert found[0].random_reads_per_s > 0
        assert found[0].read_bytes_per_s > 0
        assert (found[0].write_bytes_per_s > 0) == (on is not None)
    assert not scratch.taken_bytes
