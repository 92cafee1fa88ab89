"""The engine's histogram of latencies: each request is in one bucket, and buckets are narrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gids.io


def test_every_request_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with gids.io.open_engine([path], "threads", direct=False, max_merge_bytes=0) as engine:
        ends, before = engine.latencies()
        assert not before.any()
        out = np.empty((200, 4096), np.uint8)
        offsets = np.random.default_rng(0).integers(0, 256, 200) * 4096
        assert not engine.read(np.zeros(200, np.uint32), offsets, 4096, out).any()
        _, counts = engine.latencies()
        stats = engine.stats()
    assert counts.sum() == stats["requests"] == 200
    # The mean lies between those of the buckets' beginnings and ends.
    begins = np.concatenate([[0], ends[:-1]])
    assert (begins * counts).sum() / 200 <= stats["latency_s"] <= (ends * counts).sum() / 200


def test_buckets_are_a_sixteenth_of_a_doubling(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with gids.io.open_engine([path], "threads", direct=False) as engine:
        ends, _ = engine.latencies()
    assert ends[0] == 1e-9
    assert (np.diff(ends) > 0).all()
    assert ends[-1] > 3600
    wide = ends > 16e-9
    assert (np.diff(ends)[wide[:-1]] / ends[:-1][wide[:-1]] <= 1 / 16 + 1e-9).all()
