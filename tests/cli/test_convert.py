"""`gids convert`: options, what it prints, and its errors, which are one line with the reason."""

import contextlib
import errno
import os
import re
import sys

import numpy as np
import pytest
from commands import gids
from datasets import save_arrays
from forks import Fork

from gids import FeatureStore
from gids.cli import main
from gids.sizes import parse_bytes

RNG = np.random.default_rng(42)
FEAT = RNG.standard_normal((50, 7), np.float32)
EDGES = RNG.integers(0, 50, (2, 300))


OF_AN_ARRAY = [
    (["--page-bytes", "1000"], "page_bytes is 1000; it must be a multiple of 512"),
    (["--dtype", "float17"], "unknown dtype 'float17'"),
    (["--dtype", "color=float16"], "--dtype: no table 'color'; the source has _N.feat, feat"),
    (["--dtype", "uint8"], "would cut their fractions"),
    (["--dtype", "int8", "--scale", "page"], "--scale is 'page'; it must be 'row' or 'column'"),
    (["--scale", "row"], "--scale row is for floating features stored as int8: add --dtype int8"),
    (["--scale", "color=row"], "--scale: no table 'color'; the source has _N.feat, feat"),
    (["--stripe", "/proc/nonexistent"], "stripe directory /proc/nonexistent does not exist"),
    (["--shape", "3,4"], "--shape has no effect"),
    (["--num-nodes", "50"], "feat.npy is read as npy, and the option is for parquet, csv, edges"),
    (["--labels", "2K"], "the option is for igb"),
    (["--skip", "feat"], "--skip has no effect"),
    (["--reverse-edges", "--dedup"], "--reverse-edges, --dedup: the source has no edges"),
    (["--self-loops"], "--self-loops: the source has no edges"),
    (
        ["--split-column", "1"],
        "--split-column has no effect: the source has no masks of shape (nodes, splits)",
    ),
]
OF_A_DIRECTORY = [
    (["--num-nodes", "20"], "the option is for parquet, csv, edges"),
    (["--labels", "2K"], "the option is for igb"),
    (["--table", "paper.x"], "the option is for pyg, npy, raw"),
    (["--shape", "4,4"], "the option is for raw"),
    (["--skip", "pos"], "has no array of that name"),
    (["--split", "0.5,0.5,0"], "but the source has no labels: leave it out"),
]


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [*(("feat.npy", *case) for case in OF_AN_ARRAY), *((".", *case) for case in OF_A_DIRECTORY)],
)
def test_invalid_options_print_one_line_and_leave_nothing(tmp_path, refused, source, arguments, message):
    save_arrays(tmp_path / "s", feat=FEAT)
    assert message in refused("convert", tmp_path / "s" / source, tmp_path / "x.gids", *arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_split_of_a_source_that_has_one_is_an_error(tmp_path, refused):
    save_arrays(tmp_path / "s", feat=FEAT, label=np.arange(50), train_idx=np.arange(3))
    command = ("convert", tmp_path / "s", tmp_path / "x.gids", "--split")
    assert "the source has splits already" in refused(*command, "0.5,0.5,0")
    gids(*command, "none")


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convrt"], "unknown command 'convrt' (did you mean convert?)"),
        (["info", "a.gids", "c.gids"], "one argument too many: 'c.gids'; it takes"),
        (["convert", "a", "b", "--srtipe"], "--srtipe (did you mean --stripe?)"),
        (["convert", "a", "b", "--skp", "x"], "(did you mean --skip?)"),
        (["bench", "epoch", "a", "--bach-size", "3"], "(did you mean --batch-size?)"),
        *(
            ([command, "a", "b", "--memory", "1MB"], "--memory: '1MB' is not a size of 1 MiB or more")
            for command in ("convert", "partition")
        ),
        *(
            (["convert", "x.npy", "x.gids", *option.split()], "usage: gids convert")
            for option in ("--shape a,b", "--split half", "--memory lots", "--index-dtype int8")
        ),
    ],
)
def test_unknown_words_are_answered_with_similar_ones_or_the_usage(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_random_split_and_float64_are_reported(tmp_path, capsys):
    save_arrays(tmp_path / "s", feat=FEAT.astype(np.float64), label=np.arange(50) - 10)
    gids("convert", tmp_path / "s", tmp_path / "x.gids", "--seed", "3")
    told = capsys.readouterr().err
    assert "drew train 24, val 8, test 8 labelled nodes at random with seed 3" in told
    assert "_N.feat is float64, twice the bytes of float32" in told
    gids("convert", tmp_path / "s", tmp_path / "y.gids", "--dtype", "float32")
    assert "float64: twice" not in capsys.readouterr().err


def test_conversion_to_several_disks_prints_how_to_open_the_dataset(tmp_path, capsys, refused):
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
    assert f"(or gids ... --allow-dir {stripes[1]} --allow-dir '{stripes[0]}')" in refused("info", target)
    with pytest.raises(SystemExit):
        main(["convert", "--stripe", *map(str, stripes), str(tmp_path / "x.npy"), str(target)])
    assert "usage: gids convert SRC [SRC ...] DST [option ...]" in capsys.readouterr().err


def test_ctrl_c_prints_how_to_resume(tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "x.npz", x=FEAT, edge_index=EDGES)
    source, target = str(tmp_path / "x.npz"), tmp_path / "x.gids"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gids.write.dataset_writer.DatasetWriter.write_table", interrupt)  # after the graph
        assert main(["convert", source, str(target)]) == 130
    assert (
        f"interrupted; run the same command again to resume from {target}.partial" in capsys.readouterr().err
    )
    gids("convert", source, target)
    assert "resuming an unfinished conversion" in capsys.readouterr().err


def test_a_dataset_in_a_folder_of_its_source_is_no_part_of_the_source(tmp_path, capsys, monkeypatch):
    save_arrays(tmp_path, feat=FEAT, edge_index=EDGES)
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    command = ["convert", ".", "", "--stripe", "disk"]

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for name in ("x.gids", "y.gids"):
        command[2] = name
        with monkeypatch.context() as patch:
            patch.setattr("gids.write.dataset_writer.DatasetWriter.write_table", interrupt)
            assert main([*command, "--quiet"]) == 130
        assert main(["convert", ".", f"other-{name}", "--quiet"]) == 0
        assert main(command) == 0
        assert "resuming an unfinished conversion" in capsys.readouterr().err
    store = FeatureStore("x.gids", allow_dirs=["disk"])
    assert np.array_equal(store.table("feat").read_rows(range(50)).numpy(), FEAT)


def test_closed_output_is_no_error(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(["convert", "--list"]) == 0


@contextlib.contextmanager
def broken_pipe(buffering):
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), open(writing, "w", buffering=buffering) as file:
        yield file


def test_what_nobody_reads_changes_no_result(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", FEAT)
    with broken_pipe(buffering=1) as errors:
        monkeypatch.setattr("sys.stderr", errors)
        assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 0
        monkeypatch.undo()
    assert FeatureStore(tmp_path / "x.gids").num_nodes() == len(FEAT)
    os.truncate(tmp_path / "x.gids/tables/_N.feat/shard-00.bin", 100)
    with broken_pipe(buffering=-1) as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["verify", str(tmp_path / "x.gids")]) == 1


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_at_a_path_of_any_bytes(tmp_path, capsysbinary, suffix):
    pytest.importorskip("pyarrow")
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    table = folder / f"x.{suffix}"
    np.save(folder / "x.npy", FEAT)
    gids("convert", folder / "x.npy", folder / "a.gids")
    gids("export", folder / "a.gids", "feat", table)
    gids("convert", table, folder / "b.gids")
    gids("verify", folder / "b.gids", "--against", table)
    capsysbinary.readouterr()  # pytest-xdist cannot send such paths


def convert_without_streams(*words):
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None
    assert main(["convert", *words]) == 0
    assert [os.readlink(f"/proc/self/fd/{number}") for number in range(3)] == [os.devnull] * 3


def test_closed_standard_streams_are_no_error(tmp_path):
    np.save(tmp_path / "x.npy", FEAT)
    words = (str(tmp_path / "x.npy"), str(tmp_path / "x.gids"))
    done = Fork(tmp_path / "fork", convert_without_streams, *words, modules=("gids.convert", "forks")).done()
    assert done == (0, "", "")
    gids("verify", tmp_path / "x.gids", "--against", tmp_path / "x.npy")


def test_full_disk_leaves_only_what_can_be_resumed(tmp_path, capsys, monkeypatch):
    np.save(tmp_path / "x.npy", FEAT)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gids.write.workplace.Workplace._save", full)
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 2
    error = capsys.readouterr().err
    assert "No space left on device while writing x.gids" in error
    assert f"free space and try again, at: {tmp_path / 'x.gids'}" in error
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize("begun", [False, True])
def test_error_of_a_full_disk_at_the_start_says_what_to_do(tmp_path, capsys, monkeypatch, begun):
    np.save(tmp_path / "x.npy", FEAT)
    if begun:  # by an earlier command, whose work stays
        (tmp_path / "x.gids.partial").mkdir()
        (tmp_path / "x.gids.partial" / "lock").touch()
    before = sorted(tmp_path.rglob("*"))

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("gids.write.workplace.lock" if begun else "os.mkdir", full)
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 2
    error = capsys.readouterr().err
    assert "No space left on device while writing x.gids (" in error
    assert " free); nothing was published; free space and try again, at: " in error
    assert str(tmp_path / "x.gids") in error
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_replaced(tmp_path, refused):
    np.save(tmp_path / "x.npy", FEAT)
    gids("convert", tmp_path / "x.npy", tmp_path / "x.gids")
    np.save(tmp_path / "x.npy", -FEAT)
    save_arrays(tmp_path / "mine", feat=FEAT)
    for name in ("x.gids", "mine"):
        cure = "choose another name, or remove it first"
        assert f"{name} already exists, and a dataset never changes: {cure}" in refused(
            "convert", tmp_path / "x.npy", tmp_path / name
        )
    assert np.array_equal(FeatureStore(tmp_path / "x.gids").read_rows(range(50)), FEAT)


def test_free_space_is_checked_before_anything_is_written(tmp_path, capsys):
    header = np.lib.format.header_data_from_array_1_0(FEAT) | {"shape": (1 << 40,)}
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + (1 << 42))
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids")]) == 2
    error = capsys.readouterr().err
    found = re.search(
        r"not enough room, and nothing more was written: (.*) needed, (.*) free on the disk of: (.*)", error
    )
    needed = parse_bytes(found[1])  # no more: there is no graph, label or split
    assert 1.02 * (1 << 42) > needed > (1 << 42) > parse_bytes(found[2])
    assert found[3] == str(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_a_quiet_conversion_prints_only_what_is_left_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("gids.convert.run.direct_alignment", lambda _: 512)
    monkeypatch.setattr("gids.convert.layout._alignment_of", lambda _: 512)
    np.savez(tmp_path / "x.npz", x=FEAT)
    gids("convert", tmp_path / "x.npz", tmp_path / "x.gids", "--quiet")
    assert capfd.readouterr() == ("", "")
    np.savez(tmp_path / "x.npz", x=FEAT, names=np.array(["a"]))
    gids("convert", tmp_path / "x.npz", tmp_path / "z.gids", "--quiet")
    assert capfd.readouterr() == ("", "left out 'names' of x.npz: of type <U1, not numbers\n")
    gids("convert", tmp_path / "x.npz", tmp_path / "y.gids")
    out, err = capfd.readouterr()
    made, *following = out.splitlines()
    assert re.sub(r"in \d+\.\d s", "in SECONDS", made) == (
        f"{tmp_path}/y.gids: 1 table, 1.5 kB, in SECONDS; _N.x in pages of 512 B: 18 rows of 28 B each, the "
        "size that is cached best"
    )
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
