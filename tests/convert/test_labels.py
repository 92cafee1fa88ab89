"""Labels become classes; random splits are the same on all machines and in all versions."""

import numpy as np
import pytest
import torch

from gids import FormatError
from gids.convert.labels import normalised, random_split
from gids.store.rows import TensorRows, as_rows, read_range


def split(labels, fractions=(0.6, 0.2, 0.2), seed=0):
    parts = random_split(TensorRows(labels), fractions, seed)
    return {name: read_range(rows, 0, rows.shape[0]).tolist() for name, rows in parts.items()}


def test_split_is_reproducible_and_has_labelled_nodes_only():
    labels = torch.tensor([0, 1, -1, 2, 0, 1, 2, 0, 1, -5, 3, 1])
    expected = {"train": [0, 1, 3, 4, 7, 10], "val": [5, 8], "test": [6, 11]}
    assert split(labels) == expected
    assert split(torch.where(labels < 0, torch.nan, labels.float())) == expected
    assert split(labels, seed=1) != expected
    sizes = {name: len(ids) for name, ids in split(torch.zeros(100), (0.1, 0.0, 0.25)).items()}
    assert sizes == {"train": 10, "val": 0, "test": 25}


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.9, 0.9, 0.1), (-0.1, 0.5, 0.5)])
def test_invalid_fractions_raise(fractions):
    with pytest.raises(FormatError, match="three fractions"):
        split(torch.zeros(10), fractions)


NAN = float("nan")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array([2, -7, 0]), [2, -1, 0]),
        (np.array([[1.0], [-1.0], [NAN]], np.float32), [[1], [-1], [-1]]),
        (np.array([1.0, -1.0, 0.0]), [1, -1, 0]),
        (np.array([1.0, 2.0]), None),  # may be a measure
        (np.array([1.5, NAN]), None),
        (np.array([-2.0, NAN]), None),
        (np.array([np.inf, NAN]), None),
        (np.array([[1, 2], [3, -4]]), None),
    ],
)
def test_class_labels_become_int64_with_minus_one_for_missing(labels, expected):
    found = normalised(as_rows(labels))
    values = read_range(found, 0, len(labels)).numpy()
    if expected is None:
        assert values.dtype == labels.dtype
        assert np.array_equal(values, labels, equal_nan=True)
    else:
        assert values.dtype == np.int64
        assert values.tolist() == expected
