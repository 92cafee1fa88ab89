"""CRC32C: known values, and the CPU instruction compared with the table."""

import numpy as np
import pytest

from gids import _core


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_values(data, expected):
    values = np.frombuffer(data, np.uint8)
    assert _core.crc32c_extend(0, values) == expected
    assert _core.crc32c_portable(0, values) == expected


def test_pages_have_the_checksums_of_their_bytes():
    for page_bytes in (1, 7, 8, 511, 512, 4096, 12288):
        for count in (0, 1, 2, 3, 4, 7):
            pages = np.random.default_rng(page_bytes).integers(0, 256, (count, page_bytes), np.uint8)
            assert _core.crc32c(pages).tolist() == [_core.crc32c_portable(0, page) for page in pages]
    with pytest.raises(TypeError):
        _core.crc32c(np.zeros((2, 16), np.uint8)[:, ::2])


def test_a_checksum_can_be_continued():
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    whole = _core.crc32c_extend(0, data)
    for at in (0, 1, 8, 500, 999, 1000):
        assert _core.crc32c_extend(_core.crc32c_extend(0, data[:at]), data[at:]) == whole
        assert _core.crc32c_portable(_core.crc32c_portable(0, data[:at]), data[at:]) == whole
