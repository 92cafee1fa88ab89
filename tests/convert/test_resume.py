"""A stopped conversion resumes and gives the same dataset as an undisturbed one."""

import numpy as np
import pytest
from datasets import contents, read_source

from gids import FormatError
from gids.convert import Options, convert
from gids.store import verify


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(11)
    np.save(folder / "feat.npy", rng.standard_normal((6000, 100), np.float32))
    np.save(folder / "pos.npy", rng.standard_normal((6000, 3)))
    np.save(folder / "edge_index.npy", rng.integers(0, 6000, (2, 40_000)))
    np.save(folder / "label.npy", rng.integers(0, 9, 6000))
    return folder


def interrupted(source, path, after_bytes=600_000, **options):
    """Convert until it is interrupted; by then the edges are finished, and feat is not, by default."""

    def fail(size):
        fail.total += size
        if fail.total > after_bytes:
            raise KeyboardInterrupt

    fail.total = 0
    with pytest.raises(KeyboardInterrupt):
        run(source, path, on_bytes=fail, **options)
    assert not path.exists()


def run(source, path, say=lambda _: None, on_bytes=lambda _: None, **options):
    options = Options(**{"memory_bytes": 1 << 20, "workers": 1, **options})
    files = sorted(source.iterdir())
    open_source = lambda scratch: read_source(source, scratch)  # noqa: E731
    convert(files, open_source, path, options, say=say, on_bytes=on_bytes)


@pytest.mark.parametrize(("is_packed", "options"), [(False, {}), (True, {"dedup": True, "self_loops": True})])
def test_interrupted_conversion_resumes(tmp_path, source, is_packed, options):
    read = source
    if is_packed:
        read = tmp_path / "packed"
        read.mkdir()
        np.savez_compressed(read / "x.npz", **{file.stem: np.load(file) for file in sorted(source.iterdir())})
    interrupted(read, tmp_path / "a.gids", **options)
    said = []
    run(read, tmp_path / "a.gids", say=said.append, **options)
    assert said[0] == "resuming an unfinished conversion"
    run(source, tmp_path / "b.gids", **options)
    assert contents(tmp_path / "a.gids") == contents(tmp_path / "b.gids")


def test_finished_tables_resume_with_the_same_notes_and_progress(tmp_path, source):
    """feat is finished, with scales of columns and an order; pos is not."""
    options = {"dtypes": {"feat": "int8", "pos": "float16"}, "scales": {"feat": "column"}, "order": "degree"}
    progress, said, resumed, again = [], [], [], []
    run(source, tmp_path / "b.gids", say=said.append, on_bytes=progress.append, **options)
    assert [s.split(":")[0] for s in said if " stored as " in s] == ["_N.feat", "_N.pos"]
    interrupted(source, tmp_path / "a.gids", sum(progress) - 4096, **options)
    run(source, tmp_path / "a.gids", say=resumed.append, on_bytes=again.append, **options | {"workers": 3})
    assert resumed == ["resuming an unfinished conversion", *said]
    assert sum(again) == sum(progress)
    assert contents(tmp_path / "a.gids") == contents(tmp_path / "b.gids")
    assert list(verify(tmp_path / "a.gids")) == []


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda s: np.save(s / "label.npy", np.zeros(6000, np.int64)), {}, "the source changed"),
        (lambda s: None, {"seed": 1, "dtypes": {"feat": "float16"}}, "--dtype, --seed changed"),
    ],
)
def test_changed_source_or_option_starts_again(tmp_path, source, change, options, reason):
    copy = tmp_path / "source"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    interrupted(copy, tmp_path / "a.gids")
    change(copy)
    said = []
    run(copy, tmp_path / "a.gids", say=said.append, **options)
    assert said[0] == f"found an unfinished conversion, but {reason}: starting again"
    assert list(verify(tmp_path / "a.gids")) == []


def test_links_that_were_swapped_start_again(tmp_path, source):
    """The files of the source are the same ones."""
    folder, progress, said = tmp_path / "s", [], []
    folder.mkdir()
    for name in ("feat.npy", "pos.npy"):
        (folder / name).symlink_to(source / name)
    run(folder, tmp_path / "b.gids", on_bytes=progress.append)
    interrupted(folder, tmp_path / "a.gids", sum(progress) - 4096)
    for name, other in (("feat.npy", "link"), ("pos.npy", "feat.npy"), ("link", "pos.npy")):
        (folder / name).rename(folder / other)
    run(folder, tmp_path / "a.gids", say=said.append)
    assert said[0] == "found an unfinished conversion, but the source changed: starting again"


def test_source_that_changes_during_the_conversion_raises(tmp_path):
    np.save(tmp_path / "f.npy", np.zeros((100, 4), np.float32))

    def open_source(scratch):
        found = read_source(tmp_path / "f.npy", scratch)
        np.save(tmp_path / "f.npy", np.ones((100, 4), np.float32))
        return found

    with pytest.raises(FormatError, match="the source changed during the conversion"):
        convert([tmp_path / "f.npy"], open_source, tmp_path / "a.gids", Options())
    assert [p.name for p in tmp_path.iterdir()] == ["f.npy"]
