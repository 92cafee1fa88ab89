"""Commands that are refused: one line with the reason, status 2, and nothing is changed or left."""

import os
import shlex

import numpy as np
import pytest
from commands import gids
from datasets import contents, save_arrays, write_dataset

from gids.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with sources, a dataset, its parts, and pipes."""
    place = tmp_path_factory.mktemp("refused")
    feat = np.random.default_rng(42).standard_normal((50, 7), np.float32)
    save_arrays(place, feat=feat, owners=np.zeros(20, np.int8))
    save_arrays(place / "plain", feat=feat)
    save_arrays(place / "split", feat=feat, label=np.arange(50), train_idx=np.arange(3))
    write_dataset(place / "mag.gids")
    gids("partition", place / "mag.gids", place / "parts", "--parts", "2", "--quiet")
    for name in ("pipe", "pipe.csv"):
        os.mkfifo(place / name)
    return place


TAKEN = "already exists, and a dataset never changes: choose another name, or remove it first"
GRAPH = "generate x --nodes 3e3 --edges 3e4 --dim 12 --classes 5"
PART = "parts/part-000.gids"
NO_MANIFEST = "has no manifest.json; is it a gids dataset? `gids convert` makes one"

REFUSED = [
    ("convert feat.npy x.gids --page-bytes 1000", "page_bytes is 1000; it must be a multiple of 512"),
    ("convert feat.npy x.gids --dtype float17", "unknown dtype 'float17'"),
    ("convert feat.npy x.gids --dtype a=float16", "--dtype: no table 'a'; the source has _N.feat, feat"),
    ("convert feat.npy x.gids --dtype uint8", "would cut their fractions"),
    ("convert feat.npy x.gids --dtype int8 --scale page", "--scale is 'page'; it must be 'row' or 'column'"),
    ("convert feat.npy x.gids --scale row", "--scale row is for floating features stored as int8"),
    ("convert feat.npy x.gids --scale a=row", "--scale: no table 'a'; the source has _N.feat, feat"),
    ("convert feat.npy x.gids --stripe /proc/none", "stripe directory /proc/none does not exist"),
    ("convert feat.npy x.gids --shape 3,4", "--shape has no effect"),
    ("convert feat.npy x.gids --num-nodes 50", "is read as npy, and the option is for parquet, csv, edges"),
    ("convert feat.npy x.gids --labels 2K", "the option is for igb"),
    ("convert feat.npy x.gids --skip feat", "--skip has no effect"),
    ("convert feat.npy x.gids --reverse-edges --dedup", "--reverse-edges, --dedup: the source has no edges"),
    ("convert feat.npy x.gids --split-column 1", "the source has no masks of shape (nodes, splits)"),
    ("convert feat.npy x.gids --order hilbert", "'hilbert'; choose original, degree, community"),
    ("convert plain x.gids --table paper.x", "the option is for pyg, npy, raw"),
    ("convert plain x.gids --shape 4,4", "the option is for raw"),
    ("convert plain x.gids --skip pos", "has no array of that name"),
    ("convert plain x.gids --split 0.5,0.5,0", "but the source has no labels: leave it out"),
    ("convert split x.gids --split 0.5,0.5,0", "the source has splits already"),
    ("convert feat.npy mag.gids", f"mag.gids {TAKEN}"),
    ("convert feat.npy plain", f"plain {TAKEN}"),
    (f"convert {PART} x.gids", "convert the whole dataset, then partition it"),
    ("export mag.gids y x.npy", "no table 'y' in mag.gids"),
    ("export mag.gids feat x.npy", "2 tables of mag.gids have key 'feat'"),
    ("export mag.gids year x.txt", "x.txt must be called NAME.npy, NAME.parquet or NAME.csv (got '.txt')"),
    ("export mag.gids year x.csv --raw", "--raw is for .npy, not for x.csv: leave it out"),
    ("export mag.gids year feat.npy", "already exists: choose another name, or replace it (--overwrite"),
    ("export mag.gids year pipe --overwrite", "is no regular file, so it is not replaced"),
    ("export mag.gids year pipe.csv --overwrite", "is no regular file, so it is not replaced"),
    (f"{GRAPH} --classes 0", "classes must be 1 to"),
    (f"{GRAPH} --nodes 1e14", "not enough room"),
    (f"{GRAPH} --dim 0", "node_count and dim must be 1 or more"),
    ("generate plain", "already exists: choose another name"),
    ("heat mag.gids --method sampled --damping 0.9", "--damping does not apply to --method sampled"),
    ("heat mag.gids --batch-size 1", "--batch-size does not apply to --method reverse-pagerank"),
    ("heat mag.gids --fanouts 3 --damping 0.9", "exclude each other: remove one"),
    ("heat mag.gids --damping 1.5", "damping=1.5; it must be between 0 and 1"),
    ("heat mag.gids --method sampled --batch-size 0", "batch_size=0; it must be 1 or more"),
    (f"heat {PART} --method sampled", "compute the heat of the whole dataset, then partition it"),
    ("partition mag.gids x --parts 0", "parts=0; it must be 1 to 4096"),
    ("partition no.gids x --parts 2", "no dataset at"),
    ("partition mag.gids x --parts 2 --owners paper=owners.npy", "'author' has none"),
    (f"partition {PART} x --parts 2", "partition the whole dataset"),
    ("info", "PATH is missing: give a dataset, or --system"),
    ("info plain", f"plain {NO_MANIFEST}"),
    ("verify plain", f"plain {NO_MANIFEST}"),
    ("verify feat.npy", f"feat.npy {NO_MANIFEST}"),
    ("verify mag.gids none.gids", "no dataset at none.gids"),
    ("verify mag.gids mag.gids --against plain", "--against compares one dataset (got 2): give one PATH"),
    ("verify mag.gids --against none", "no such file or directory: none;"),
    (f"verify {PART} --against plain", "compare the whole dataset with its source"),
    (f"bench hit-ratio {PART}", "measure with the whole dataset (gids bench needs all parts)"),
    (f"bench bandwidth {PART}", "measure with the whole dataset"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command for command, _ in REFUSED])
def test_a_command_is_refused_in_one_line(place, monkeypatch, capsys, command, message):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*")), contents(place)
    assert main(shlex.split(command)) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gids {command.split()[0]}: ")
    assert message in line
    assert (sorted(place.rglob("*")), contents(place)) == before


UNREADABLE = [
    ("convrt", "unknown command 'convrt' (did you mean convert?)"),
    ("info a.gids c.gids", "one argument too many: 'c.gids'; it takes"),
    ("convert a b --srtipe", "--srtipe (did you mean --stripe?)"),
    ("convert a b --skp x", "(did you mean --skip?)"),
    ("convert a b --memory 1MB", "--memory: '1MB' is not a size of 1 MiB or more"),
    ("convert a b --shape a,b", "usage: gids convert SRC [SRC ...] DST [option ...]"),
    ("convert a b --split half", "is not a list of numbers such as 0.6,0.2,0.2"),
    ("convert --stripe disk a b", "usage: gids convert SRC [SRC ...] DST [option ...]"),
    ("convert '' y.gids", "'' is not a path"),
    ("export a.gids feat x.npy --memory 16XB", "argument --memory: '16XB' is not a size in bytes: use 4096"),
    ("generate g --nodes 1.5", "is not an integer of 0 or more: write 1000000 or 1e6"),
    ("generate g --split 0.9,0.9,0", "is not three fractions with a sum of at most 1"),
    ("heat a.gids --fanouts 3,x", "'3,x' is not a list of fanouts such as 10,5,5"),
    ("verify a.gids --workers 0", "argument --workers: '0' is not a whole number of 1 or more"),
    ("bench epoch a --bach-size 3", "(did you mean --batch-size?)"),
    ("bench epoch a --window 23", "--window: '23' is not a whole number from 0 to 22"),
    ("bench epoch a --seconds nan", "--seconds: 'nan' is not a number of seconds of 0 or more (0: no limit)"),
    ("bench hit-ratio a --seed -1", "--seed: '-1' is not a whole number of 0 or more"),
    ("bench hit-ratio a --windows 3,23", "'3,23' is not a list of numbers from 0 to 22, such as 4,8,16"),
    ("bench hit-ratio a --cache ,", "--cache: ',' is not a list such as a,b,c"),
    ("bench hit-ratio a --kappa 1.5", "is not a whole number of 1 or more, or inf"),
]


@pytest.mark.parametrize(("command", "message"), UNREADABLE, ids=[command for command, _ in UNREADABLE])
def test_unreadable_words_are_answered_with_similar_ones_or_the_usage(capsys, command, message):
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(command))
    assert message in capsys.readouterr().err
