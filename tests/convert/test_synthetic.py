"""Synthetic graphs: contents of the files, skew, labels that can be learnt, reproducibility."""

from pathlib import Path

import numpy as np
import pytest

from gids.convert.synthetic import GraphSpec, write_graph

SPEC = GraphSpec(
    node_count=20_000, degree=12, dim=24, classes=8, train_count=700, val_count=200, test_count=100, seed=3
)
FILES = ["feat", "indices", "indptr", "labels", "test_idx", "train_idx", "val_idx"]


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    return load(write_graph(tmp_path_factory.mktemp("graph"), SPEC))


def load(directory: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path) for path in sorted(directory.iterdir())}


def test_arrays_have_the_shapes_and_types_for_convert(arrays):
    assert list(arrays) == FILES
    assert arrays["feat"].shape == (20_000, 24)
    assert arrays["feat"].dtype == np.float32
    assert arrays["indptr"].shape == (20_001,)
    assert arrays["indices"].dtype == np.int32
    assert arrays["indptr"][0] == 0
    assert arrays["indptr"][-1] == len(arrays["indices"])
    assert np.diff(arrays["indptr"]).min() >= 0
    assert arrays["indices"].min() >= 0
    assert arrays["indices"].max() < 20_000
    assert set(arrays["labels"]) == set(range(8))
    splits = [arrays[f"{name}_idx"] for name in ("train", "val", "test")]
    assert [len(split) for split in splits] == [700, 200, 100]
    assert len(set(np.concatenate(splits).tolist())) == 1000


def test_degrees_are_skewed_and_edges_are_within_a_class(arrays):
    in_degrees = np.diff(arrays["indptr"])
    out_degrees = np.sort(np.bincount(arrays["indices"], minlength=20_000))[::-1]
    assert in_degrees.mean() == pytest.approx(12, rel=0.02)
    assert in_degrees.max() > 10 * in_degrees.mean()
    assert out_degrees[:200].sum() > 0.12 * out_degrees.sum()  # 1 % of the nodes
    assert out_degrees[0] < 0.02 * out_degrees.sum()
    targets = np.repeat(np.arange(20_000), in_degrees)
    same = (arrays["labels"][arrays["indices"]] == arrays["labels"][targets]).mean()
    assert same == pytest.approx(0.7 + 0.3 / 8, abs=0.01)


def test_files_do_not_depend_on_the_number_of_threads(tmp_path):
    one, same = (
        write_graph(tmp_path / str(threads), GraphSpec(node_count=2000, dim=700, seed=1), threads=threads)
        for threads in (1, 3)
    )
    for name in FILES:
        assert (one / f"{name}.npy").read_bytes() == (same / f"{name}.npy").read_bytes()
