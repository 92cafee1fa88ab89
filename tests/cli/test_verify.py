"""`gids verify`: faults are reported and set the exit status; comparing with a source.

tests/store/test_verification.py flips a bit in every file.
"""

import os
import re
import shutil

import numpy as np
import pytest
from commands import gids
from datasets import needs_unsigned, save_arrays, sign, write_dataset

from gids.cli import main


def test_several_datasets_are_verified_in_one_call(dataset, tmp_path, capfd):
    def verify(*paths, status):
        assert main(["verify", *map(str, paths)]) == status
        return capfd.readouterr()

    assert verify(dataset, "--quiet", "--workers", "1", status=0) == ("", "")
    copy = tmp_path / "copy.gids"
    shutil.copytree(dataset, copy)
    assert verify(dataset, copy, status=0) == (f"{dataset}: no faults\n{copy}: no faults\n", "")
    (copy / "nodes" / "paper.label.npy").write_bytes(b"")
    for paths in ((copy, dataset), (dataset, copy)):
        out, _ = verify(*paths, status=1)
        assert f"{copy}/nodes/paper.label.npy is truncated" in out
        assert f"{dataset}: no faults\n" in out


def test_fault_in_a_page_is_reported_with_page_and_rows(tmp_path, capsys):
    write_dataset(tmp_path / "a.gids", stripe=2)
    shard = tmp_path / "a.gids/tables/paper.feat/shard-01.bin"
    data = shard.read_bytes()
    # The second page of shard 1 is page 3: rows 6 and 7. Its last byte is padding.
    shard.write_bytes(data[:1023] + b"\1" + data[1024:])
    assert main(["verify", str(tmp_path / "a.gids")]) == 1
    said = f"{shard} at byte 512: page 3 of 'paper.feat' (rows 6 to 7) fails its CRC32C check\n"
    assert capsys.readouterr().out == said


def test_every_fault_has_a_line(dataset, capsys):
    files = [p for p in dataset.rglob("*.*") if p.name in ("indices.npy", "shard-00.bin")]
    for path in files:
        os.truncate(path, path.stat().st_size - 1)
    assert main(["verify", str(dataset)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(files) == 6
    assert all("is truncated" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("graph/paper.cites.paper/indptr.npy", 101, "indptr ends at 101, but there are 100 indices"),
        ("graph/author.writes.paper/indices.npy", 3, "indices[3] is 3; it must be from 0 to 2"),
        ("graph/author.writes.paper/edge_ids.npy", -1, "edge_ids[3] is -1"),
        ("nodes/paper.test_idx.npy", 20, "test_idx[4] is 20"),
    ],
)
def test_ids_out_of_range_are_found_with_valid_checksums(dataset, capsys, name, value, message):
    path = dataset / name
    path.write_bytes(path.read_bytes()[:-8] + np.int64(value).tobytes())
    sign(dataset)
    assert main(["verify", str(dataset)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: {message}")


def test_shards_outside_the_dataset_need_allow_dir(tmp_path, capsys):
    (tmp_path / "ssd").mkdir()
    write_dataset(tmp_path / "a.gids", stripe=[tmp_path / "ssd"])
    assert main(["verify", str(tmp_path / "a.gids")]) == 1
    assert f"--allow-dir {tmp_path}/ssd)" in capsys.readouterr().out
    gids("verify", tmp_path / "a.gids", "--allow-dir", tmp_path / "ssd")


KINDS = {
    "same": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "row": ["--dtype", "int8"],
    "column": ["--dtype", "int8", "--scale", "column"],
}


@pytest.fixture
def source(tmp_path):
    """A directory with features, whole numbers, edges and a table of edges."""
    rng = np.random.default_rng(2)
    save_arrays(
        tmp_path / "source",
        feat=rng.standard_normal((300, 50), np.float32),
        year=rng.integers(0, 100, (300, 1)),
        edge_index=rng.integers(0, 300, (2, 900)),
        edge_w=rng.standard_normal((900, 3)),
    )
    return tmp_path / "source"


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_is_compared_with_its_source(tmp_path, source, capsys, kind):
    path = tmp_path / "a.gids"
    dtype = [f"feat={a}" if a[0] != "-" else a for a in KINDS[kind]]
    gids("convert", source, path, "--reverse-edges", "--quiet", *dtype)
    against = ["verify", str(path), "--against", str(source), "--reverse-edges"]
    gids(*against)
    out, err = capsys.readouterr()
    assert out == f"{path}: no faults\n"
    said = err.splitlines()
    assert said[1:] == ["_N.year: equal", "_N._E._N.w: equal"]
    exact = kind == "same"
    assert said[0] == "_N.feat: equal" if exact else said[0].startswith("_N.feat: float32 stored as ")
    features = np.load(source / "feat.npy")
    features[123, 4] += 0.5
    features[123, 5] = 0.25
    np.save(source / "feat.npy", features)
    assert main(against) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("'_N.feat': row 123, column 4 is ")
    rounded = "" if exact else ", rounded as in the dataset"
    assert re.search(rf"{rounded}; \d+ values differ$", line)
    assert [p.name for p in tmp_path.iterdir() if "verify" in p.name] == []


def test_an_error_just_beyond_the_bound_is_found(tmp_path, capsys):
    values = np.linspace(-1, 1, 255, dtype=np.float32).reshape(1, 255)
    np.save(tmp_path / "x.npy", values)
    command = ["verify", str(tmp_path / "a.gids"), "--against", str(tmp_path / "x.npy"), "--quiet"]
    gids("convert", tmp_path / "x.npy", tmp_path / "a.gids", "--dtype", "int8", "--quiet")
    gids(*command)
    for change, status in ((0.49 / 127, 0), (0.51 / 127, 1)):
        moved = values.copy()
        moved[0, 127] = change  # 0 is stored as it is
        np.save(tmp_path / "x.npy", moved)
        assert main(command) == status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("scale", "said"),
    [("row", "; 8 values differ"), ("column", "'_N.feat': the scales of columns do not fit")],
)
def test_bound_depends_on_the_source_not_on_the_stored_scale(tmp_path, capsys, scale, said):
    """Else a scale that is too large would excuse any value."""
    values = np.random.default_rng(3).uniform(-1, 1, (40, 8)).astype(np.float32)
    values[3, 0] = 1000
    np.save(tmp_path / "x.npy", values)
    convert = ["convert", str(tmp_path / "x.npy"), str(tmp_path / "a.gids"), "--quiet", "--dtype", "int8"]
    gids(*convert, "--scale", scale)
    values[3, 0] = 0.5  # what is stored of its row or column is within the stored scale, and far off
    np.save(tmp_path / "x.npy", values)
    assert main(["verify", str(tmp_path / "a.gids"), "--against", str(tmp_path / "x.npy"), "--quiet"]) == 1
    assert said in capsys.readouterr().out


def test_tables_that_only_one_side_has_are_faults(tmp_path, source, capsys):
    path = tmp_path / "a.gids"
    gids("convert", source, path, "--quiet")
    (source / "year.npy").rename(source / "age.npy")
    np.save(source / "feat.npy", np.zeros((300, 51), np.float32))
    assert main(["verify", str(path), "--against", str(source), "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "table '_N.age' of the source is not in a.gids",
        "'_N.feat' has shape [300, 50], in the source [300, 51]",
        "table '_N.year' of a.gids is not in the source",
    ]


@needs_unsigned
def test_raw_sources_of_unsigned_numbers_are_compared(tmp_path, capsys):
    values = np.array([[1, 2, 9], [3, 4, 9], [0, (1 << 15) - 1, 9]], np.uint64)
    values.tofile(tmp_path / "x.bin")
    describe = ["--dtype", "uint64", "--shape=-1,3", "--table", "paper.emb"]
    gids("convert", tmp_path / "x.bin", tmp_path / "a.gids", *describe, "--quiet")
    command = ["verify", str(tmp_path / "a.gids"), "--against", str(tmp_path / "x.bin"), *describe]
    gids(*command)
    assert capsys.readouterr().err == "paper.emb: equal\n"
    values[1, 1] = (1 << 64) - 2
    values.tofile(tmp_path / "x.bin")
    assert main([*command, "--quiet"]) == 1
    said = f"row 1, column 1 is 4, in the source {(1 << 64) - 2}; 1 values differ"
    assert said in capsys.readouterr().out
