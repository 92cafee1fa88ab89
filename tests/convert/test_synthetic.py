"""Synthetic graphs: contents of the files, skew, labels that can be learnt, reproducibility, memory."""

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
    assert all(arrays[name].dtype == np.int64 for name in FILES if name not in ("feat", "indices"))
    assert arrays["indptr"][0] == 0
    assert arrays["indptr"][-1] == len(arrays["indices"])
    assert np.diff(arrays["indptr"]).min() >= 0
    assert arrays["indices"].min() >= 0
    assert arrays["indices"].max() < 20_000
    assert set(arrays["labels"]) == set(range(8))


def test_splits_are_disjoint_and_have_the_given_sizes(arrays):
    splits = [arrays[f"{name}_idx"] for name in ("train", "val", "test")]
    assert [len(split) for split in splits] == [700, 200, 100]
    assert len(set(np.concatenate(splits).tolist())) == 1000


def test_mean_degree_is_as_given_and_degrees_are_skewed(arrays):
    in_degrees = np.diff(arrays["indptr"])
    out_degrees = np.sort(np.bincount(arrays["indices"], minlength=20_000))[::-1]
    assert in_degrees.mean() == pytest.approx(12, rel=0.02)
    assert in_degrees.max() > 10 * in_degrees.mean()
    assert out_degrees[:200].sum() > 0.12 * out_degrees.sum()  # 1 % of the nodes
    assert out_degrees[0] < 0.02 * out_degrees.sum()


def test_share_of_edges_within_a_class_is_homophily(arrays):
    targets = np.repeat(np.arange(20_000), np.diff(arrays["indptr"]))
    same = (arrays["labels"][arrays["indices"]] == arrays["labels"][targets]).mean()
    assert same == pytest.approx(0.7 + 0.3 / 8, abs=0.01)


def test_neighborhood_predicts_the_class_better_than_a_row(arrays):
    feat, labels, indptr = arrays["feat"], arrays["labels"], arrays["indptr"]
    centroids = np.stack([feat[labels == c].mean(0) for c in range(8)])
    sums = np.add.reduceat(feat[arrays["indices"]], indptr[:-1], axis=0)
    means = sums / np.diff(indptr)[:, None]

    def accuracy(rows):
        nearest = (rows @ centroids.T - (centroids**2).sum(1) / 2).argmax(1)
        return (nearest == labels).mean()

    assert 0.5 < accuracy(feat) < 0.65  # candour 0.5
    assert accuracy(means) > 0.75


def test_seed_gives_the_same_files_with_any_number_of_threads(tmp_path):
    one, same, other = (
        write_graph(tmp_path / name, GraphSpec(node_count=3000, dim=700, seed=seed), threads=threads)
        for name, seed, threads in (("one", 1, 1), ("same", 1, 3), ("other", 2, 1))
    )
    for name in FILES:
        assert (one / f"{name}.npy").read_bytes() == (same / f"{name}.npy").read_bytes()
    assert (one / "feat.npy").read_bytes() != (other / "feat.npy").read_bytes()
    assert (one / "indices.npy").read_bytes() != (other / "indices.npy").read_bytes()
