"""Files of torch.save, loaded without unpickling anything but tensors, numbers, texts and containers of them.

Called by the readers. Tensors are memory-mapped, but for files of torch before 1.6, which are loaded.
Classes of PyTorch Geometric become inert records of their fields, whatever their code would do; arrays of
NumPy are arrays; everything else is refused by its name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.convert.source import starts_with
from gids.store.rows import FileRows, Rows, TensorRows


class Record:
    """The fields of an object of a class that is not here: what unpickling sets, and no more."""

    def __init__(self, *_: Any) -> None:
        """Takes the value of an Enum, and leaves it."""

    def __hash__(self) -> int:
        return id(self)


_RECORDS = (
    "torch_geometric.data.data.Data",
    "torch_geometric.data.data.DataEdgeAttr",
    "torch_geometric.data.data.DataTensorAttr",
    "torch_geometric.data.feature_store.TensorAttr",
    "torch_geometric.data.graph_store.EdgeAttr",
    "torch_geometric.data.graph_store.EdgeLayout",
    "torch_geometric.data.hetero_data.HeteroData",
    "torch_geometric.data.storage.AttrType",
    "torch_geometric.data.storage.BaseStorage",
    "torch_geometric.data.storage.NodeStorage",
    "torch_geometric.data.storage.EdgeStorage",
    "torch_geometric.data.storage.GlobalStorage",
)


def is_torch_file(path: Path) -> bool:
    """Whether a file is a zip file as torch.save writes it."""
    if not starts_with(path, b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(n.endswith("/data.pkl") for n in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError):
        return False


def load_torch(path: Path) -> Any:
    """What a file of torch.save holds. Raises FormatError that names the class that cannot be loaded."""
    if not is_torch_file(path) and not starts_with(path, b"\x80\x02"):
        raise FormatError(
            f"{path} is not a file that torch.save writes, or is truncated; "
            "load it with what wrote it and torch.save it again"
        )
    if not _can_name():
        return _load(path)
    others = torch.serialization.get_safe_globals()  # of packages that are imported, PyG's own classes too
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([*_records(), *_numpy_parts()]):
            return _load(path)
    finally:
        torch.serialization.add_safe_globals(others)


def _can_name() -> bool:
    """Whether this torch lets what is loaded be chosen by name; before 2.6, only tensors can be loaded."""
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 6)


def mapped_rows(values: torch.Tensor, path: Path) -> Rows:
    """Rows of a tensor that load_torch mapped from path: read from the file where it lies there as it is, so
    that converting does not fill memory with the map's pages."""
    if values.layout == torch.strided and values.is_contiguous():
        offset = _file_offset(values.data_ptr(), path)
        if offset is not None and values.numel():
            return FileRows(path, tuple(values.shape), values.dtype, offset=offset)
    return TensorRows(values)


def _file_offset(address: int, path: Path) -> int | None:
    """Where in the file an address lies, by this process's maps; None if it is no map of the file."""
    inode = path.stat().st_ino
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            bounds, _, offset, _, mapped, *_ = line.split(maxsplit=5)
            begin, end = (int(text, 16) for text in bounds.split("-"))
            if begin <= address < end:
                return int(offset, 16) + address - begin if int(mapped) == inode else None
    return None


def _load(path: Path) -> Any:
    try:
        # As text: torch before 2.3 maps no file named by a Path.
        return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=is_torch_file(path))
    except pickle.UnpicklingError as error:
        raise FormatError(
            f"{path} needs unpickling, which could run any code, so it is refused: {_culprit(path, error)}"
            + ("" if _can_name() else "; torch 2.6 or newer reads arrays of NumPy and PyG's own classes")
        ) from None
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds for damaged files
        raise FormatError(f"{path} is damaged: {(str(error) or 'it ends early').splitlines()[0]}") from None


def _culprit(path: Path, error: Exception) -> str:
    """Which classes a file asks for, else the first line of the error."""
    look = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    if look is not None and is_torch_file(path):
        with contextlib.suppress(pickle.UnpicklingError):  # for damaged files
            if asked := sorted(set(look(path)) - set(_RECORDS)):
                return f"it asks for {', '.join(asked)}"
    said = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
    return said[1].strip() if said else str(error).splitlines()[0]


def _records() -> list[Any]:
    # What PyG's storages remember of their attributes is a defaultdict.
    return [*((Record, name) for name in _RECORDS), (_plain_dict, "collections.defaultdict")]


def _plain_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _numpy_parts() -> list[Any]:
    """What a pickled array of numbers asks for, by the names of NumPy 1 and 2."""
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    reconstruct, scalar = multiarray._reconstruct, multiarray.scalar
    parts: list[Any] = [np.ndarray, np.dtype]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        parts += [(reconstruct, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    parts += [type(np.dtype(kind)) for kind in ("bool", *np.typecodes["AllInteger"], "e", "f", "d")]
    return parts
