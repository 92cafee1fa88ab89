"""The page size that a conversion chooses: fewest reads through a cache, on the disk's alignment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import save_arrays

from gids.cli import main
from gids.store import FeatureStore
from gids.store.geometry import best_page_bytes


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [
        (2, 512),
        (300, 1024),  # 3 rows: one row would leave 41 % of 512 B empty
        (400, 512),  # 22 % empty cost less than 4 unwanted rows beside each
        (513, 2048),  # 3 rows: one or two would leave 50 % or 33 % empty
        (768, 1536),  # 2 rows and nothing empty
        (1200, 2560),
        (2048, 2048),
        (2049, 4096),
    ],
)
def test_the_page_holds_few_rows_and_little_space_is_empty(row_bytes: int, expected: int) -> None:
    assert best_page_bytes(row_bytes, alignment=512) == expected
    assert best_page_bytes(row_bytes, alignment=1) == expected
    # The formula of the docstring, in floating point, over every size.
    if row_bytes <= 2048:
        sizes = [s for s in range(512, 4097, 512) if s >= row_bytes]
        reads = {s: (s / (s // row_bytes)) ** 0.5 * (s // row_bytes) ** 0.125 for s in sizes}
        assert reads[expected] == pytest.approx(min(reads.values()))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Nodes with rows of 512, 400 and 4000 bytes; edges with weights."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "source"
    arrays = {
        "nodes/paper/feat": rng.standard_normal((40, 128), np.float32),
        "nodes/paper/text": rng.standard_normal((40, 100), np.float32),
        "nodes/paper/long": rng.standard_normal((40, 1000), np.float32),
        "edges/paper.cites.paper/edge_index": rng.integers(0, 40, (2, 90)),
        "edges/paper.cites.paper/weight": np.ones((90, 1), np.float32),
    }
    save_arrays(folder, **arrays)
    return folder


def disk_reads_blocks_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("gids.convert.layout._core.probe_file", lambda _, direct: ("ext4", nbytes))


def page_bytes(path: Path) -> dict[str, int]:
    return {name.removeprefix("paper."): t.page_bytes for name, t in FeatureStore(path).tables.items()}


def test_convert_chooses_for_each_table_and_says_why(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gids"
    disk_reads_blocks_of(monkeypatch, 512)
    assert main(["convert", str(source), str(path)]) == 0
    assert page_bytes(path) == {"feat": 512, "text": 512, "long": 4096, "cites.paper.weight": 512}
    made = capsys.readouterr().out.splitlines()[0]
    assert made.startswith(f"{path}: 4 tables, ")
    assert "paper.text in pages of 512 B: one row of 400 B each, so a cache holds no unwanted rows" in made
    assert "weight in pages of 512 B: 128 rows of 4 B each, the size that is cached best" in made
    assert main(["info", str(path)]) == 0
    assert "    one row of 400 B each, so a cache holds no unwanted rows\n" in capsys.readouterr().out


def test_convert_keeps_long_pages_on_a_disk_that_needs_them(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gids"
    disk_reads_blocks_of(monkeypatch, 4096)
    assert main(["convert", str(source), str(path)]) == 0
    assert set(page_bytes(path).values()) == {4096}
    made = capsys.readouterr().out.splitlines()[0]
    assert "8 rows of 512 B each, because direct I/O on this disk reads 4096 B at a time" in made


def test_convert_with_a_page_size_or_an_order_does_not_choose(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "a.gids"), "--page-bytes", "1024"]) == 0
    sizes = {"feat": 1024, "text": 1024, "long": 4096, "cites.paper.weight": 1024}
    assert page_bytes(tmp_path / "a.gids") == sizes
    assert "pages of" not in capsys.readouterr().out.splitlines()[0]
    assert main(["convert", str(source), str(tmp_path / "b.gids"), "--order", "degree"]) == 0
    assert page_bytes(tmp_path / "b.gids")["feat"] == 4096
    assert "in an order that puts rows together" in capsys.readouterr().out.splitlines()[0]
