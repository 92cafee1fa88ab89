"""The format: literal bytes out. A change that fails here needs a new version of the format."""

import json
from typing import Any

import numpy as np
import torch
from datasets import contents

from gids.store.files import npy_header
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

EDGE = ["_N", "_E", "_N"]


def array(path: str, dtype: str, count: int, data: bytes) -> dict[str, object]:
    return {"path": path, "dtype": dtype, "shape": [count], "crc32c": crc32c(data)}


def manifest_file(fields: dict[str, object]) -> bytes:
    """A manifest's bytes: indented JSON that ends with its checksum."""
    text = json.dumps({"format": "gids", "version": 1, **fields, "checksum": "crc32c:00000000"}, indent=1)
    data = text.encode() + b"\n"
    return data.replace(b"crc32c:00000000", b"crc32c:%08x" % crc32c(data))


def manifest_fields(files: dict[str, bytes], *, edges: int, pages: int, shards: int) -> dict[str, Any]:
    """Of the dataset below, or a part of it. edges: of which files have arrays."""

    def arrays(folder: str, **types: tuple[str, int]) -> dict[str, object]:
        paths = {role: f"{folder}{role}.npy" for role in types}
        return {role: array(paths[role], *types[role], files[paths[role]]) for role in types}

    sums = "tables/_N.feat/checksum.bin"
    of_nodes = {"label": ("int64", 5), "train_idx": ("int64", 2), "out_degree": ("uint32", 5)}
    of_edges = {"indptr": ("int64", 6), "indices": ("int32", edges), "edge_ids": ("int32", edges)}
    table = {"kind": "node", "type": "_N", "key": "feat", "shape": [200], "dtype": "uint8", "page_bytes": 512}
    table |= {"row_count": 5, "shards": [f"tables/_N.feat/shard-0{i}.bin" for i in range(shards)]}
    table["checksums"] = array(sums, "uint32", pages, files[sums])
    return {
        "nodes": [{"type": "_N", "count": 5, "arrays": arrays("nodes/_N.", **of_nodes)}],
        "relations": [{"type": EDGE, "count": 3, "arrays": arrays("graph/_N._E._N/", **of_edges)}],
        "tables": [table],
    }


def npy(descr: str, count: int, data: bytes) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({count},), }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + text.encode().ljust(117) + b"\n" + data


def int64(*values: int) -> bytes:
    return b"".join(v.to_bytes(8, "little", signed=True) for v in values)


def int8(*values: int) -> bytes:
    return b"".join(v.to_bytes(1, "little", signed=True) for v in values)


def int32(*values: int) -> bytes:
    return b"".join(v.to_bytes(4, "little", signed=True) for v in values)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def write_example(path):
    with DatasetWriter(path, page_bytes=512, stripe=2) as writer:
        writer.write_table(
            "node", "_N", "feat", torch.arange(1, 6, dtype=torch.uint8)[:, None].repeat(1, 200)
        )
        edges = edge_list(torch.tensor([4, 0, 4]), torch.tensor([2, 1, 1]), num_src=5, num_dst=5)
        writer.write_edges(("_N", "_E", "_N"), edges, index_dtype="int32")
        writer.write_labels("_N", torch.tensor([0, 1, 0, 1, 2], dtype=torch.int8))
        writer.write_split("_N", "train", torch.tensor([3, 1]))


def test_every_byte_of_a_dataset(tmp_path):
    write_example(tmp_path / "a.gids")
    page = [bytes([1]) * 200 + bytes([2]) * 200, bytes([3]) * 200 + bytes([4]) * 200, bytes([5]) * 200]
    page = [p.ljust(512, b"\0") for p in page]
    files = {
        "nodes/_N.label.npy": npy("<i8", 5, int64(0, 1, 0, 1, 2)),
        "nodes/_N.train_idx.npy": npy("<i8", 2, int64(3, 1)),
        "nodes/_N.out_degree.npy": npy("<u4", 5, int32(1, 0, 0, 0, 2)),
        "graph/_N._E._N/indptr.npy": npy("<i8", 6, int64(0, 0, 2, 3, 3, 3)),
        "graph/_N._E._N/indices.npy": npy("<i4", 3, int32(0, 4, 4)),
        "graph/_N._E._N/edge_ids.npy": npy("<i4", 3, int32(1, 2, 0)),
        "tables/_N.feat/checksum.bin": b"".join(crc32c(p).to_bytes(4, "little") for p in page),
    }
    fields = manifest_fields(files, edges=3, pages=3, shards=2)
    files |= {
        "manifest.json": manifest_file(fields),
        "tables/_N.feat/shard-00.bin": page[0] + page[2],
        "tables/_N.feat/shard-01.bin": page[1],
    }
    assert contents(tmp_path / "a.gids") == files
    assert [p.name for p in tmp_path.iterdir()] == ["a.gids"], "nothing is left beside it"


def test_every_byte_of_a_part(tmp_path):
    """Of the dataset above, part 1 of 2 owns nodes 2, 3 and 4, and so the edge 4 -> 2 with id 0."""
    write_example(tmp_path / "a.gids")
    partition(tmp_path / "a.gids", tmp_path / "parts", 2, method="range")
    of = json.loads((tmp_path / "a.gids/manifest.json").read_text())["checksum"]
    page = [(bytes([3]) * 200 + bytes([4]) * 200).ljust(512, b"\0"), (bytes([5]) * 200).ljust(512, b"\0")]
    files = {
        "nodes/_N.label.npy": npy("<i8", 5, int64(0, 1, 0, 1, 2)),
        "nodes/_N.train_idx.npy": npy("<i8", 2, int64(3, 1)),
        "nodes/_N.out_degree.npy": npy("<u4", 5, int32(1, 0, 0, 0, 2)),
        "nodes/_N.owner.npy": npy("|u1", 5, bytes([0, 0, 1, 1, 1])),
        "graph/_N._E._N/indptr.npy": npy("<i8", 6, int64(0, 0, 0, 1, 1, 1)),
        "graph/_N._E._N/indices.npy": npy("<i4", 1, int32(4)),
        "graph/_N._E._N/edge_ids.npy": npy("<i4", 1, int32(0)),
        "tables/_N.feat/checksum.bin": b"".join(crc32c(p).to_bytes(4, "little") for p in page),
    }
    graph = tmp_path / "a.gids/graph/_N._E._N"
    whole = {role: crc32c((graph / f"{role}.npy").read_bytes()) for role in ("edge_ids", "indices", "indptr")}
    names = ", ".join(f'[["_N", "_E", "_N"], "{role}", {crc}]' for role, crc in whole.items())
    topology = f"crc32c:{crc32c(f'[{names}]'.encode()):08x}"
    fields = manifest_fields(files, edges=1, pages=2, shards=1)
    (nodes,), (relation,), (table,) = fields["nodes"], fields["relations"], fields["tables"]
    nodes["arrays"]["owner"] = array("nodes/_N.owner.npy", "uint8", 5, files["nodes/_N.owner.npy"])
    nodes["held"], relation["held"], table["row_count"] = 3, 1, 3
    part = {"index": 1, "count": 2, "of": of, "method": "range", "topology": topology}
    files["manifest.json"] = manifest_file({"part": part, **fields})
    files["tables/_N.feat/shard-00.bin"] = page[0] + page[1]
    assert contents(tmp_path / "parts/part-001.gids") == files
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gids", "parts"]


def test_every_byte_of_int8_rows(tmp_path):
    values = torch.tensor(
        [[1.0, -254.0, 0.4, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [127.0, 63.4, -0.6, 1.5, 2.5]]
    )
    with DatasetWriter(tmp_path / "a.gids", page_bytes=512) as writer:
        writer.write_table("node", "_N", "row", values, dtype=torch.int8, scale="row")
        writer.write_table("node", "_N", "column", values, dtype=torch.int8, scale="column")
    two, none, one = (np.float32(s).tobytes() for s in (2, 0, 1))
    # 1 / 2 and 2.5 are halves: to even. Three zeros fill the row up to its scale.
    rows = (
        int8(0, -127, 0, 0, 0) + bytes(3) + two + bytes(8) + none + int8(127, 63, -1, 2, 2) + bytes(3) + one
    )
    assert (tmp_path / "a.gids/tables/_N.row/shard-00.bin").read_bytes() == rows.ljust(512, b"\0")
    scales = np.array([127, 254, 0.6, 1.5, 2.5], np.float32) / np.float32(127)
    columns = int8(1, -127, 85, 85, 0) + bytes(5) + int8(127, 32, -127, 127, 127)
    assert (tmp_path / "a.gids/tables/_N.column/shard-00.bin").read_bytes() == columns.ljust(512, b"\0")
    header = npy_header("float32", (5,))
    assert (tmp_path / "a.gids/tables/_N.column/scale.npy").read_bytes() == header + scales.tobytes()
