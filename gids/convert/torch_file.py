"""Files of torch.save, loaded without unpickling anything but tensors, numbers, texts and containers of them.

Called by the readers. Tensors are memory-mapped, but for files of torch before 1.6, which are loaded.
Classes of PyTorch Geometric become inert records of their fields, whatever their code would do; arrays of
NumPy are arrays; everything else is refused by its name.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from gids.convert.damage import MAX_MESSAGE_CHARS, parsing, said_by, shortened
from gids.convert.source import starts_with
from gids.convert.source_file import open_file
from gids.convert.zip_file import open_zip
from gids.errors import FormatError
from gids.store.rows import ArrayRows, FileRows, Rows, TensorRows

_LEGACY = b"\x80\x02"  # a file of torch before 1.6: pickles, then the tensors
MAX_LEGACY_BYTES = 300 << 20
_LEGACY_PICKLES = 5  # a number, the protocol, about the machine, what was saved, the names of the tensors
_MAX_PICKLE_BYTES = 64 << 20
_MAX_PICKLE_OBJECTS = 2_000_000
_DAMAGED = "is damaged"


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
        with open_zip(path, _DAMAGED) as archive:
            return _pickle_of(archive) is not None
    except FormatError:
        return False


def _pickle_of(archive: zipfile.ZipFile) -> zipfile.ZipInfo | None:
    return next((m for m in archive.infolist() if m.filename.endswith("/data.pkl")), None)


def load_torch(path: Path) -> Any:
    """What a file of torch.save holds. Raises FormatError that names the class that cannot be loaded."""
    if not is_torch_file(path) and not starts_with(path, _LEGACY):
        raise FormatError(
            f"{path} is not a file that torch.save writes, or is truncated; "
            "load it with what wrote it and torch.save it again"
        )
    _check_pickle(path)
    if not _can_name():
        return _load(path)
    others = torch.serialization.get_safe_globals()  # of packages that are imported, PyG's own classes too
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([*_records(), *_numpy_parts()]):
            return _load(path)
    finally:
        torch.serialization.add_safe_globals(others)


def _check_pickle(path: Path) -> None:
    """Raise FormatError for a pickle of more objects, or more bytes, than torch may make of it.

    One byte of a pickle can become a container of a hundred.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(parsing(path, _DAMAGED))
        if not starts_with(path, b"PK\x03\x04"):
            file = stack.enter_context(open_file(path))
            if os.fstat(file.fileno()).st_size > MAX_LEGACY_BYTES:
                raise FormatError(
                    f"{path} is of torch before 1.6 and must be loaded whole, which is done up to "
                    f"{MAX_LEGACY_BYTES} bytes; load it and torch.save it again with a newer torch"
                )
            for _ in range(_LEGACY_PICKLES):
                _count_objects(file, path)
            return
        archive = stack.enter_context(open_zip(path, _DAMAGED))
        member = _pickle_of(archive)
        assert member is not None
        if any(m.compress_type != zipfile.ZIP_STORED for m in archive.infolist()):
            raise FormatError(f"{path} has packed members, which torch.save does not write; save it again")
        if member.file_size > _MAX_PICKLE_BYTES:
            raise FormatError(_too_large(path))
        _count_objects(io.BytesIO(archive.read(member)), path)


def _count_objects(file: BinaryIO, path: Path) -> None:
    """Read past one pickle."""
    begin = file.tell()
    for count, (_, _, at) in enumerate(pickletools.genops(_BoundedFile(file))):  # type: ignore[arg-type]
        if count > _MAX_PICKLE_OBJECTS or (at or 0) - begin > _MAX_PICKLE_BYTES:
            raise FormatError(_too_large(path))


class _BoundedFile:
    """What pickletools reads from: no read takes more than a pickle may have."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, _MAX_PICKLE_BYTES))

    def readline(self) -> bytes:
        return self._file.readline(_MAX_PICKLE_BYTES)


def _too_large(path: Path) -> str:
    return (
        f"{path} has much that is no tensor: at most {_MAX_PICKLE_OBJECTS} values in "
        f"{_MAX_PICKLE_BYTES} bytes are read; save it without lists of numbers and texts"
    )


def _can_name() -> bool:
    """Whether this torch lets what is loaded be chosen by name; before 2.6, only tensors can be loaded."""
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 6)


def mapped_rows(values: torch.Tensor, path: Path) -> Rows:
    """Rows of a tensor that load_torch mapped from path: read from the file where it lies there as it is, so
    that converting does not fill memory with the map's pages. Raises FormatError for one without values."""
    if (
        values.device.type != "cpu"
        or values.layout != torch.strided
        or values.is_nested
        or values.is_quantized
    ):
        kind = (
            "a quantized or nested tensor" if values.device.type == "cpu" else f"a tensor on {values.device}"
        )
        raise FormatError(
            f"{path} holds {kind}, not plain numbers; save what values.cpu() or to_dense() gives"
        )
    if values.is_contiguous():
        offset = _file_offset(values.data_ptr(), path)
        if offset is not None and values.numel():
            return FileRows(path, tuple(values.shape), values.dtype, offset=offset)
    return TensorRows(values)


def value_rows(value: object, what: str, path: Path) -> Rows:
    """Rows of what must be a tensor or an array of NumPy. Raises FormatError for anything else."""
    if isinstance(value, torch.Tensor):
        return mapped_rows(value, path)
    if not isinstance(value, np.ndarray):
        raise FormatError(f"{what} is a {type(value).__name__}, not a tensor or an array")
    return ArrayRows(value)


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
    with parsing(path, _DAMAGED):
        try:
            # As text: torch before 2.3 maps no file named by a Path.
            return torch.load(
                os.fspath(path), map_location="cpu", weights_only=True, mmap=is_torch_file(path)
            )
        except pickle.UnpicklingError as error:
            raise FormatError(
                f"{path} needs unpickling, which could run any code, so it is refused: "
                + _culprit(path, error)
                + ("" if _can_name() else "; torch 2.6 or newer reads arrays of NumPy and PyG's own classes")
            ) from None


def _culprit(path: Path, error: Exception) -> str:
    """Which classes a file asks for, else the first line of the error."""
    look = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    if look is not None and is_torch_file(path):
        with contextlib.suppress(Exception):  # for damaged files
            if asked := sorted(set(look(path)) - set(_RECORDS)):
                return shortened(f"it asks for {', '.join(asked)}", MAX_MESSAGE_CHARS)
    said = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
    return shortened(said[1].strip(), MAX_MESSAGE_CHARS) if said else said_by(error)


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
