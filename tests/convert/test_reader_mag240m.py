"""MAG240M, with the files that ogb.lsc.MAG240MDataset reads."""

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import assert_dataset, convert, needs_torch_2_6, refuses, truncate

pytestmark = needs_torch_2_6
RNG = np.random.default_rng(4)
COUNTS = {"paper": 90, "author": 120, "institution": 11}
RELATIONS = {
    ("author", "affiliated_with", "institution"): 200,
    ("author", "writes", "paper"): 400,
    ("paper", "cites", "paper"): 300,
}
FEAT = RNG.standard_normal((90, 768)).astype(np.float16)
YEAR = RNG.integers(1990, 2020, 90)
LABEL = np.where(RNG.random(90) < 0.5, np.nan, RNG.integers(0, 153, 90)).astype(np.float32)
SPLIT = {"train": np.arange(30), "valid": np.arange(30, 40), "test": np.array([80, 60, 70])}


def write(root):
    """Write the dataset. Returns its edges."""
    edges = {r: np.stack([RNG.integers(0, COUNTS[t], n) for t in r[::2]]) for r, n in RELATIONS.items()}
    for relation, pairs in edges.items():
        save_arrays(root / "processed" / "___".join(relation), edge_index=pairs)
    save_arrays(root / "processed/paper", node_feat=FEAT, node_label=LABEL, node_year=YEAR)
    torch.save({**COUNTS, "num_classes": 153}, root / "meta.pt")
    torch.save(SPLIT, root / "split_dict.pt")
    (root / "RELEASE_v1.txt").touch()
    return edges


@pytest.mark.parametrize("folder", ["mag240m_kddcup2021", "."])
def test_mag240m(tmp_path, folder):
    edges = write(tmp_path / "data" / folder)
    store = convert(tmp_path / "data", tmp_path / "m.gids")
    assert_dataset(
        store,
        tables={"paper.feat": FEAT, "paper.year": YEAR},
        edges=edges,
        labels={"paper": np.nan_to_num(LABEL, nan=-1).astype(np.int64)},
        splits={"paper": {"train": SPLIT["train"], "val": SPLIT["valid"], "test": SPLIT["test"]}},
    )
    assert {t: store.num_nodes(t) for t in store.node_types} == COUNTS


def test_new_name_of_the_test_split(tmp_path):
    write(tmp_path / "m")
    newer = {"train": SPLIT["train"], "test-whole": SPLIT["test"], "test-dev": SPLIT["test"][:1]}
    torch.save({name: torch.from_numpy(ids) for name, ids in newer.items()}, tmp_path / "m/split_dict.pt")
    splits = convert(tmp_path / "m", tmp_path / "m.gids").splits["paper"]
    assert {name: ids.tolist() for name, ids in splits.items()} == {
        "train": list(range(30)),
        "test": [80, 60, 70],
    }


def cites(edge_index):
    return lambda root: save_arrays(root / "processed/paper___cites___paper", edge_index=edge_index)


test_a_bad_dataset_is_refused = refuses(
    write,
    (cites(np.full((2, 5), 90)), "is 90; it must be from 0 to 89"),
    (cites(np.zeros((5, 2), int)), "whole numbers of shape (2, E)"),
    (
        lambda root: save_arrays(root / "processed/paper", node_label=LABEL + 0.5),
        "a class must be a whole number",
    ),
    (lambda root: torch.save({"paper": 90}, root / "meta.pt"), "meta.pt is None; it must be a whole number"),
    (lambda root: truncate(root / "split_dict.pt"), "is truncated"),
    (
        lambda root: (root / "processed/paper/feat.pq").touch(),
        "is read as mag240m, and 'processed/paper/feat.pq' would be left out",
    ),
    (lambda root: torch.save([1], root / "split_dict.pt"), "it must be a dictionary of splits"),
)
