"""How large are the datasets of the paper in the format of gids, and which share is the graph?

    python bench/paper_sizes.py

Tables 2 to 4 of Park et al., "GIDS", PVLDB 17(6), 2024, whose counts of nodes and edges these are. Counted
from the format, nothing is downloaded or written: features are pages with their checksums, the graph is CSC
with int64 indptr and int32 indices, or int64 from 2^31 nodes. MAG240M has features of its papers only. Also:
the share of the features that the paper's cache of 8 GB holds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from harness import Figures, Script

from gids.store.geometry import Geometry, best_page_bytes, table_page_bytes

ALIGNMENT_BYTES = 512
GPU_CACHE_BYTES = 8 << 30
_CHECKSUM, _INDPTR = 4, 8  # bytes


@dataclass(frozen=True)
class Dataset:
    """rows: with features; 0: all nodes."""

    name: str
    nodes: int
    edges: int
    dim: int
    value_bytes: int = 4
    rows: int = 0

    @property
    def feature_bytes(self) -> int:
        row_bytes, rows = self.dim * self.value_bytes, self.rows or self.nodes
        page_bytes = table_page_bytes(row_bytes, best_page_bytes(row_bytes, alignment=ALIGNMENT_BYTES))
        return Geometry(rows, row_bytes, page_bytes, 1).page_count * (page_bytes + _CHECKSUM)

    @property
    def graph_bytes(self) -> int:
        return _INDPTR * (self.nodes + 1) + (4 if self.nodes < 1 << 31 else 8) * self.edges


DATASETS = [
    Dataset("ogbn-papers100M", 111_059_956, 1_615_685_872, 128),
    Dataset("IGB-Full", 269_364_174, 3_995_777_033, 1024),
    Dataset("MAG240M", 244_160_499, 1_728_364_232, 768, value_bytes=2, rows=121_751_666),
    Dataset("IGBH-Full", 547_306_935, 5_812_005_639, 1024),
    Dataset("IGB-tiny", 100_000, 547_416, 1024),
    Dataset("IGB-small", 1_000_000, 12_070_502, 1024),
    Dataset("IGB-medium", 10_000_000, 120_077_694, 1024),
    Dataset("IGB-large", 100_000_000, 1_223_571_364, 1024),
]


def sizes(_: argparse.Namespace, figures: Figures) -> None:
    rows = []
    for dataset in DATASETS:
        whole = dataset.feature_bytes + dataset.graph_bytes
        row = {"dataset": dataset.name, "nodes": dataset.nodes, "edges": dataset.edges, "dim": dataset.dim}
        row |= {"GiB": whole / (1 << 30), "features %": 100 * dataset.feature_bytes / whole}
        row |= {"graph %": 100 * dataset.graph_bytes / whole}
        row |= {"cache of 8 GiB, %": min(100, 100 * GPU_CACHE_BYTES / dataset.feature_bytes)}
        rows.append(row)
    figures.table("sizes of the paper's datasets", rows)
    for row in rows[:4]:
        figures.add(f"{row['dataset']}: size", row["GiB"], "GiB")
        figures.add(f"{row['dataset']}: features", row["features %"], "%")


if __name__ == "__main__":
    Script(__doc__).run(sizes)
