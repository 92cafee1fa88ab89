"""Commands that need little memory, however large the data are: each runs in a fork."""

import numpy as np
import pytest
from commands import gids
from datasets import CITES, save_arrays
from forks import peak_bytes

from gids.convert.text_table import TextTable, table_layout
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("source", "options"), [("x.npz", ()), ("s", ("--dedup", "--reverse-edges"))])
def test_large_arrays_and_edges_are_never_in_memory(tmp_path, source, options):
    if source == "x.npz":
        np.savez_compressed(tmp_path / source, feat=np.zeros((1 << 15, 1024), np.float32))  # of 128 MiB
    else:
        edges = RNG.integers(0, 150_000, (2, 1_500_000))  # in memory they would take 96 MB
        save_arrays(tmp_path / source, edge_index=edges, num_nodes=np.array(150_000))
    words = "convert", tmp_path / source, tmp_path / "a.gids", "--memory", "16MB", *options
    assert peak_bytes(tmp_path / "fork", gids, *words) < 60e6


COLUMNS, ROWS = 64, 100_000


def parse(folder):
    table = TextTable([folder / "nodes.csv"], [table_layout(folder / "nodes.csv")], folder)
    assert table.row_count == ROWS


def test_memory_does_not_grow_with_rows_of_text(tmp_path):
    pytest.importorskip("pyarrow.csv")
    header = ",".join(f"x_{i}" for i in range(COLUMNS))
    row = ",".join(["-0.1234567"] * COLUMNS)
    (tmp_path / "nodes.csv").write_text(f"{header}\n" + f"{row}\n" * ROWS)  # 70 MB
    assert peak_bytes(tmp_path / "fork", parse, tmp_path) < 250 << 20  # with the Arrow file that is mapped


def divide(folder):
    partition(folder / "a.gids", folder / "parts", 4, method="hash", memory_bytes=8 << 20)


def test_a_partition_is_made_in_little_memory(tmp_path):
    nodes, edges = 50_000, 750_000
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "paper", "feat", RNG.integers(0, 255, (nodes, 1000), np.uint8))
        ends = RNG.integers(0, nodes, (2, edges))
        writer.write_edges(CITES, edge_list(*ends, num_src=nodes, num_dst=nodes))
        writer.write_table("edge", CITES, "w", RNG.integers(0, 255, (edges, 40), np.uint8))
    # Beside the buffers: memory maps of owners (0.1 MB) and indptr (0.4 MB), threads and their heaps.
    assert peak_bytes(tmp_path / "fork", divide, tmp_path) < (8 << 20) + 24_000_000
