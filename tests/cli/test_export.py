"""`gids export`: an exported table equals the source, byte for byte."""

import numpy as np
import pytest
import torch

from gids.cli import main
from gids.write import DatasetWriter

RNG = np.random.default_rng(12)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
)
@pytest.mark.parametrize("shape", [(999,), (500, 7), (40, 2, 3), (0, 5)])
def test_exported_array_equals_the_source_byte_for_byte(tmp_path, dtype, shape):
    np.save(tmp_path / "x.npy", RNG.integers(0, 100, shape).astype(dtype))
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids"), "--quiet"]) == 0
    arguments = ["export", str(tmp_path / "x.gids"), "feat", str(tmp_path / "y.npy"), "--memory", "20k"]
    assert main([*arguments, "--quiet"]) == 0
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
    assert main(["export", str(tmp_path / "d.gids"), "a.x", str(tmp_path / "x.npy"), *allow]) == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), values.float())
    assert capsys.readouterr().out == f"{tmp_path}/x.npy: float32[30, 4], 480 B\n"


def test_missing_or_ambiguous_table_prints_one_line(tmp_path, capsys):
    dataset(tmp_path / "d.gids")
    for table, message in (("y", "no table 'y' in d.gids"), ("x", "2 tables of d.gids have key 'x'")):
        arguments = [str(tmp_path / "d.gids"), table, str(tmp_path / "x.npy"), "--allow-dir", str(tmp_path)]
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.npy").exists()


def test_file_is_only_replaced_with_overwrite(tmp_path, capsys):
    dataset(tmp_path / "d.gids")
    (tmp_path / "x.npy").write_text("mine")
    arguments = ["export", str(tmp_path / "d.gids"), "b.x", str(tmp_path / "x.npy")]
    arguments += ["--allow-dir", str(tmp_path)]
    assert main(arguments) == 2
    assert "already exists: choose another name, or replace it with --overwrite" in capsys.readouterr().err
    assert (tmp_path / "x.npy").read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == 0
    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2]


@pytest.mark.parametrize("scale", ["row", "column"])
def test_int8_with_a_scale_is_exported_as_float32_or_with_its_scales(tmp_path, capsys, scale):
    values = RNG.standard_normal((500, 6), np.float32)
    np.save(tmp_path / "x.npy", values)
    arguments = ["--dtype", "int8", "--scale", scale, "--quiet"]
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids"), *arguments]) == 0
    command = ["export", str(tmp_path / "x.gids"), "feat"]
    assert main([*command, str(tmp_path / "y.npy"), "--memory", "20k"]) == 0
    assert main([*command, str(tmp_path / "raw.npy"), "--raw", "--memory", "20k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shape = [500] if scale == "row" else [6]
    assert lines[-1].startswith(f"{tmp_path}/raw.scale.npy: float32{shape}, ")
    wide, steps = np.load(tmp_path / "y.npy"), np.load(tmp_path / "raw.npy")
    scales = np.load(tmp_path / "raw.scale.npy")
    assert (wide.dtype, steps.dtype, steps.shape) == (np.float32, np.int8, (500, 6))
    assert np.array_equal(wide, steps * (scales[:, None] if scale == "row" else scales))
    assert np.abs(wide - values).max() < np.abs(values).max() / 250
    assert main([*command, str(tmp_path / "raw.npy"), "--raw"]) == 2
    assert "raw.npy already exists" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "raw.npy",
        "raw.scale.npy",
        "x.gids",
        "x.npy",
        "y.npy",
    ]


def test_raw_without_a_scale_changes_nothing(tmp_path):
    np.save(tmp_path / "x.npy", RNG.standard_normal((50, 6), np.float32))
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids"), "--quiet"]) == 0
    assert (
        main(["export", str(tmp_path / "x.gids"), "feat", str(tmp_path / "y.npy"), "--raw", "--quiet"]) == 0
    )
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_a_suffix_without_a_format_is_refused(tmp_path, capsys):
    dataset(tmp_path / "a.gids")
    assert main(["export", str(tmp_path / "a.gids"), "i", str(tmp_path / "out.txt")]) == 2
    assert "out.txt must be called NAME.npy, NAME.parquet or NAME.csv (got '.txt')" in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()
