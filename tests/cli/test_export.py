"""`gids export`: an exported table equals the source, byte for byte."""

import os

import numpy as np
import pytest
from commands import gids
from datasets import write_dataset

from gids import FeatureStore
from gids.cli import main

RNG = np.random.default_rng(12)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float16", (40, 2, 3)), ("float64", (999,)), ("int8", (0, 5)), ("uint64", (50, 7)), ("bool", (50, 7))],
)
def test_exported_array_equals_the_source_byte_for_byte(tmp_path, dtype, shape):
    np.save(tmp_path / "x.npy", RNG.integers(0, 100, shape).astype(dtype))
    gids("convert", tmp_path / "x.npy", tmp_path / "x.gids", "--quiet")
    for raw in ([], ["--raw"]):  # which is for int8 with a scale
        words = ["export", tmp_path / "x.gids", "feat", tmp_path / "y.npy", "--memory", "20k", "--overwrite"]
        gids(*words, "--quiet", *raw)
        assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_bfloat16_is_exported_as_float32_and_shards_outside_are_allowed(tmp_path, capsys):
    (tmp_path / "ssd").mkdir()
    write_dataset(tmp_path / "d.gids", stripe=[tmp_path / "ssd"])
    gids("export", tmp_path / "d.gids", "author.feat", tmp_path / "x.npy", "--allow-dir", tmp_path)
    rows = FeatureStore(tmp_path / "d.gids", allow_dirs=[tmp_path]).read_rows(range(3), "author.feat")
    assert np.array_equal(np.load(tmp_path / "x.npy"), rows.float())
    assert capsys.readouterr().out == f"{tmp_path}/x.npy: float32[3, 300], 3.6 kB\n"


def test_file_is_only_replaced_with_overwrite_and_once_it_is_written(dataset, tmp_path, capsys, monkeypatch):
    (tmp_path / "x.npy").write_text("mine")
    command = ["export", str(dataset), "year", str(tmp_path / "x.npy")]
    assert main(command) == 2
    assert "already exists: choose another name, or replace it (--overwrite" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        full = os.open("/dev/full", os.O_WRONLY)
        patch.setattr("os.fdatasync", lambda _: os.write(full, b"x"))
        assert main([*command, "--overwrite"]) == 2
        os.close(full)
    said = f"[Errno 28] No space left on device, and the file was not written: {tmp_path}/x.npy\n"
    assert capsys.readouterr().err.endswith(said)
    assert (tmp_path / "x.npy").read_text() == "mine"
    gids(*command, "--overwrite")
    assert np.load(tmp_path / "x.npy").tolist() == list(range(2000, 2020))


@pytest.mark.parametrize("scale", ["row", "column"])
def test_int8_with_a_scale_is_exported_as_float32_or_with_its_scales(tmp_path, capsys, scale):
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
    (tmp_path / "raw.npy").unlink()  # neither file is replaced
    assert main([*command, str(tmp_path / "raw.npy"), "--raw"]) == 2
    assert "raw.scale.npy already exists" in capsys.readouterr().err
    assert not (tmp_path / "raw.npy").exists()
