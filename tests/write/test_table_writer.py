"""A table is written block by block, in the order of its rows, and published with its dataset."""

import errno
import os

import numpy as np
import pytest
import torch
from datasets import CITES, contents

from gids import FeatureStore, FormatError, StorageError
from gids.write import DatasetWriter


def values(rows, *shape, dtype=torch.float32):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("shape", "page_bytes", "stripe", "blocks"),
    [
        ((16,), 512, 3, [7, 1, 30, 2, 61]),  # 8 rows to a page, blocks across and within pages
        ((100,), 512, 1, [1, 99, 1]),  # 1 row to a page, padded
        ((300,), 512, 3, [50, 51]),  # a long page
        ((50,), 4096, 1, [3, 0, 17, 81]),  # 20 rows and a gap
        ((), 512, 1, [101]),
        ((4,), 512, 1, []),
    ],
)
def test_blocks_make_the_table_that_write_table_writes(tmp_path, shape, page_bytes, stripe, blocks):
    rows = values(sum(blocks), *shape)
    with DatasetWriter(tmp_path / "a.gids", page_bytes=page_bytes, stripe=stripe) as writer:
        with writer.open_table("node", "n", "h", rows.shape) as table:
            for block in rows.split(blocks) if blocks else ():
                table.write(block)
    with DatasetWriter(tmp_path / "b.gids", page_bytes=page_bytes, stripe=stripe) as writer:
        writer.write_table("node", "n", "h", rows)
    assert contents(tmp_path / "a.gids") == contents(tmp_path / "b.gids")


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
        with writer.open_table("node", "paper", "flag", [20], torch.bool) as table:
            table.write(torch.full((20,), 2, dtype=torch.uint8).view(torch.bool))  # such bytes are true
        with writer.open_table("edge", CITES, "w", [4], torch.int64) as table:
            table.write(np.arange(4, dtype=np.int32))
    store = FeatureStore(tmp_path / "a.gids")
    assert torch.equal(store.read_rows(range(20), "half").nan_to_num(), rows.half().nan_to_num())
    assert store.read_rows(range(20), "back").view(-1).tolist() == list(range(19, -1, -1))
    [shard] = store.table("flag").shard_paths
    assert shard.read_bytes()[:20] == bytes([1] * 20)
    assert store.find_table("edge", CITES, "w").read_rows(range(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (torch.zeros(3, 5), ValueError, r"rows are \[3, 5\]; a block of 'n.h' is \[n, 4\]"),
        (torch.zeros(()), ValueError, r"rows are \[\]"),
        (torch.zeros(21, 4), ValueError, r"row 20 is out of range for 'n.h' \(20 rows\)"),
        (torch.full((2, 4), 1e30), FormatError, "row 0, column 0: 1.*e.30 does not fit in torch.float16"),
        (torch.zeros(19, 4), ValueError, "rows 19 to 19 of 'n.h' were never written: write all 20 rows"),
    ],
)
def test_wrong_blocks_are_refused_and_nothing_is_published(tmp_path, block, error, message):
    with pytest.raises(error, match=message), DatasetWriter(tmp_path / "a.gids") as writer:
        with writer.open_table("node", "n", "h", [20, 4], torch.float16) as table:
            table.write(block)
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
