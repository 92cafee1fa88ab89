"""DGL's workers with few file descriptors: the epoch ends well, or with an error that names the limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gids.write import DatasetWriter

PROGRAM = """
import resource, sys
import torch
import gids.dgl
import dgl

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
graph = dgl.rand_graph(1000, 10000)
sampler = dgl.dataloading.NeighborSampler([5, 5], prefetch_node_feats=["feat"])
with gids.open(sys.argv[1], memory=1 << 26) as source:
    rows = source.store.table("_N.feat").read_rows(torch.arange(1000))
    loader = gids.dgl.DataLoader(
        graph, torch.arange(1000), sampler, batch_size=20, num_workers=2, gids=source
    )
    for input_nodes, _, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], rows[input_nodes])
    print("whole")
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [40, 64, 128])
def test_an_epoch_with_few_file_descriptors_never_hangs(tmp_path: Path, limit: int) -> None:
    with DatasetWriter(tmp_path / "d.gids") as writer:
        writer.write_table("node", "_N", "feat", torch.randn(1000, 16))
    command = [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM, str(tmp_path / "d.gids"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if limit >= 128:
        assert done.stdout == "whole\n", done.stderr
    else:
        assert done.stdout == "whole\n" or "ulimit -n" in done.stderr or "open files" in done.stderr
