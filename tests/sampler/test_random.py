"""Philox4x32-10. The tests of samplers check the keys."""

from __future__ import annotations

import pytest
from labor_model import philox2
from sampling_model import philox

from gids import _core

# From the authors' kat_vectors (Random123).
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert _core.philox(counter, key) == expected  # type: ignore[arg-type]
    assert philox(counter, key) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (0, 0, 0x6CD10DF2FF1DAE59),
        (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xAB4FD7AD2C3F628B),
        (0x85A308D3243F6A88, 0x13198A2E, 0xF62A4C12DD7CE038),
    ],
)
def test_philox2_gives_the_published_vectors(counter: int, key: int, expected: int) -> None:
    assert _core.philox2(counter, key) == philox2(counter, key) == expected
