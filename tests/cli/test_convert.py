"""`gids convert`: what it prints, how it resumes, and where its output goes."""

import contextlib
import os
import re

import numpy as np
import pytest
from commands import gids
from datasets import save_arrays

from gids import FeatureStore
from gids.cli import main

RNG = np.random.default_rng(42)
FEAT = RNG.standard_normal((50, 7), np.float32)
EDGES = RNG.integers(0, 50, (2, 300))


def test_help_fits_on_a_screen_and_another_shows_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            main(["convert", option])
        pages.append(capsys.readouterr().out)
    assert len(pages[0].splitlines()) <= 42
    for group in ("input:", "storage:", "graph:", "splits:", "run:"):
        assert f"\n{group}\n" in pages[0]
    for rare in ("--skip", "--scale", "--dedup", "--split-column"):
        assert rare not in pages[0].replace("--skip-", "")
        assert rare in pages[1]


def test_random_split_and_float64_are_reported(tmp_path, capsys):
    save_arrays(tmp_path / "s", feat=FEAT.astype(np.float64), label=np.arange(50) - 10)
    gids("convert", tmp_path / "s", tmp_path / "x.gids", "--seed", "3")
    told = capsys.readouterr().err
    assert "drew train 24, val 8, test 8 labelled nodes at random with seed 3" in told
    assert "_N.feat is float64, twice the bytes of float32" in told


def test_conversion_to_several_disks_prints_how_to_open_the_dataset(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones((5000, 8), np.float32))
    stripes = [tmp_path / "disk a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    target = tmp_path / "x.gids"
    gids("convert", tmp_path / "x.npy", target, "--stripe", *stripes)
    table = FeatureStore(target, allow_dirs=stripes).table("feat")
    assert [path.parents[2] for path in table.shard_paths] == stripes
    assert bool((table.read_rows(range(5000)) == 1).all())
    told = capsys.readouterr().out
    assert f"gids.open({str(target)!r}, allow_dirs={[str(s) for s in stripes]})" in told
    assert told.count(f"{target} --allow-dir '{stripes[0]}' --allow-dir {stripes[1]}\n") == 2
    assert main(["info", str(target)]) == 2
    allowed = f"(or gids ... --allow-dir {stripes[1]} --allow-dir '{stripes[0]}')"
    assert allowed in capsys.readouterr().err


def test_an_interrupted_conversion_resumes_and_is_no_part_of_its_source(tmp_path, capsys, monkeypatch):
    """The dataset is in the folder of its source."""
    save_arrays(tmp_path, feat=FEAT, edge_index=EDGES)
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    command = ["convert", ".", "x.gids", "--stripe", "disk"]
    with monkeypatch.context() as patch:
        patch.setattr("gids.write.dataset_writer.DatasetWriter.write_table", interrupt)  # after the graph
        assert main(command) == 130
    said = f"interrupted; run the same command again to resume from {tmp_path}/x.gids.partial"
    assert said in capsys.readouterr().err
    gids("convert", ".", "other.gids", "--quiet")
    gids(*command)
    assert "resuming an unfinished conversion" in capsys.readouterr().err
    store = FeatureStore("x.gids", allow_dirs=["disk"])
    assert np.array_equal(store.table("feat").read_rows(range(50)).numpy(), FEAT)


@contextlib.contextmanager
def broken_pipe(buffering):
    reading, writing = os.pipe()
    os.close(reading)
    file = open(writing, "w", buffering=buffering)  # noqa: SIM115
    try:
        yield file
    finally:
        with contextlib.suppress(BrokenPipeError):
            file.close()


def test_what_nobody_reads_changes_no_result(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", FEAT)
    with broken_pipe(buffering=1) as errors:
        monkeypatch.setattr("sys.stderr", errors)
        assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 0
        monkeypatch.undo()
    assert FeatureStore(tmp_path / "x.gids").num_nodes() == len(FEAT)
    os.truncate(tmp_path / "x.gids/tables/_N.feat/shard-00.bin", 100)
    for words, buffering, status in (
        (["verify", str(tmp_path / "x.gids")], 1, 1),
        (["convert", "--list"], -1, 0),
    ):
        with broken_pipe(buffering) as output:
            monkeypatch.setattr("sys.stdout", output)
            assert main(words) == status
            monkeypatch.undo()


def test_tables_at_a_path_of_any_bytes(tmp_path, capsysbinary):
    pytest.importorskip("pyarrow")
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    table = folder / "x.csv"
    np.save(folder / "x.npy", FEAT)
    gids("convert", folder / "x.npy", folder / "a.gids")
    gids("export", folder / "a.gids", "feat", table)
    gids("convert", table, folder / "b.gids")
    capsysbinary.readouterr()
    gids("verify", folder / "b.gids", "--against", table)
    assert capsysbinary.readouterr().out == os.fsencode(f"{folder}/b.gids: no faults\n")


def test_a_quiet_conversion_prints_only_what_is_left_out(tmp_path, capfd):
    np.savez(tmp_path / "x.npz", x=FEAT, names=np.array(["a"]))
    gids("convert", tmp_path / "x.npz", tmp_path / "x.gids", "--quiet")
    assert capfd.readouterr() == ("", "left out 'names' of x.npz: of type <U1, not numbers\n")
    gids("convert", tmp_path / "x.npz", tmp_path / "y.gids")
    out, err = capfd.readouterr()
    made, *following = out.splitlines()
    pages = r"_N\.x in pages of \d+ B: \d+ rows of 28 B each, (the size that|because direct I/O) .*"
    assert re.fullmatch(rf"{tmp_path}/y.gids: 1 table, \d\.\d kB, in \d+\.\d s; {pages}", made)
    assert following == [
        "next:",
        f"    gids info {tmp_path}/y.gids",
        f"    gids bench bandwidth {tmp_path}/y.gids",
        "and in Python:",
        "    import gids",
        f"    source = gids.open('{tmp_path}/y.gids')",
    ]
    assert err.splitlines() == [
        "convert: reading the source",
        "left out 'names' of x.npz: of type <U1, not numbers",
        "convert: table _N.x",
        "convert: publishing",
    ]
