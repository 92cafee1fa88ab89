"""Heat is added in one step. tests/write/test_kills.py kills its writer."""

import threading

import numpy as np
import pytest
from datasets import contents, sign

from gids import FeatureStore, FormatError, StorageError
from gids.heat import write_heat
from gids.store import verify
from gids.store.files import read_manifest


def heat_of(papers, authors):
    return {"paper": np.linspace(0, papers, 20), "author": np.full(3, authors)}


def test_heat_is_added_to_a_dataset(dataset):
    before, manifest = contents(dataset), read_manifest(dataset)
    write_heat(dataset, "sampled", heat_of(5.0, 0.25))
    after = contents(dataset)
    assert after.keys() - before.keys() == {"nodes/paper.heat_sampled.npy", "nodes/author.heat_sampled.npy"}
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    assert read_manifest(dataset).tables == manifest.tables
    assert read_manifest(dataset).relations == manifest.relations
    assert list(verify(dataset)) == []
    store = FeatureStore(dataset)
    assert store.heat_methods("paper") == ["sampled", "out-degree"]
    found = store.heat("sampled", "paper")
    assert found.dtype == np.float32
    assert not found.flags.writeable
    assert np.array_equal(found, np.linspace(0, 5, 20).astype(np.float32))
    assert np.array_equal(np.load(dataset / "nodes/author.heat_sampled.npy"), np.full(3, 0.25, np.float32))
    assert np.array_equal(store.heat("out-degree", "paper"), store.out_degrees("paper"))


def test_methods_are_listed_with_the_best_first(dataset):
    write_heat(dataset, "reverse-pagerank", heat_of(1, 2))
    write_heat(dataset, "sampled", {"paper": np.ones(20)})
    store = FeatureStore(dataset)
    assert store.heat_methods("paper") == ["reverse-pagerank", "sampled", "out-degree"]
    assert store.heat_methods("author") == ["reverse-pagerank", "out-degree"]
    write_heat(dataset, "out-degree", {"author": np.array([1, 1, 1 << 31])})
    assert FeatureStore(dataset).out_degrees("author").tolist() == [1, 1, 1 << 31]


def test_new_heat_replaces_the_old_heat_and_its_file(dataset):
    write_heat(dataset, "sampled", heat_of(1.0, 1.0))
    opened_before = FeatureStore(dataset)
    names = contents(dataset).keys()
    for round_ in (2, 3):
        write_heat(dataset, "sampled", heat_of(float(round_), 1.0))
        if round_ == 2:
            with pytest.raises(StorageError, match=r"heat_sampled.npy"):
                opened_before.heat("sampled", "paper")
        assert FeatureStore(dataset).heat("sampled", "paper")[-1] == round_
        assert len(contents(dataset)) == len(names)
        assert list(verify(dataset)) == []
    assert contents(dataset).keys() == names  # which alternate


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_negative_or_infinite_heat_is_refused_by_the_writer_and_by_verify(dataset, value):
    bad = np.ones(20, np.float32)
    bad[6] = value
    with pytest.raises(FormatError, match="heat of 'paper' has values that are negative or not finite"):
        write_heat(dataset, "sampled", {"paper": bad})
    write_heat(dataset, "sampled", {"paper": np.ones(20)})
    path = dataset / "nodes/paper.heat_sampled.npy"
    path.write_bytes(path.read_bytes()[:-80] + bad.tobytes())
    sign(dataset)
    assert list(verify(dataset)) == [f"{path}: heat[6] is {value}; it must be finite and 0 or more"]


def test_heat_that_does_not_fit_the_dataset_changes_nothing(dataset):
    before = contents(dataset)
    with pytest.raises(FormatError, match=r"no node type 'venue' in mag.gids \(has 'paper', 'author'\)"):
        write_heat(dataset, "sampled", {"venue": np.ones(2)})
    with pytest.raises(FormatError, match=r"heat of 'paper' is \[19\], but mag.gids has 20 nodes"):
        write_heat(dataset, "sampled", {"author": np.ones(3), "paper": np.ones(19)})
    with pytest.raises(FileNotFoundError, match="no dataset at"):
        write_heat(dataset.with_name("none.gids"), "sampled", {})
    assert contents(dataset) == before


def test_what_cannot_be_written_is_a_storage_error_and_leaves_the_dataset_unchanged(dataset):
    (dataset / "nodes/paper.heat_sampled.npy").mkdir()
    before = contents(dataset)
    with pytest.raises(StorageError, match=r"storing heat failed \(Is a directory\); the dataset"):
        write_heat(dataset, "sampled", {"author": np.ones(3), "paper": np.ones(20)})
    left = contents(dataset)
    assert {name: left[name] for name in before} == before
    assert list(verify(dataset)) == []


def test_concurrent_writers_keep_each_others_heat(dataset):
    barrier = threading.Barrier(2)

    def write(method):
        barrier.wait()
        for _ in range(5):
            write_heat(dataset, method, heat_of(1.0, 1.0))

    threads = [threading.Thread(target=write, args=(m,)) for m in ("sampled", "reverse-pagerank")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FeatureStore(dataset).heat_methods("author") == ["reverse-pagerank", "sampled", "out-degree"]
    assert list(verify(dataset)) == []
