"""The spool: a sampled minibatch comes back as it was put, whatever tensors and objects it is made of."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packs_example import scratch_files

import gids
from gids.errors import StorageError
from gids.packs import NotSpoolable, Scratch, Spool

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


@pytest.mark.parametrize("seed", range(6))
def test_what_is_put_comes_back(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spaces = int(rng.integers(1, 4))
    spool = Spool(Scratch(tmp_path, 1 << 30), spaces)
    put = []
    for _ in range(30):
        minibatch = random_object(rng)
        rows = [rng.integers(0, 1 << 32, rng.integers(0, 3000), np.uint32) for _ in range(spaces)]
        tables = tuple(f"t{i}" for i in range(rng.integers(0, 4)))
        spool.put(minibatch, rows, tables)
        put.append((minibatch, tables, rows))
        if rng.random() < 0.3:  # while it is filled, as for the next superbatch
            i = int(rng.integers(len(put)))
            for of_space, expected in zip(spool.rows(i), put[i][2], strict=True):
                assert np.array_equal(of_space, expected)
    assert len(spool) == len(put)
    order = np.sort(rng.permutation(len(put))[: rng.integers(1, 30)])  # some are skipped
    for i in order.tolist():
        for found, expected in zip(spool.take(i), put[i], strict=True):
            if found is not put[i][2]:
                assert_equal(list(found) if isinstance(expected, list) else found, expected)
    assert spool.bytes_read > 0
    spool.close()
    spool.close()
    assert not scratch_files(tmp_path)


def test_tensors_of_the_dataset_are_not_written(path: Path, tmp_path: Path) -> None:
    store = gids.FeatureStore(path)
    graph = store.graph(("paper", "cites", "paper"))
    spool = Spool(Scratch(tmp_path, 1 << 30), 1)
    for i in range(3):
        spool.put((i, graph), [np.arange(5, dtype=np.uint32)], ("paper.feat",))
    assert spool.bytes_written < 3 * 8192
    for i in range(3):
        (number, found), _, _ = spool.take(i)
        assert number == i
        assert found is graph
    spool.close()
    store.close()


def test_what_does_not_pickle_is_not_added(tmp_path: Path) -> None:
    spool = Spool(Scratch(tmp_path, 1 << 30), 1)
    rows = [np.arange(5, dtype=np.uint32)]
    spool.put("first", rows, ())
    for bad in (lambda: None, threading.Lock(), (i for i in range(3))):
        with pytest.raises(NotSpoolable, match="does not pickle"):
            spool.put(("second", bad), rows, ())
    spool.put("third", rows, ())
    assert len(spool) == 2
    assert [spool.take(i)[0] for i in range(2)] == ["first", "third"]
    spool.close()


def test_a_full_scratch_leaves_what_was_put_before(tmp_path: Path) -> None:
    spool = Spool(Scratch(tmp_path, 1 << 20), 1)
    rows = np.arange(10_000, dtype=np.uint32)
    count = 0
    with contextlib.suppress(StorageError):
        while count < 100:
            spool.put(count, [rows + np.uint32(count)], ())
            count += 1
    assert 20 < count < 30  # 40 kB each
    with pytest.raises(StorageError, match="scratch_bytes"):
        spool.put(count, [rows], ())
    assert len(spool) == count
    for i in range(count):
        number, _, (found,) = spool.take(i)
        assert number == i
        assert np.array_equal(found, rows + i)
    spool.close()
