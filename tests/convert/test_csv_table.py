"""Parsing CSV files, whatever the length of rows. test_memory.py measures the memory."""

import random

import pytest

pytest.importorskip("pyarrow.csv")

from gids.convert.csv_table import CsvTable
from gids.errors import FormatError


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
