"""Loads files of torch.save, and unpickles only tensors, numbers, texts and containers of them.

Called by the readers. Tensors are memory-mapped. Objects of PyTorch Geometric become records of their fields
and run none of their code. Other classes are refused by name.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.source_files import open_zip, reading, starts_with
from gids.errors import FormatError
from gids.store.dtypes import torch_dtype_of
from gids.stored_file import opened


class Record:
    """The fields of an object whose class is not imported."""

    def __init__(self, *_: Any) -> None:
        """Ignores the value of an Enum."""

    def __hash__(self) -> int:
        return id(self)


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_RECORDS = tuple(
    f"torch_geometric.data.{module}.{name}"
    for module, names in {
        "data": ("Data", "DataEdgeAttr", "DataTensorAttr"),
        "feature_store": ("TensorAttr",),
        "graph_store": ("EdgeAttr", "EdgeLayout"),
        "hetero_data": ("HeteroData",),
        "storage": ("AttrType", "BaseStorage", "NodeStorage", "EdgeStorage", "GlobalStorage"),
    }.items()
    for name in names
)


def is_torch_file(path: Path) -> bool:
    """Whether a file is a zip file of torch.save."""
    return any(member.filename.endswith("/data.pkl") for member in _members(path))


def _members(path: Path) -> list[zipfile.ZipInfo]:
    """The members of a zip file; none for other files and damaged ones."""
    if starts_with(path, b"PK\x03\x04"):
        with contextlib.suppress(FormatError), open_zip(path) as archive:
            return archive.infolist()
    return []


def load_torch(path: Path) -> Any:
    """The object in a file of torch.save. Raises FormatError, which names a class that is not allowed."""
    if not is_torch_file(path):
        raise FormatError(
            f"{path} is not a file of torch.save (1.6 or newer), or is truncated; load it with the program "
            "that wrote it and save it again"
        )
    if any(m.compress_type != zipfile.ZIP_STORED for m in _members(path)):  # torch would map packed bytes
        raise FormatError(f"{path} has compressed members, which torch.save does not write; save it again")
    if not _can_name():
        return _load(path)
    others = torch.serialization.get_safe_globals()  # PyG adds its own classes when it is imported
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(_allowed()):
            return _load(path)
    finally:
        torch.serialization.add_safe_globals(others)


def load_torch_dict(path: Path, what: str) -> dict[Any, Any]:
    """The dictionary in a file of torch.save. what: its content, in messages. Raises FormatError."""
    saved = load_torch(path)
    if not isinstance(saved, dict):
        raise FormatError(f"{path} holds a {type(saved).__name__}; it must be a dictionary of {what}")
    return saved


def _can_name() -> bool:
    """Whether this torch can allow classes by name. Before 2.6 it loads tensors only."""
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 6)


def as_tensor(value: Any) -> Any:
    """An array of NumPy, a number, or lists of numbers, as a tensor; anything else is unchanged."""
    values = value
    if isinstance(value, (int, float)) or (isinstance(value, (list, tuple)) and value):
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # rows of several lengths
            values = np.asarray(value)
    if not isinstance(values, np.ndarray) or torch_dtype_of(values.dtype) is None:
        return value
    native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return torch.from_numpy(native.reshape(values.shape))


def _load(path: Path) -> Any:
    with reading(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Validating s|S)parse ", UserWarning)  # for who saved it
        try:
            with opened(path) as fd:  # by number, because torch takes only paths that are UTF-8
                return torch.load(f"/proc/self/fd/{fd}", map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FormatError(
                f"{path} needs unpickling of other classes, which could run any code: {_culprit(error)}"
                + ("" if _can_name() else "; torch 2.6 or newer reads NumPy arrays and PyG's own classes")
            ) from None


def _culprit(error: Exception) -> str:
    """The class that a file asks for, else the first line of the error."""
    if name := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it asks for {name[1]}"
    message = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
    return message[1].strip() if message else str(error).partition("\n")[0]


def _allowed() -> list[Any]:
    """The classes and functions that a file may ask for, with the names by which it does."""
    allowed: list[Any] = [(Record, name) for name in _RECORDS]
    # PyG's storages keep a defaultdict about their attributes.
    allowed += [(_plain_dict, "collections.defaultdict"), (_no_bytes, "builtins.bytes")]
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # of NumPy 1 and 2
        allowed += [(getattr(multiarray, n), f"{module}.{n}") for n in ("_reconstruct", "scalar")]
    numbers = [type(np.dtype(kind)) for kind in ("bool", *np.typecodes["AllInteger"], "e", "f", "d")]
    return [*allowed, np.ndarray, (np.ndarray, "numpy.memmap"), np.dtype, *numbers]


def _plain_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _no_bytes() -> bytes:
    """The data of a NumPy array without elements; that of others is encoded text."""
    return b""
