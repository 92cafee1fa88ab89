"""`gids verify`: faults are reported and set the exit status; comparing with a source.

tests/store/test_part_checks.py flips a bit in every file.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from commands import gids
from datasets import needs_unsigned, save_arrays, sign

from gids.cli import main


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two tables (pages with padding, and long pages), two shards elsewhere, graph, labels, splits."""
    folder = tmp_path_factory.mktemp("verify")
    rng = np.random.default_rng(1)
    source = folder / "source"
    save_arrays(
        source,
        feat=rng.standard_normal((40, 50), np.float32),
        long=rng.integers(0, 9, (40, 700)),
        edge_index=rng.integers(0, 40, (2, 90)),
        label=rng.integers(0, 4, 40),
    )
    (folder / "ssd").mkdir()
    arguments = ["--page-bytes", "512", "--stripe", str(folder / "ssd"), str(folder / "ssd"), "--quiet"]
    gids("convert", source, folder / "a.gids", *arguments)
    return folder / "a.gids"


def run(dataset, *arguments):
    return main(["verify", str(dataset), "--allow-dir", str(dataset.parent / "ssd"), *arguments])


def all_files(dataset):
    files = [p for root in (dataset, dataset.parent / "ssd") for p in root.rglob("*")]
    return sorted(p for p in files if p.is_file() and p.name != "gids-shards.json")


def test_valid_dataset_has_no_faults(dataset, capfd):
    assert run(dataset) == 0
    assert capfd.readouterr() == (f"{dataset}: no faults\n", "")
    assert run(dataset, "--quiet", "--workers", "1") == 0
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SystemExit):
        run(dataset, "--workers", "0")
    assert "argument --workers: '0' is not a whole number of 1 or more" in capfd.readouterr().err


def test_several_datasets_are_verified_in_one_call(dataset, tmp_path, capfd):
    def verify(*paths, more=()):
        return main(["verify", *map(str, paths), "--allow-dir", str(dataset.parent / "ssd"), *more])

    copy = tmp_path / "copy.gids"
    shutil.copytree(dataset, copy)
    assert verify(dataset, copy) == 0
    assert capfd.readouterr().out == f"{dataset}: no faults\n{copy}: no faults\n"
    (copy / "nodes" / "_N.label.npy").write_bytes(b"")
    for paths in ((copy, dataset), (dataset, copy)):
        assert verify(*paths) == 1
        out = capfd.readouterr().out
        assert f"{copy}/nodes/_N.label.npy is truncated" in out
        assert f"{dataset}: no faults\n" in out
    assert verify(dataset, tmp_path / "none.gids") == 2
    assert f"no dataset at {tmp_path}/none.gids" in capfd.readouterr().err
    assert verify(dataset, copy, more=("--against", str(dataset.parent / "source"))) == 2
    assert "--against compares one dataset (got 2): give one PATH" in capfd.readouterr().err


def test_a_path_of_any_bytes(dataset, tmp_path, monkeypatch):
    path = tmp_path / os.fsdecode(b"\xff.gids")
    shutil.copytree(dataset, path)
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", printed)
    assert main(["verify", str(path), "--allow-dir", str(dataset.parent / "ssd")]) == 0
    assert printed.buffer.getvalue() == os.fsencode(f"{path}: no faults\n")


def test_fault_in_a_page_is_reported_with_page_and_rows(dataset, capsys):
    shard = next((dataset.parent / "ssd").glob("*/_N.feat/shard-01.bin"))
    data = shard.read_bytes()
    # The second page of shard 1 is page 3: rows 6 and 7. Its last byte is padding.
    shard.write_bytes(data[:1023] + b"\1" + data[1024:])
    assert run(dataset) == 1
    assert (
        capsys.readouterr().out
        == f"{shard} at byte 512: page 3 of '_N.feat' (rows 6 to 7) fails its CRC32C check\n"
    )
    shard.write_bytes(data)


def test_every_fault_has_a_line(dataset, capsys):
    files = [p for p in all_files(dataset) if p.name in ("indices.npy", "shard-00.bin")]
    saved = {p: p.read_bytes() for p in files}
    for path in files:
        os.truncate(path, path.stat().st_size - 1)
    assert run(dataset) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(files)
    assert all("is truncated" in line for line in lines)
    for path, data in saved.items():
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("graph/_N._E._N/indptr.npy", 91, "indptr ends at 91, but there are 90 indices"),
        ("graph/_N._E._N/indices.npy", 40, "indices[89] is 40; it must be from 0 to 39"),
        ("graph/_N._E._N/edge_ids.npy", -1, "edge_ids[89] is -1"),
        ("nodes/_N.test_idx.npy", 40, "test_idx[7] is 40"),
    ],
)
def test_ids_out_of_range_are_found_with_valid_checksums(dataset, capsys, name, value, message):
    path, manifest = dataset / name, dataset / "manifest.json"
    saved, saved_manifest = path.read_bytes(), manifest.read_bytes()
    path.write_bytes(saved[:-8] + np.int64(value).tobytes())
    sign(dataset)
    status, output = run(dataset), capsys.readouterr().out
    path.write_bytes(saved)
    manifest.write_bytes(saved_manifest)
    assert status == 1
    assert output.startswith(f"{path}: {message}")


def test_shards_outside_the_dataset_need_allow_dir(dataset, capsys):
    assert main(["verify", str(dataset)]) == 1
    assert "--allow-dir" in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_fault_that_nobody_reads_is_one(dataset, unbuffered):
    """As of `gids verify DATASET | head`. The shards are outside, as above."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        command = [sys.executable, "-P", "-m", "gids", "verify", dataset]
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        assert subprocess.run(command, stdout=pipe, env=env, check=False).returncode == 1


def test_what_is_no_dataset_is_an_error(tmp_path, capsys):
    """Exit status 1 means faults."""
    (tmp_path / "notes.txt").write_text("no dataset")
    for path in (tmp_path, tmp_path / "notes.txt"):
        assert main(["verify", str(path)]) == 2
        error = f"gids verify: {path} has no manifest.json; is it a gids dataset? `gids convert` makes one\n"
        assert capsys.readouterr() == ("", error)
    assert main(["verify", str(tmp_path / "none.gids")]) == 2
    assert capsys.readouterr() == ("", f"gids verify: no dataset at {tmp_path}/none.gids\n")


KINDS = {
    "same": [],
    "wider": ["--dtype", "float64"],
    "float16": ["--dtype", "float16"],
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
    exact = kind in ("same", "wider")
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
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int16"])
def test_sources_of_types_that_tables_cannot_have_are_compared(tmp_path, capsys, dtype):
    values = np.array([[1, 2, 9], [3, 4, 9], [0, (1 << 15) - 1, 9]], dtype)
    np.save(tmp_path / "x.npy", values)
    path, against = str(tmp_path / "a.gids"), ["--against", str(tmp_path / "x.npy")]
    gids("convert", tmp_path / "x.npy", path, "--dtype", "int64", "--quiet")
    gids("verify", path, *against)
    assert capsys.readouterr().err == "_N.feat: equal\n"
    values[1, 1] = -2 if dtype == "int16" else np.iinfo(dtype).max - 1
    np.save(tmp_path / "x.npy", values)
    assert main(["verify", path, *against, "--quiet"]) == 1
    said = f"row 1, column 1 is 4, in the source {values[1, 1]}; 1 values differ"
    assert said in capsys.readouterr().out


def test_raw_source_is_compared(tmp_path, capsys, monkeypatch):
    np.arange(60, dtype=np.float32).tofile(tmp_path / "x.bin")
    describe = ["--dtype", "float32", "--shape=-1,6", "--table", "paper.emb"]
    gids("convert", tmp_path / "x.bin", tmp_path / "a.gids", *describe, "--quiet")
    places = []
    temporary = tempfile.TemporaryDirectory
    spy = lambda **options: places.append(options["dir"]) or temporary(**options)  # noqa: E731
    monkeypatch.setattr("tempfile.TemporaryDirectory", spy)
    monkeypatch.setattr("os.access", lambda *_: False)  # a disk that is mounted to be read only
    gids("verify", tmp_path / "a.gids", "--against", tmp_path / "x.bin", *describe)
    assert places == [None]
    assert capsys.readouterr().err == "paper.emb: equal\n"
    assert main(["verify", str(tmp_path / "a.gids"), "--against", str(tmp_path / "none")]) == 2
