"""Consistent manifests that claim 2^31 rows, nodes or edges: refused by file sizes, before any work.
If the files have these sizes but no data, only little is read."""

import errno
import json
import math
import os

import numpy as np
import pytest
import torch
from datasets import sign, write_dataset

from gids import FeatureStore, FormatError
from gids.cli import main
from gids.store import verify
from gids.store.dtypes import ARRAY_DTYPES, TABLE_DTYPES, stored_row_bytes
from gids.store.files import npy_header
from gids.store.geometry import Geometry
from gids.store.manifest import load_manifest
from gids.write import DatasetWriter

MANY = 1 << 31


def claim(path, *changes):
    """Write a manifest that is valid, whatever the files say."""
    for change in changes:
        sign(path, change)
    return load_manifest((path / "manifest.json").read_bytes())


def claim_rows(table, count):
    """Set the number of rows of a table in a manifest."""
    scale = table["scale"]["per"] if "scale" in table else None
    row_bytes = stored_row_bytes(table["shape"], TABLE_DTYPES[table["dtype"]].itemsize, scale)
    layout = Geometry(count, row_bytes, table["page_bytes"], len(table["shards"]))
    table["row_count"] = count
    table["checksums"]["shape"] = [layout.page_count]
    if "order" in table:
        table["order"]["shape"] = [count]


def claim_nodes(fields, ntype, count):
    """Set the number of nodes of a type in a manifest, and in all arrays of nodes."""
    for nodes in fields["nodes"]:
        if nodes["type"] == ntype:
            nodes["count"] = count
            for role, array in nodes["arrays"].items():
                if not role.endswith("_idx"):
                    array["shape"][0] = count
    for relation in fields["relations"]:
        if relation["type"][2] == ntype and relation["arrays"]:
            relation["arrays"]["indptr"]["shape"] = [count + 1]
    for table in fields["tables"]:
        if table["type"] == ntype:
            claim_rows(table, count)


def claim_split(fields):
    fields["nodes"][0]["arrays"]["train_idx"]["shape"] = [MANY]


def test_counts_are_compared_with_the_sizes_of_files_first(tmp_path):
    path = write_dataset(tmp_path / "mag.gids")
    claim(path, lambda f: claim_nodes(f, "paper", MANY), claim_split)
    with pytest.raises(FormatError, match=r" is truncated: \d+ bytes, expected "):
        FeatureStore(path)
    faults = "\n".join(verify(path))
    for file, size in {
        "nodes/paper.label.npy": 128 + 8 * MANY,
        "nodes/paper.out_degree.npy": 128 + 4 * MANY,
        "nodes/paper.train_idx.npy": 128 + 8 * MANY,
        "graph/author.writes.paper/indptr.npy": 128 + 8 * (MANY + 1),
        "tables/paper.feat/shard-00.bin": 512 * MANY // 2,
        "tables/paper.year/shard-00.bin": 512 * MANY // 64,
        "tables/paper.year/checksum.bin": 4 * MANY // 64,
    }.items():
        assert f"{file} is truncated: {(path / file).stat().st_size} bytes, expected {size} (" in faults


@pytest.fixture
def hollow(tmp_path):
    """A dataset whose files are as long as 2^31 nodes need and take no room: after 20 rows come holes."""
    path = tmp_path / "hollow.gids"
    with DatasetWriter(path, page_bytes=512) as writer:
        writer.write_table("node", "paper", "year", torch.arange(2000, 2020))
        writer.write_table("node", "paper", "day", torch.arange(20), order=np.arange(20))
        writer.write_labels("paper", torch.arange(20))
        writer.write_split("paper", "train", torch.arange(20))
    manifest = claim(path, lambda f: claim_nodes(f, "paper", MANY), claim_split)
    try:
        for array in manifest.arrays():
            header = npy_header(array.dtype, array.shape) if array.path.endswith(".npy") else b""
            with open(path / array.path, "r+b") as file:
                file.write(header)
                file.truncate(len(header) + math.prod(array.shape) * ARRAY_DTYPES[array.dtype].itemsize)
        for table in manifest.tables:
            os.truncate(path / table.shards[0], table.geometry.shard_bytes(0))
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.ENOSPC, errno.EINVAL):
            raise
        pytest.skip(f"this file system has no file of so many bytes: {error}")
    if sum(p.stat().st_blocks for p in path.rglob("*")) * 512 > 1 << 30:
        pytest.skip("this file system has no holes")
    return path


def test_info_reads_no_labels_and_splits(hollow, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("gids info reads no data")

    monkeypatch.setattr(np, "fromfile", never)
    assert main(["info", str(hollow), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"][0] == {
        "type": "paper",
        "count": MANY,
        "labels": f"int64[{MANY}]",
        "splits": {"train": MANY},
        "times": None,
        "ids": None,
        "heat": [],
    }
    assert [t["ordered"] for t in found["tables"]] == [False, True]


def test_a_scan_lists_no_blocks_before_the_first(hollow, monkeypatch):
    table = FeatureStore(hollow).table("year")
    blocks = table.scan(1)
    start, rows = next(blocks)
    assert (start, rows.tolist()) == (0, [2000])
    assert next(blocks)[1].tolist() == [2001]
    blocks.close()


def test_many_wrong_pages_of_a_table_are_summed_up(tmp_path):
    path = tmp_path / "a.gids"
    with DatasetWriter(path, page_bytes=512, stripe=2) as writer:
        writer.write_table("node", "n", "k", torch.arange(64 * 2000))
    for wrong in (90, 130):
        for shard in FeatureStore(path).table("k").shard_paths:
            data = bytearray(shard.read_bytes())
            for page in range(wrong // 2):
                data[512 * page] = 1
            shard.write_bytes(data)
        faults = list(verify(path))
        pages = [fault for fault in faults if "fails its CRC32C" in fault]
        assert len(set(pages)) == min(wrong, 100)
        assert faults[len(pages) :] == (["30 more pages of 'n.k' are wrong"] if wrong > 100 else [])
