"""The spool: a sampled minibatch comes back as it was put, whatever tensors and objects it is made of."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packs_example import scratch_files

import gids
from gids.errors import StorageError
from gids.packs import NotSpoolable, Reads, Scratch, Spool
from gids.packs import spool as module

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def random_tensor(rng: np.random.Generator) -> torch.Tensor:
    """Of any dtype and shape: contiguous, a view of another tensor, expanded, or of a NumPy array."""
    dtype = DTYPES[rng.integers(len(DTYPES))]
    shape = rng.integers(0, 5, rng.integers(0, 4)).tolist()
    tensor = torch.from_numpy(rng.integers(-100, 100, [2 * n for n in shape])).to(dtype)
    kind = rng.integers(5)
    if kind == 0:
        return tensor
    if kind == 1:
        return tensor[tuple(slice(None, None, 2) for _ in shape)]
    if kind == 2:
        return tensor.t() if tensor.dim() == 2 else tensor[..., None].expand(*tensor.shape, 3)
    if kind == 3:  # NumPy's strides of arrays with one value or none may be anything
        one = np.lib.stride_tricks.as_strided(np.array([7]), (int(rng.integers(0, 2)),), (0,))
        return torch.from_numpy(one.copy() if one.flags.writeable is False else one)
    return tensor.clone().requires_grad_() if dtype.is_floating_point else tensor


def random_object(rng: np.random.Generator, depth: int = 0) -> Any:
    kind = rng.integers(7 if depth < 3 else 3)
    if kind < 2:
        return random_tensor(rng)
    if kind == 2:
        return [None, 3, "text", 2.5, np.arange(4), np.float32(1), ("node", "to", "node")][rng.integers(7)]
    members = [random_object(rng, depth + 1) for _ in range(rng.integers(0, 4))]
    if kind == 3:
        return members
    if kind == 4:
        return tuple(members)
    if kind == 5:
        return {str(i): member for i, member in enumerate(members)}
    return SimpleNamespace(**{f"a{i}": member for i, member in enumerate(members)})


def bits_of(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().resolve_conj().reshape(-1).clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8).numpy().tobytes()


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert bits_of(a) == bits_of(b)
        assert a.requires_grad == b.requires_grad
    elif isinstance(a, list | tuple):
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, SimpleNamespace):
        assert_equal(vars(a), vars(b))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    else:
        assert a == b


class Minibatch:
    """What it reads, and anything else."""

    def __init__(self, rows: list[np.ndarray], tables: tuple[str, ...], other: Any = None) -> None:
        self.rows, self.tables, self.other = rows, tables, other


def reads_of(minibatch: Minibatch) -> Reads:
    return Reads(minibatch.rows, minibatch.tables)


def small_minibatch(other: Any = None, first: int = 0, count: int = 5) -> Minibatch:
    return Minibatch([np.arange(first, first + count, dtype=np.uint32)], ("paper.feat",), other)


def open_spool(path: Path, nbytes: int = 1 << 30, spaces: int = 1) -> Spool:
    return Spool(Scratch([path], nbytes), spaces, reads_of)


def put(spool: Spool, minibatch: Minibatch) -> None:
    spool.begin_put(minibatch, reads_of(minibatch)).result()


def test_what_is_not_written_yet_or_was_dropped_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_write = module._write, threading.Event()

    def late(file: Any, data: memoryview, offset: int) -> None:
        assert not offset or may_write.wait(30)
        write(file, data, offset)

    monkeypatch.setattr(module, "_write", late)
    minibatches = [small_minibatch(first=100 * i) for i in range(3)]
    spool = open_spool(tmp_path)
    written = [spool.begin_put(minibatch, reads_of(minibatch)) for minibatch in minibatches]
    written[0].result()
    assert spool.take(0)[1] == reads_of(minibatches[0])
    spool._readers.submit(int).result()  # after what it reads ahead
    may_write.set()
    assert spool.take(1)[1] == reads_of(minibatches[1])
    written[2].result()
    spool.drop_from(2)
    put(spool, small_minibatch(first=7))
    assert spool.take(2)[1] == reads_of(small_minibatch(first=7))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_put_comes_back(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spaces = int(rng.integers(1, 4))
    spool, written = open_spool(tmp_path, spaces=spaces), []
    for _ in range(30):
        rows = [rng.integers(0, 1 << 32, rng.integers(0, 3000), np.uint32) for _ in range(spaces)]
        tables = tuple(f"t{i}" for i in range(rng.integers(0, 4)))
        written.append(Minibatch(rows, tables, random_object(rng)))
        put(spool, written[-1])
        if rng.random() < 0.3:  # while it is filled, as for the next superbatch
            i = int(rng.integers(len(written)))
            for rows_of_space, expected in zip(spool.rows(i), written[i].rows, strict=True):
                assert np.array_equal(rows_of_space, expected)
    assert len(spool) == len(written)
    order = np.sort(rng.permutation(len(written))[: rng.integers(1, 30)])  # some are skipped
    for i in order.tolist():
        minibatch, reads = spool.take(i)
        assert reads == reads_of(written[i]) == reads_of(minibatch)
        assert_equal(minibatch.other, written[i].other)
    assert spool.counters["bytes_read"] > 0
    spool.close()
    spool.close()
    assert not scratch_files(tmp_path)


@pytest.mark.parametrize(
    ("least", "most", "value_bytes"),
    [(0, (1 << 32) - 1, 4), (0, 1 << 32, 8), (-1, 5, 8), (-(1 << 63), (1 << 63) - 1, 8)],
)
def test_ids_take_four_bytes_if_that_holds_them(
    tmp_path: Path, least: int, most: int, value_bytes: int
) -> None:
    count = 1 << 16
    ids = torch.arange(count).clamp(0, 5)
    ids[count // 3], ids[-1] = least, most
    shapes = (ids, ids.view(4, -1, 2), ids.view(2, -1).t())
    spool = open_spool(tmp_path)
    put(spool, small_minibatch(shapes))
    assert 0 <= spool.bytes_written - 3 * value_bytes * count < 8192
    assert_equal(spool.take(0)[0].other, shapes)
    spool.close()


def test_objects_of_unknown_packages_are_unpickled_on_trial_each_time(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    put(spool, small_minibatch(TwoArguments.__new__(TwoArguments, "a", "b")))
    with pytest.raises(NotSpoolable, match="does not unpickle"):
        put(spool, small_minibatch(TwoArguments("a", "b")))
    assert len(spool) == 1
    spool.close()


class Proxy:
    """Has the module of what it stands for, as proxies of libraries do."""

    def __init__(self, other: Any) -> None:
        self.other = other

    __module__ = property(lambda self: self.other.__module__)

    def __reduce__(self) -> Any:
        return copy.copy, (self.other,)


def test_a_proxy_may_be_in_a_minibatch(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    put(spool, small_minibatch(Proxy([1, 2])))
    assert spool.take(0)[0].other == [1, 2]
    spool.close()


def test_a_small_tensor_that_is_kept_keeps_no_minibatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, maps = module._read, []

    def noted(*args: Any) -> Any:
        what = read(*args)
        maps.append(weakref.ref(what))
        return what

    monkeypatch.setattr(module, "_read", noted)
    spool = open_spool(tmp_path)
    put(spool, small_minibatch((torch.arange(900), np.arange(5.0), torch.zeros(1 << 20))))
    labels, weights, large = spool.take(0)[0].other
    assert [m() is None for m in maps] == [False]
    del large
    assert [m() is None for m in maps] == [True]
    assert len(labels) == 900
    assert len(weights) == 5
    spool.close()


def test_tensors_of_the_dataset_are_not_written(path: Path, tmp_path: Path) -> None:
    store = gids.FeatureStore(path)
    graph = store.graph(("paper", "cites", "paper"))
    spool = open_spool(tmp_path)
    for _ in range(3):
        put(spool, small_minibatch(graph))
    assert spool.bytes_written < 3 * 8192
    for i in range(3):
        assert spool.take(i)[0].other is graph
    spool.close()
    store.close()


def test_copies_of_mapped_arrays_are_written(tmp_path: Path) -> None:
    """They have the type of a map, and memory of their own."""
    np.save(tmp_path / "labels.npy", np.arange(1 << 16))
    mapped = np.load(tmp_path / "labels.npy", mmap_mode="r")
    spool = open_spool(tmp_path)
    put(spool, small_minibatch((mapped, mapped[: 1 << 15].astype(np.int32))))
    assert spool.bytes_written > 1 << 17
    labels, copy = spool.take(0)[0].other
    assert labels is mapped
    assert np.array_equal(copy, np.arange(1 << 15))
    spool.close()


class Raises:
    """Raises an error when it is pickled."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error("no")


class DoesNotUnpickle:
    """Its constructor needs an argument that pickle does not give."""

    def __init__(self, *needed: int) -> None:
        assert needed

    def __reduce__(self) -> Any:
        return DoesNotUnpickle, ()


class TwoArguments(Exception):
    """An exception pickles, and raises TypeError when it is unpickled."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class ReadsOtherRows(Minibatch):
    """Unpickles to a minibatch with other rows."""

    def __getstate__(self) -> Any:
        return self.__dict__ | {"rows": [rows + np.uint32(1) for rows in self.rows]}


UNFIT = [
    lambda: None,
    threading.Lock(),
    (i for i in range(3)),
    ctypes.pointer(ctypes.c_int(1)),
    Raises(ValueError),
    Raises(KeyError),
    Raises(OSError),
    DoesNotUnpickle(1),
    TwoArguments("a", "b"),
]


def test_a_minibatch_that_unpickles_to_other_rows_is_not_added(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    with pytest.raises(NotSpoolable, match="reads other rows"):
        put(spool, ReadsOtherRows([np.arange(5, dtype=np.uint32)], ("paper.feat",)))
    assert len(spool) == 0
    spool.close()


def test_a_minibatch_that_comes_back_with_other_rows_is_an_error(tmp_path: Path) -> None:
    """As if a class changed while its minibatches were on scratch."""
    spool, shift = open_spool(tmp_path), 0
    spool._reads_of = lambda m: Reads([rows + np.uint32(shift) for rows in m.rows], m.tables)
    for _ in range(2):
        put(spool, small_minibatch())
    assert spool.take(0)[0].tables == ("paper.feat",)
    shift = 1
    with pytest.raises(RuntimeError, match=r"minibatch 1, a Minibatch, reads other rows .* reads='random'"):
        spool.take(1)
    spool.close()


def test_a_full_scratch_leaves_what_was_put_before(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, 1 << 20)
    count = 0
    with contextlib.suppress(StorageError):
        while count < 100:
            put(spool, small_minibatch(count, first=count, count=5000))
            count += 1
    assert 20 < count < 30  # 40 kB each
    with pytest.raises(StorageError, match="scratch_bytes"):
        put(spool, small_minibatch(count=5000))
    assert len(spool) == count
    for i in range(count):
        assert spool.take(i)[0].other == i
    spool.close()


def test_what_minibatches_share_is_copied_into_each(tmp_path: Path) -> None:
    shared, spool = {"names": ["a", "b"]}, open_spool(tmp_path)
    for _ in range(2):
        put(spool, small_minibatch(shared))
    first, second = (spool.take(i)[0].other for i in range(2))
    assert first == second == shared
    assert first is not second
    spool.close()
