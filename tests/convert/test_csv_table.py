"""Parsing CSV files with little memory, whatever the number of columns and the length of rows."""

import random
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow.csv")

from gids.convert.csv_table import CsvTable
from gids.errors import FormatError

_PEAK = """
import os, sys
from pathlib import Path
from gids.convert.csv_table import CsvTable
from gids.convert.arrow_table import import_pyarrow

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))

import_pyarrow(Path())
for folder in map(Path, sys.argv[1:]):
    if not (child := os.fork()):
        before = peak()
        table = CsvTable([folder / "nodes.csv"], [], folder / "scratch", 192 << 20)
        print(table.row_count, peak() - before, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_rows_and_hardly_with_columns(tmp_path):
    column_counts = (64, 1000)
    for count in column_counts:  # 70 MB
        (tmp_path / str(count)).mkdir()
        row = ",".join(["-0.1234567"] * count)
        header = ",".join(f"x_{i}" for i in range(count))
        (tmp_path / str(count) / "nodes.csv").write_text(f"{header}\n" + f"{row}\n" * (6_400_000 // count))
    command = [sys.executable, "-P", "-c", _PEAK, *map(str, column_counts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    for count, line in zip(column_counts, done.stdout.splitlines(), strict=True):
        rows, peak = map(int, line.split())
        assert rows == 6_400_000 // count
        assert peak < 250, count  # MiB, with the Arrow file that is mapped


def test_rows_that_are_longer_than_a_block_are_read_once(tmp_path):
    texts = ["a" * 3_000_000 if i in (8000, 11000) else "a" * 500 for i in range(12000)]
    texts[11000] += "\n\n" + "a" * 2_000_000
    lines = [
        f'{i},"{text}",{i / 2},{"bad" if i == 11500 else i}\n' + "\n" * (i % 3 == 0)
        for i, text in enumerate(texts)
    ]
    (tmp_path / "nodes.csv").write_text("id,text,x,y\n" + "".join(lines))
    table = CsvTable([tmp_path / "nodes.csv"], ["text"], tmp_path / "scratch", 512 << 20)
    assert [i for block in table.batches(["id"], 1000) for i in block.column(0).to_pylist()] == list(
        range(12000)
    )
    assert [t for ids in table.ids("text", as_text=True) for t in ids.to_pylist()] == texts
    assert table.types["x"] == "double"
    assert table.text_at == {"y": (11500, "bad")}


def test_a_row_above_the_limit_is_refused(tmp_path):
    (tmp_path / "nodes.csv").write_text("id,x\n1,2\n3," + "1" * (18 << 20) + "\n")
    with pytest.raises(
        FormatError, match=r"nodes\.csv cannot be parsed as CSV: a row has more than 8388608 bytes"
    ):
        CsvTable([tmp_path / "nodes.csv"], [], tmp_path / "scratch", 512 << 20)


@pytest.mark.parametrize("line", ["5", "5,6,7"])
def test_a_row_with_another_number_of_fields_is_named_by_its_line(tmp_path, line):
    rows = "".join(f'"a\nb",{i}\n\n' for i in range(random.Random(0).randrange(100, 200)))
    (tmp_path / "nodes.csv").write_text(f"\nid,x\n{rows}{line}\n")
    where = 3 + rows.count("\n")
    message = (
        f"nodes.csv, line {where}: {line.count(',') + 1} field.*the first line has the names of 2 columns"
    )
    with pytest.raises(FormatError, match=message):
        CsvTable([tmp_path / "nodes.csv"], [], tmp_path / "scratch", None)
