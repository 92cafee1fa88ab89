"""Conversion keeps every value, or refuses it by name: random sources of every format against NumPy."""

import numpy as np
import pytest
import torch
from datasets import needs_unsigned
from drawn_sources import READERS, Values, draw, stored
from reader_example import assert_graph, needs_torch_2_6

from gids import FeatureStore
from gids.cli import main

DRAWS = range(3)  # of every form of source


def assert_table(table, values, expected):
    """The table has these values, or those of `values` with a scale per row."""
    rows = table.read_rows(range(table.row_count))
    if not isinstance(expected, str):
        assert rows.dtype == expected.dtype
        assert np.array_equal(rows.double().numpy(), expected.double().numpy(), equal_nan=True)
        if not rows.dtype.is_floating_point:
            assert rows.tolist() == expected.tolist()  # float64 rounds
        return
    assert table.scale == "row"
    flat = values.tensor().double().reshape(table.row_count, -1)
    scales = (flat.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    assert bool(((rows.double().view(flat.shape) - flat).abs() <= scales * 0.50004).all())


def check(root, name, seed, capsys):
    """Convert one draw and compare the dataset, or the error, with the model."""
    drawn = draw(seed, name)
    root.mkdir()
    written = READERS[name][0](root, drawn)
    options = [*written.options, *(() if drawn.target is None else ("--dtype", drawn.target))]
    source, path = str(written.path), str(root / "x.gids")
    status = main(["convert", source, path, "--split", "none", "--quiet", *options])
    said = capsys.readouterr().err
    expected = {table: stored(values, drawn.target) for table, values in written.tables.items()}
    refused = [table for table, rows in expected.items() if rows is None]
    if refused:
        keys = [table.rpartition(".")[2] for table in refused]
        assert status == 2, f"{refused} cannot be stored as {drawn.target}"
        assert any(repr(t) in said or key in said for t, key in zip(refused, keys, strict=True)), said
        assert said.count("\n") == 1
        return
    assert status == 0, said
    store = FeatureStore(path)
    assert sorted(store.tables) == sorted(expected)
    for table, rows in expected.items():
        values = written.tables[table]
        assert isinstance(values, Values)
        assert_table(store.table(table), values, rows)
    assert sorted(store.relations) == sorted(written.edges)
    for relation, (sources, destinations) in written.edges.items():
        assert_graph(store, relation, sources, destinations)
    for ntype, labels in written.labels.items():
        assert store.labels[ntype].tolist() == labels.tolist()
    assert main(["verify", path, "--against", source, "--quiet", *written.options]) == 0, capsys.readouterr()


@needs_unsigned
@needs_torch_2_6
# torch warns once in a process that makes such a tensor.
@pytest.mark.filterwarnings("ignore:Sparse CS[CR] tensor support:UserWarning")
@pytest.mark.parametrize("name", READERS)
def test_every_value_is_equal_to_numpy_or_refused_by_name(tmp_path, capsys, name):
    for seed in DRAWS:
        print(f"{name}, seed {seed}")
        check(tmp_path / str(seed), name, seed, capsys)
