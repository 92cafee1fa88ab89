"""`gids partition`, and what the other commands do with a part."""

import json

import numpy as np
import pytest
from commands import gids

from gids import FeatureStore
from gids.cli import main


@pytest.fixture(scope="module")
def parts(written_dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("partition") / "parts"
    gids("partition", written_dataset, out, "--parts", "2", "--quiet")
    return out


def test_text_report(written_dataset, tmp_path, capsys):
    out = tmp_path / "parts"
    gids("partition", written_dataset, out, "--parts", "2", "--by", "range")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out}: 2 parts by range"
    assert lines[2].split() == ["rows", "training", "seeds", "in-edges", "size"]
    assert lines[4].split()[:5] == ["part", "0", "11", "10", "55"]
    assert lines[5].split()[:5] == ["part", "1", "12", "0", "49"]
    assert lines[6].split()[:5] == ["largest", "/", "mean", "1.043", "2.000"]
    assert lines[8].endswith("of 104 edges (41.3%) lead from one part to another")
    assert [p.name for p in sorted(out.iterdir())] == ["part-000.gids", "part-001.gids"]


def test_json_report(written_dataset, tmp_path, capsys):
    gids("partition", written_dataset, tmp_path / "parts", "--parts", "3", "--by", "hash", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["edges"]) == ("hash", 104)
    assert sum(part["rows"] for part in found["parts"]) == 23
    assert sum(part["in_edges"] for part in found["parts"]) == 104
    assert found["cut_share"] == found["cut_edges"] / 104
    assert found["balance"]["rows"] == max(part["rows"] for part in found["parts"]) * 3 / 23


def test_ctrl_c_leaves_nothing(written_dataset, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gids.write.page_sink.PageSink.append", interrupt)
    assert main(["partition", str(written_dataset), str(tmp_path / "parts"), "--parts", "2"]) == 130
    assert list(tmp_path.iterdir()) == []


def test_info_of_a_part(parts, capsys):
    gids("info", parts / "part-001.gids")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("part 1 of 2, by hash, of the dataset crc32c:")
    store = FeatureStore(parts / "part-001.gids")
    held = store.tables["paper.feat"].row_count
    assert any(line.startswith(f"  paper  20, {held} held") for line in lines)
    edges = store.graph(("paper", "cites", "paper")).num_edges
    assert any(line.startswith(f"  paper.cites.paper  100 edges, {edges} held") for line in lines)
    gids("info", parts / "part-001.gids", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["part"]["index"] == 1
    assert [(t["rows"], t["ids"]) for t in found["tables"] if t["name"] == "paper.feat"] == [(held, 20)]


def test_verify_of_all_parts_and_of_one(parts, capsys):
    gids("verify", parts)
    gids("verify", parts / "part-000.gids")
    assert capsys.readouterr().out.splitlines() == [
        f"{parts}: no faults",
        f"{parts / 'part-000.gids'}: no faults",
    ]


def test_export_writes_the_rows_of_a_part(parts, tmp_path, capsys):
    part = parts / "part-000.gids"
    gids("export", part, "paper.feat", tmp_path / "x.npy")
    table = FeatureStore(part).tables["paper.feat"]
    assert np.array_equal(np.load(tmp_path / "x.npy"), table.read_rows(table.held.ids()).numpy())
    said = capsys.readouterr().out
    assert f"is a part: these are the rows of {table.row_count} of 20 ids" in said


def test_export_of_a_part_without_rows_is_a_file_without_rows(written_dataset, tmp_path):
    gids("partition", written_dataset, tmp_path / "parts", "--parts", "5", "--by", "range", "--quiet")
    part = tmp_path / "parts/part-000.gids"  # there are 3 authors
    assert not FeatureStore(part).tables["author.feat"].row_count
    gids("export", part, "author.feat", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().startswith('"id","feat_0","feat_1",')


def test_owners_of_a_file_of_each_type(written_dataset, tmp_path, capsys):
    owners = []
    for ntype, count in (("paper", 20), ("author", 3)):
        np.save(tmp_path / f"{ntype}.npy", np.arange(count, dtype=np.int8) % 2)
        owners += ["--owners", f"{ntype}={tmp_path}/{ntype}.npy"]
    gids("partition", written_dataset, tmp_path / "parts", "--parts", "2", *owners)
    assert "parts: 2 parts by owners" in capsys.readouterr().out
    assert FeatureStore(tmp_path / "parts/part-000.gids").owners("paper").tolist() == [0, 1] * 10
