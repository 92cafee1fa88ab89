"""The GPU benchmarks run at their small sizes and verify their results: emulated, and on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu
import gpu_check

CASES = [
    ("bus", "loads from pinned host memory, 3 blocks of 256"),
    ("gather", "gather of 512 B rows, all hits, over device copy"),
    ("planning", "planning, over the planner on the CPU"),
    ("queue", "queue path over the engine on the host"),
    ("extents", "extents of 1024 KiB, engine into host memory"),
    ("packs", "epoch of 512 B rows on the device, packs over random reads"),
    ("sampling", "neighbor sampling 3,2, by NodeLoader"),
    ("sizes", "neighbor sampling 3,2, 2^9 nodes, topology on the device, over"),
    ("windows", "a cache of 2 minibatches, lookahead 16 over random: rows/s"),
    ("buffer", "a buffer in host memory, 20 % static over none: hits"),
    ("overlap", "training beside reads, over alone"),
    ("life", "smallest over first cache of 5 loaders without a size"),
    ("large", "seeds whose neighbors are right, 4,096 edges"),
    ("training", "training rows/s, cuda over mapped, moved"),
    ("array", "rows of 4 KiB, cpu with pin_memory over cpu"),
]
"""The first one runs by default, the others are slow."""


@pytest.mark.parametrize(
    ("question", "said"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_gpu_benchmark_runs(device, cuda_is, request, tmp_path, question, said):
    cuda_is(device)
    if device.torch_device.type != "cuda":
        request.getfixturevalue("pinning")
    assert any(name.startswith(said) for name in names_of_figures(question, tmp_path))


def test_the_gpu_check_asks_every_question():
    steps = {step.partition("-")[0] for part in gpu_check.PARTS_S.values() for step in part}
    assert gpu.QUESTIONS.keys() <= steps


def names_of_figures(question, tmp_path):
    figures = tmp_path / "figures.json"
    assert gpu.main([question, "--small", "--dir", str(tmp_path), "--json", str(figures)]) == 0
    return [figure["name"] for figure in json.loads(figures.read_text())["figures"]]


@pytest.mark.gpu
def test_training_runs_beside_a_stream_that_waits(gpu, cuda_is, tmp_path):
    cuda_is(gpu)
    assert any(", training, " in name for name in names_of_figures("streams", tmp_path))
