"""Extents of different lengths, read into one buffer by an engine."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from gids.io import open_engine

PAGE = 4096


@pytest.mark.parametrize("unit", [PAGE, 977])
def test_extents_equal_the_files(
    kind: str, shards: list[Path], contents: list[np.ndarray], unit: int
) -> None:
    rng = np.random.default_rng(unit)
    files = rng.integers(0, 2, 120).astype(np.uint32)
    lengths = rng.integers(1, 4, 120) * unit
    ends = np.array([len(c) for c in contents])[files] - lengths
    offsets = rng.integers(0, ends // unit + 1) * unit
    gaps = rng.integers(0, 2, 120) * unit
    out_offsets = np.cumsum(lengths + gaps) - lengths
    order = rng.permutation(120)
    out = np.full(out_offsets[-1] + lengths[-1], 170, np.uint8)
    expected = out.copy()
    for file, offset, length, at in zip(files, offsets, lengths, out_offsets, strict=True):
        expected[at : at + length] = contents[file][offset : offset + length]
    with open_engine(shards, kind, max_read_bytes=64 << 10) as engine:
        columns = (column[order] for column in (files, offsets, lengths))
        errors = engine.read_extents(*columns, out, out_offsets[order])
    assert not errors.any()
    assert np.array_equal(out, expected)


def test_an_error_is_that_of_its_extent_alone(shards: list[Path], contents: list[np.ndarray]) -> None:
    at = np.array([0, 3 * PAGE, len(contents[0]) - PAGE])
    lengths, out = np.array([PAGE, PAGE, 2 * PAGE]), np.zeros(4 * PAGE, np.uint8)
    with open_engine(shards) as engine:
        engine.inject_faults([(0, 3 * PAGE + 7, errno.EIO, 100)])
        errors = engine.read_extents(np.zeros(3, np.uint32), at, lengths, out, np.arange(3) * PAGE)
    assert errors.tolist() == [0, errno.EIO, errno.ENODATA]
    assert np.array_equal(out[:PAGE], contents[0][:PAGE])
