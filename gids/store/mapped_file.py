"""MappedArray: an array in a file of a dataset, memory-mapped. Made by gids.store.files and Table.

A page that cannot be read, because of a device error or because the file was truncated, would end the process
with SIGBUS. Native code and the functions of NumPy that read a MappedArray raise StorageError instead. What
hides the mapping from them (np.asarray, torch.from_numpy, a framework) reads it as any mapping: wrap such
reads in ``with gids._core.MapGuard():``, which guards the present thread.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core


def _guarded(name: str) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)

    def call(self: np.ndarray, *args: Any, **options: Any) -> Any:
        with _core.MapGuard():
            return method(self, *args, **options)

    return call


class MappedArray(np.memmap):
    """A read-only memory map. Copies of its values are ordinary arrays.

    descriptor: of the file, for an array that of() has returned. It is open while the array lives.
    """

    descriptor: int | None = None
    _mmap: Any  # NumPy's name: what keeps the mapping; None for a copy

    @classmethod
    def of(
        cls, file: int, path: str | os.PathLike[str], dtype: npt.DTypeLike, offset: int, shape: Sequence[int]
    ) -> MappedArray:
        """file: a descriptor, which is duplicated. path: for errors. offset: of the array, in bytes."""
        dtype = np.dtype(dtype)
        nbytes = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        mapped, descriptor = _core.map_file(file, nbytes, os.fspath(path))
        array = np.ndarray.__new__(cls, tuple(shape), dtype, buffer=mapped, offset=offset)
        array._mmap, array.filename, array.offset, array.mode = mapped, os.fspath(path), offset, "r"
        array.descriptor = descriptor
        return array

    def __getitem__(self, key: Any) -> Any:
        with _core.MapGuard():
            values = super().__getitem__(key)
        is_copy = isinstance(values, MappedArray) and values._mmap is None
        return values.view(np.ndarray) if is_copy else values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [a.view(np.ndarray) if isinstance(a, MappedArray) else a for a in inputs]
        with _core.MapGuard():
            return getattr(ufunc, method)(*plain, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        with _core.MapGuard():
            return super().__array_function__(function, types, args, options)

    astype = _guarded("astype")
    copy = _guarded("copy")
    take = _guarded("take")
    tolist = _guarded("tolist")
    tobytes = _guarded("tobytes")
    min = _guarded("min")
    max = _guarded("max")
    sum = _guarded("sum")
    any = _guarded("any")
    all = _guarded("all")


_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def private_tensor(array: np.ndarray) -> torch.Tensor:
    """An array of int32 or int64 as an int64 tensor that may be written.

    A MappedArray of int64 is mapped again, privately: frameworks that sort a graph's rows in place would
    crash on the read-only map of a store. Only pages that are written are copied; the file never changes. Any
    other array is copied. Nothing guards reads of the private map: if one fails, SIGBUS ends the process.
    """
    descriptor = getattr(array, "descriptor", None)
    if array.dtype != np.int64 or descriptor is None or not array.size:
        return torch.from_numpy(array.astype(np.int64))
    mapping = mmap.mmap(
        descriptor,
        0,
        flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,  # else the kernel reserves memory for the whole file
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
    return torch.frombuffer(mapping, dtype=torch.int64, count=array.size, offset=array.offset)  # type: ignore[attr-defined]
