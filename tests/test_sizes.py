"""Sizes in bytes: parsed from text and numbers, and printed."""

import re

import numpy as np
import pytest

from gids.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("4096", 4096),
        ("256MB", 256_000_000),
        ("2_560_000", 2_560_000),
        ("1.5 GiB", 3 << 29),
        ("9007199254740993", 2**53 + 1),
        (0, 0),
        (16e9, 16_000_000_000),
        (1023.9, 1023),
        (np.int64(7), 7),
    ],
)
def test_size_is_parsed_from_text_or_a_number(size, expected):
    assert parse_bytes(size) == expected
    assert type(parse_bytes(size)) is int


@pytest.mark.parametrize("size", ["", "-1", 0.5, "1.5.2GB", "1PB", "4 096", float("nan"), True, None])
def test_what_is_not_a_size_is_refused(size):
    with pytest.raises(ValueError, match=re.escape(f"memory={size!r} is not a size in bytes: use 4096,")):
        parse_bytes(size, "memory")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (999, "999 B"),
        (1000, "1.0 kB"),
        (54_321_000, "54.3 MB"),
        (999_900_000, "1.0 GB"),
        (10**16, "10000 TB"),
    ],
)
def test_sizes_are_printed_with_about_three_digits(size, expected):
    assert format_bytes(size) == expected
