"""`gids verify`: one flipped bit anywhere is found, named and reported by the exit status."""

import os
import random

import numpy as np
import pytest

from gids.cli import main
from gids.store.array_file import file_crc32c
from gids.store.files import read_manifest
from gids.store.manifest import dump_manifest, validate


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two tables (pages with padding, and long pages), two shards elsewhere, graph, labels, splits."""
    folder = tmp_path_factory.mktemp("verify")
    rng = np.random.default_rng(1)
    source = folder / "source"
    source.mkdir()
    np.save(source / "feat.npy", rng.standard_normal((40, 50), np.float32))
    np.save(source / "long.npy", rng.integers(0, 9, (40, 700)))
    np.save(source / "edge_index.npy", rng.integers(0, 40, (2, 90)))
    np.save(source / "label.npy", rng.integers(0, 4, 40))
    (folder / "ssd").mkdir()
    arguments = ["--page-bytes", "512", "--stripe", str(folder / "ssd"), str(folder / "ssd"), "--quiet"]
    assert main(["convert", str(source), str(folder / "a.gids"), *arguments]) == 0
    return folder / "a.gids"


def run(dataset, *arguments):
    return main(["verify", str(dataset), "--allow-dir", str(dataset.parent / "ssd"), *arguments])


def all_files(dataset):
    files = [p for root in (dataset, dataset.parent / "ssd") for p in root.rglob("*")]
    return sorted(p for p in files if p.is_file() and p.name != "gids-shards.json")


def test_a_sound_dataset_has_no_faults(dataset, capfd):
    assert run(dataset) == 0
    assert capfd.readouterr() == (f"{dataset}: no faults\n", "")
    assert run(dataset, "--quiet", "--workers", "1") == 0
    assert capfd.readouterr() == ("", "")


def test_a_flipped_bit_in_any_file_is_found(dataset, capsys):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    files = all_files(dataset)
    assert len(files) == 1 + 2 * 3 + 3 + 5  # manifest; two tables' shards and checksums; graph; nodes
    for path in files:
        size = path.stat().st_size
        for at in {0, size - 1, *(rng.randrange(size) for _ in range(4))}:
            with open(path, "r+b") as file:
                file.seek(at)
                (byte,) = file.read(1)
                for bit in (0, 7, rng.randrange(8)):
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << bit]))
                    file.flush()
                    status, output = run(dataset), capsys.readouterr().out
                    file.seek(at)
                    file.write(bytes([byte]))
                    file.flush()
                    assert status == 1, f"bit {bit} of byte {at} of {path}"
                    assert path.name in output
    assert run(dataset) == 0


def test_a_fault_in_a_page_names_page_and_rows(dataset, capsys):
    shard = next((dataset.parent / "ssd").glob("*/_N.feat/shard-01.bin"))
    data = shard.read_bytes()
    # The second page of shard 1 is page 3: rows 6 and 7. Its last byte is padding.
    shard.write_bytes(data[:1023] + b"\1" + data[1024:])
    assert run(dataset) == 1
    assert (
        capsys.readouterr().out
        == f"{shard} at byte 512: page 3 of '_N.feat' (rows 6 to 7) fails its CRC32C\n"
    )
    shard.write_bytes(data)


def test_every_fault_has_a_line(dataset, capsys):
    files = [p for p in all_files(dataset) if p.name in ("indices.npy", "shard-00.bin")]
    saved = {p: p.read_bytes() for p in files}
    for path in files:
        os.truncate(path, path.stat().st_size - 1)
    assert run(dataset) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(files)
    assert all("is truncated" in line for line in lines)
    for path, data in saved.items():
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("graph/_N._E._N/indptr.npy", 91, "indptr ends at 91, but there are 90 indices"),
        ("graph/_N._E._N/indices.npy", 40, "indices[89] is 40; it must be from 0 to 39"),
        ("graph/_N._E._N/edge_ids.npy", -1, "edge_ids[89] is -1"),
        ("nodes/_N.test_idx.npy", 40, "test_idx[7] is 40"),
    ],
)
def test_ids_out_of_range_are_found_though_every_checksum_is_right(dataset, capsys, name, value, message):
    path, manifest = dataset / name, dataset / "manifest.json"
    saved, saved_manifest = path.read_bytes(), manifest.read_bytes()
    path.write_bytes(saved[:-8] + np.int64(value).tobytes())
    fields = read_manifest(dataset).to_json()
    for array in (*fields["nodes"][0]["arrays"].values(), *fields["relations"][0]["arrays"].values()):
        if array["path"] == name:
            array["crc32c"] = file_crc32c(path)
    manifest.write_bytes(dump_manifest(validate(fields)))
    status, output = run(dataset), capsys.readouterr().out
    path.write_bytes(saved)
    manifest.write_bytes(saved_manifest)
    assert status == 1
    assert output.startswith(f"{path}: {message}")


def test_shards_elsewhere_need_leave(dataset, capsys):
    assert main(["verify", str(dataset)]) == 1
    assert "--allow-dir" in capsys.readouterr().out


def test_what_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none.gids")]) == 2
    assert capsys.readouterr().err == f"gids verify: no dataset at {tmp_path}/none.gids\n"
