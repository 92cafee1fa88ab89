"""A table is written block by block, in the order of its rows, and published with its dataset."""

import errno
import os

import numpy as np
import pytest
import torch
from datasets import CITES

from gids import FeatureStore, FormatError, StorageError
from gids.store import verify
from gids.write import DatasetWriter


def values(rows, *shape, dtype=torch.float32):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("stripe", [1, 3])
@pytest.mark.parametrize(
    ("shape", "page_bytes", "blocks"),
    [
        ((16,), 512, [7, 1, 30, 2, 61]),  # 8 rows to a page, blocks across and within pages
        ((16,), 512, [8, 16, 0, 77]),
        ((100,), 512, [1, 99, 1]),  # 1 row to a page, padded
        ((300,), 512, [50, 51]),  # a long page
        ((50,), 4096, [3, 17, 81]),  # 20 rows and a gap
        ((2, 3), 512, [101]),
        ((), 512, [101]),
        ((4,), 512, []),
    ],
)
def test_blocks_make_the_table_that_write_table_writes(tmp_path, shape, page_bytes, blocks, stripe):
    rows = values(sum(blocks), *shape)
    with DatasetWriter(tmp_path / "a.gids", page_bytes=page_bytes, stripe=stripe) as writer:
        with writer.open_table("node", "n", "h", rows.shape) as table:
            for block in rows.split(blocks) if blocks else ():
                table.write(block)
    with DatasetWriter(tmp_path / "b.gids", page_bytes=page_bytes, stripe=stripe) as writer:
        writer.write_table("node", "n", "h", rows)
    files = [
        {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        for path in (tmp_path / "a.gids", tmp_path / "b.gids")
    ]
    assert files[0] == files[1]
    assert list(verify(tmp_path / "a.gids")) == []
    assert torch.equal(FeatureStore(tmp_path / "a.gids").read_rows(range(len(rows)), "h"), rows)


def test_rows_are_cast_and_come_from_arrays_of_any_kind(tmp_path):
    rows = torch.tensor([1.1, float("nan"), float("inf"), -2.0]).repeat(5)
    read_only = np.arange(20.0)[::-1]
    read_only.flags.writeable = False
    with DatasetWriter(tmp_path / "a.gids") as writer:
        with writer.open_table("node", "paper", "half", [20], torch.float16) as table:
            table.write(rows[:8].requires_grad_())
            table.write(rows[8:])
        with writer.open_table("node", "paper", "back", [20, 1]) as table:
            table.write(read_only[:, None])
        with writer.open_table("edge", CITES, "w", [4], torch.int64) as table:
            table.write(np.arange(4, dtype=np.int32))
    store = FeatureStore(tmp_path / "a.gids")
    assert torch.equal(store.read_rows(range(20), "half").nan_to_num(), rows.half().nan_to_num())
    assert store.read_rows(range(20), "back").view(-1).tolist() == list(range(19, -1, -1))
    assert store.find_table("edge", CITES, "w").read_rows(range(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (torch.zeros(3, 5), ValueError, r"rows are \[3, 5\]; a block of 'n.h' is \[n, 4\]"),
        (torch.zeros(()), ValueError, r"rows are \[\]"),
        (torch.zeros(21, 4), ValueError, r"row 20 is out of range for 'n.h' \(20 rows\)"),
        (torch.full((2, 4), 1e30), FormatError, "row 0, column 0: 1.*e.30 does not fit in torch.float16"),
        (torch.zeros(2, 4, dtype=torch.complex64), FormatError, "tables cannot hold torch.complex64"),
        (torch.zeros(19, 4), ValueError, "rows 19 to 19 of 'n.h' were never written: write all 20 rows"),
    ],
)
def test_wrong_blocks_are_refused_and_nothing_is_published(tmp_path, block, error, message):
    with pytest.raises(error, match=message), DatasetWriter(tmp_path / "a.gids") as writer:
        with writer.open_table("node", "n", "h", [20, 4], torch.float16) as table:
            table.write(block)
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_lacks_rows_or_occurs_twice_is_not_published(tmp_path):
    with pytest.raises(ValueError, match=r"rows 0 to 19 of 'n\.h' were never written"):
        with DatasetWriter(tmp_path / "a.gids") as writer:
            writer.open_table("node", "n", "h", [20, 4])
    twice = lambda writer: [writer.open_table("node", "n", "h", [20, 4]) for _ in range(2)]  # noqa: E731
    with (
        pytest.raises(FormatError, match=r"'n\.h' occurs twice"),
        DatasetWriter(tmp_path / "a.gids") as writer,
    ):
        twice(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_a_table_that_lacks_rows_is_not_finished(tmp_path, monkeypatch):
    pwrite, calls = os.pwrite, []

    def write(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    writer = DatasetWriter(tmp_path / "a.gids", page_bytes=512)
    table = writer.open_table("node", "n", "h", [201, 64])
    table.write(values(1, 64))
    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StorageError, match=r"No space left on device while writing table 'n\.h'"):
        table.write(values(4, 64))
    for use in (lambda: table.write(values(4, 64)), writer.commit):
        with pytest.raises(ValueError, match=r"'n\.h' is broken by an error: write it again"):
            use()
    writer.close(discard=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="not enough room"), DatasetWriter(tmp_path / "a.gids") as writer:
        writer.open_table("node", "n", "h", [1 << 30, 1 << 14])
