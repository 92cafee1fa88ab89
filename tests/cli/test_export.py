"""`gids export`: an exported table equals the source, byte for byte."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import gids

from gids.cli import main
from gids.write import DatasetWriter

RNG = np.random.default_rng(12)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "uint64", "bool"]
)
@pytest.mark.parametrize("shape", [(999,), (500, 7), (40, 2, 3), (0, 5)])
def test_exported_array_equals_the_source_byte_for_byte(tmp_path, dtype, shape):
    np.save(tmp_path / "x.npy", RNG.integers(0, 100, shape).astype(dtype))
    gids("convert", tmp_path / "x.npy", tmp_path / "x.gids", "--quiet")
    arguments = ["export", str(tmp_path / "x.gids"), "feat", str(tmp_path / "y.npy"), "--memory", "20k"]
    gids(*arguments, "--quiet")
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def dataset(path):
    values = torch.from_numpy(RNG.standard_normal((30, 4), np.float32)).to(torch.bfloat16)
    with DatasetWriter(path, stripe=[path.parent]) as writer:
        writer.write_table("node", "a", "x", values)
        writer.write_table("node", "b", "x", torch.arange(3))
    return values


def test_bfloat16_is_exported_as_float32_and_shards_outside_are_allowed(tmp_path, capsys):
    values = dataset(tmp_path / "d.gids")
    allow = ["--allow-dir", str(tmp_path)]
    gids("export", tmp_path / "d.gids", "a.x", tmp_path / "x.npy", *allow)
    assert np.array_equal(np.load(tmp_path / "x.npy"), values.float())
    assert capsys.readouterr().out == f"{tmp_path}/x.npy: float32[30, 4], 480 B\n"


def test_missing_or_ambiguous_table_prints_one_line(tmp_path, refused):
    dataset(tmp_path / "d.gids")
    for table, message in (("y", "no table 'y' in d.gids"), ("x", "2 tables of d.gids have key 'x'")):
        arguments = [str(tmp_path / "d.gids"), table, str(tmp_path / "x.npy"), "--allow-dir", str(tmp_path)]
        assert message in refused("export", *arguments)
    assert not (tmp_path / "x.npy").exists()


def test_file_is_only_replaced_with_overwrite(tmp_path, capsys, monkeypatch):
    dataset(tmp_path / "d.gids")
    (tmp_path / "x.npy").write_text("mine")
    arguments = ["export", str(tmp_path / "d.gids"), "b.x", str(tmp_path / "x.npy")]
    arguments += ["--allow-dir", str(tmp_path)]
    assert main(arguments) == 2
    assert "already exists: choose another name, or replace it (--overwrite" in capsys.readouterr().err
    assert (tmp_path / "x.npy").read_text() == "mine"
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", lambda _: Path("/dev/full").write_text("x"))
        assert main([*arguments, "--overwrite"]) == 2
    said = f"[Errno 28] No space left on device, and the file was not written: {tmp_path}/x.npy\n"
    assert capsys.readouterr().err.endswith(said)
    gids(*arguments, "--overwrite")
    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2]


@pytest.mark.parametrize("scale", ["row", "column"])
def test_int8_with_a_scale_is_exported_as_float32_or_with_its_scales(tmp_path, capsys, scale, refused):
    values = RNG.standard_normal((500, 6), np.float32)
    np.save(tmp_path / "x.npy", values)
    arguments = ["--dtype", "int8", "--scale", scale, "--quiet"]
    gids("convert", tmp_path / "x.npy", tmp_path / "x.gids", *arguments)
    command = ["export", str(tmp_path / "x.gids"), "feat"]
    gids(*command, tmp_path / "y.npy", "--memory", "20k")
    gids(*command, tmp_path / "raw.npy", "--raw", "--memory", "20k")
    lines = capsys.readouterr().out.splitlines()
    shape = [500] if scale == "row" else [6]
    assert lines[-1].startswith(f"{tmp_path}/raw.scale.npy: float32{shape}, ")
    wide, steps = np.load(tmp_path / "y.npy"), np.load(tmp_path / "raw.npy")
    scales = np.load(tmp_path / "raw.scale.npy")
    assert (wide.dtype, steps.dtype, steps.shape) == (np.float32, np.int8, (500, 6))
    assert np.array_equal(wide, steps * (scales[:, None] if scale == "row" else scales))
    assert np.abs(wide - values).max() < np.abs(values).max() / 250
    assert "raw.npy already exists" in refused(*command, tmp_path / "raw.npy", "--raw")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "raw.npy",
        "raw.scale.npy",
        "x.gids",
        "x.npy",
        "y.npy",
    ]


def test_raw_without_a_scale_changes_nothing(tmp_path):
    np.save(tmp_path / "x.npy", RNG.standard_normal((50, 6), np.float32))
    gids("convert", tmp_path / "x.npy", tmp_path / "x.gids", "--quiet")
    gids("export", tmp_path / "x.gids", "feat", tmp_path / "y.npy", "--raw", "--quiet")
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_a_suffix_without_a_format_is_refused(tmp_path, refused):
    dataset(tmp_path / "a.gids")
    assert "out.txt must be called NAME.npy, NAME.parquet or NAME.csv (got '.txt')" in refused(
        "export", tmp_path / "a.gids", "i", tmp_path / "out.txt"
    )
    assert not (tmp_path / "out.txt").exists()


def test_only_regular_files_are_replaced(tmp_path, refused):
    dataset(tmp_path / "a.gids")
    allow = ["--allow-dir", str(tmp_path), "--overwrite"]
    for suffix in ("", ".csv"):
        device = tmp_path / f"device{suffix}"
        os.mkfifo(device)
        assert "is no regular file, so it is not replaced" in refused(
            "export", tmp_path / "a.gids", "b.x", device, *allow
        )
        assert device.is_fifo()
