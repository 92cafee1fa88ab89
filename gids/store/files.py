"""The files of a dataset: find them, check that they may be used, and check their headers and sizes.

Called by FeatureStore, `verify` and the writers. Array files are `.npy` with exactly the header that
`npy_header` makes, so headers are compared, never parsed. Nothing is unpickled.

MappedArray: an array in such a file, memory-mapped; made here and by Table. A page that cannot be read,
because of a device error or because the file was truncated, would end the process with SIGBUS. Native code
and the functions of NumPy that read a MappedArray raise StorageError instead. They do not notice what
np.asarray, torch.from_numpy or a framework made of it: wrap reads of that in
``with gids._core.MapGuard():``, which guards the present thread.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.errors import FormatError, StorageError, naming
from gids.store.dtypes import ARRAY_DTYPES, check_scales, make_bools_proper
from gids.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, ArrayEntry, Manifest, TableEntry, load_manifest
from gids.store.rows import FileRows, read_exactly
from gids.stored_file import AnyFile, Directory, StoredFile, opened


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


_IDENTITY = attrgetter("st_ino", "st_size", "st_mtime_ns")  # of a file that does not change
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """The bytes before the data of a `.npy` file (version 1.0, C order, padded to a multiple of 64)."""
    lengths = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': '{np.dtype(dtype).str}', 'fortran_order': False, 'shape': ({lengths}), }}"
    padding = -(10 + len(text) + 1) % 64
    text += " " * padding + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def array_header(entry: ArrayEntry) -> bytes:
    """The bytes before an array's data in its file: none in raw files (checksums)."""
    return npy_header(entry.dtype, entry.shape) if entry.path.endswith(".npy") else b""


def array_bytes(entry: ArrayEntry) -> int:
    """Size of an array's file."""
    return len(array_header(entry)) + math.prod(entry.shape) * ARRAY_DTYPES[entry.dtype].itemsize


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of the dataset at root. Raises FormatError or FileNotFoundError."""
    return Locator(root).read_manifest()


def _open_directory(root: Path) -> Directory:
    try:
        return Directory(root)
    except NotADirectoryError:
        raise FormatError(
            f"{root} has no {MANIFEST}; is it a gids dataset? `gids convert` makes one"
        ) from None
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no dataset at {root}: make one with `gids convert SOURCE {root}` "
            "(`gids generate NAME.gids` makes one to try)"
        ) from None


class Locator:
    """Opens a dataset's directory, reads its manifest, and finds the files that the manifest names.

    After symbolic links are followed, a path must be inside the dataset, or (shards only) inside one of
    ``allow_dirs``. Files are opened through the directory, so they are those of the dataset that was at
    `root` when the Locator was made. After close(), and in a pickle's copy, the directory is opened again for
    each file; then the dataset at `root` must have all that the manifest named, except heat.

    Raises FileNotFoundError, FormatError if `root` is no directory.
    """

    def __init__(self, root: Path, allow_dirs: Sequence[str | os.PathLike[str]] = ()) -> None:
        if isinstance(allow_dirs, (str, bytes, os.PathLike)):
            raise TypeError("allow_dirs must be a list of directories, not a single path")
        self.root = root
        self.allowed = tuple(Path(d).resolve() for d in allow_dirs)
        self._directory: Directory | None = _open_directory(root)
        self._seen: dict[str, tuple[int, ...]] = {}
        """Which file was at a path first."""
        self.contents: Mapping[str, int] = {}
        """Of the manifest that was read. See Manifest.contents."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_directory": None}

    def close(self) -> None:
        """Close the directory, once no other thread opens a file. Idempotent."""
        self._directory = None

    def read_manifest(self) -> Manifest:
        """Read the manifest. Raises FormatError."""
        path, directory = self.root / MANIFEST, self._directory or _open_directory(self.root)
        try:
            is_file = stat.S_ISREG(directory.stat(MANIFEST).st_mode)
        except FileNotFoundError:
            is_file = False
        if not is_file:
            cure = "is it a gids dataset? `gids convert` makes one"
            if self.root.suffix == ".partial":
                cure = "to finish it, run the same `gids convert` command again"
            elif any(self.root.glob("part-[0-9]*.gids")):
                cure = "it is a directory of parts: open it with gids.distributed.open(), or one of its parts"
            raise FormatError(f"{self.root} has no {MANIFEST}; {cure}")
        with open(directory.open(MANIFEST), "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        with naming(str(path)):
            manifest = load_manifest(data)
        self.contents = manifest.contents()
        return manifest

    def open(self, name: str) -> int:
        """Open the file at this path, as in the manifest, for reading.

        Returns a descriptor. Raises StorageError if it was removed, replaced or changed, OSError.
        """
        path = self.root / name
        try:
            fd = self._current().open(name)
            now = _IDENTITY(os.fstat(fd))
            before = self._seen.setdefault(name, now)
            if self._directory is not None and now != before:
                os.close(fd)
                change, code = "replaced or changed", errno.ESTALE
                if now[0] == before[0] and now[1] < before[1]:
                    change, code = "truncated", errno.ENODATA
                what = f"the file was {change} after the dataset was opened: open it again"
                raise StorageError(code, what, path)
            return fd
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            if error.errno in _GONE:
                what = "the file was removed after the dataset was opened: open it again"
                raise StorageError(errno.ESTALE, what, path) from None
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None

    def stat(self, name: str) -> os.stat_result:
        """os.stat() of a file. Raises OSError."""
        status = self._current().stat(name)
        self._seen.setdefault(name, _IDENTITY(status))
        return status

    def _current(self) -> Directory:
        if (directory := self._directory) is not None:  # close() may come from another thread
            return directory
        try:
            again = Locator(self.root)
            again.read_manifest()
        except (FormatError, FileNotFoundError):
            again = None
        if again is None or not self.contents.items() <= again.contents.items():
            what = f"the dataset {self.root} is not the one that was opened: open it again"
            raise StorageError(errno.ESTALE, what, self.root)
        assert again._directory is not None
        return again._directory

    def _file(self, name: str) -> StoredFile:
        return StoredFile(self.root / name, partial(self.open, name))

    def array(self, entry: ArrayEntry) -> StoredFile:
        path = self.root / entry.path
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise FormatError(
                f"{path} leads to {path.resolve()}, outside the dataset; only shards may be outside"
            )
        return self._file(entry.path)

    def map(self, entry: ArrayEntry) -> np.ndarray:
        """An array as a memory map, see map_array."""
        return map_array(self.array(entry), entry)

    def rows(self, entry: ArrayEntry) -> FileRows:
        """An array as rows that are read from the file."""
        return array_rows(self.array(entry), entry)

    def shard(self, path: str, among: Sequence[str] = ()) -> StoredFile:
        """A shard. among: all shards of the table; the error lists their directories too."""
        full = self.root / path
        if not self._is_allowed(full):
            outside = [self.root / s for s in (path, *among) if not self._is_allowed(self.root / s)]
            directories = sorted({str(_stripe_dir_of(shard.resolve())) for shard in outside})
            options = " ".join(f"--allow-dir {shlex.quote(d)}" for d in directories)
            raise FormatError(
                f"shard {full.resolve()} is outside the dataset {self.root.name}; if you trust it, "
                f"open with allow_dirs={directories} (or gids ... {options})"
            )
        return self._file(path)

    def _is_allowed(self, path: Path) -> bool:
        real = path.resolve()
        return any(real.is_relative_to(d) for d in (self.root.resolve(), *self.allowed))


def _stripe_dir_of(shard: Path) -> Path:
    """The directory that was given to `--stripe`; its shards are in NAME.shards-ID/TABLE/."""
    return (
        shard.parents[2] if len(shard.parents) > 2 and ".shards-" in shard.parents[1].name else shard.parent
    )


def faults(manifest: Manifest, locate: Locator) -> Iterator[str]:
    """Yield one line per file that is missing, not allowed or of a wrong size or type. Reads only headers."""
    yield from map(str, _faults(manifest, locate))


def _faults(manifest: Manifest, locate: Locator) -> Iterator[str | Exception]:
    files: list[tuple[Callable[[], StoredFile], str, int, str, bytes]] = [
        (partial(locate.array, a), a.path, array_bytes(a), f"{a.dtype}{list(a.shape)}", array_header(a))
        for a in manifest.arrays()
    ]
    for table in manifest.tables:
        for index, shard in enumerate(table.shards):
            pages = table.geometry.shard_page_count(index)
            what, size_bytes = f"{pages} pages of {table.page_bytes}", pages * table.page_bytes
            files.append((partial(locate.shard, shard, table.shards), shard, size_bytes, what, b""))
    for find, name, size_bytes, what, header in files:
        try:
            file = find()
            if fault := _size_fault(locate, name, size_bytes, what):
                yield fault
            elif header:
                with opened(file) as fd:
                    if os.pread(fd, len(header), 0) != header:
                        yield f"{file} does not have the header of a .npy file with {what}"
        except (FormatError, OSError) as error:
            yield error


def open_dataset(root: Path, allow_dirs: Sequence[str | os.PathLike[str]] = ()) -> tuple[Locator, Manifest]:
    """Open a dataset, and check its files as `faults` does.

    Raises FileNotFoundError, PermissionError, FormatError for the first other fault.
    """
    locate = Locator(root, allow_dirs)
    manifest = locate.read_manifest()
    fault = next(_faults(manifest, locate), None)
    if fault is None:
        return locate, manifest
    if isinstance(fault, PermissionError):
        raise fault
    raise FormatError(str(fault))


def _size_fault(locate: Locator, name: str, expected: int, what: str) -> str:
    """What is wrong with the size or the type of a file, or ""."""
    path = locate.root / name
    try:
        status = locate.stat(name)
    except FileNotFoundError:
        return f"{path} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    if status.st_size == expected:
        return ""
    verb = "truncated" if status.st_size < expected else "too long"
    sizes = f"{status.st_size} bytes, expected {expected} ({what})"
    return f"{path} is {verb}: {sizes}; restore it, or convert the source again"


def map_array(file: AnyFile, entry: ArrayEntry) -> np.ndarray:
    """The array as a read-only memory map (an ordinary array when it is raw and empty)."""
    dtype = ARRAY_DTYPES[entry.dtype]
    offset = len(array_header(entry))
    if offset + math.prod(entry.shape) == 0:
        return np.empty(entry.shape, dtype)
    with opened(file) as fd:
        return MappedArray.of(fd, file, dtype, offset, entry.shape)


def load_array(file: AnyFile, entry: ArrayEntry) -> np.ndarray:
    """Read the array into memory. Raises StorageError if its bytes do not have their checksum."""
    header = len(array_header(entry))
    data = np.empty(array_bytes(entry), np.uint8)
    with opened(file) as fd:
        read_exactly(fd, data, 0, file)
    if _core.crc32c_extend(0, data) != entry.crc32c:
        what = "the checksum of this file is wrong: it was changed or damaged; restore it, or convert again"
        raise StorageError(errno.EBADMSG, what, file)
    values = data[header:].view(ARRAY_DTYPES[entry.dtype]).reshape(entry.shape)
    if entry.dtype == "bool":
        make_bools_proper(torch.from_numpy(values))
    return values


def array_rows(file: AnyFile, entry: ArrayEntry, dtype: torch.dtype | None = None) -> FileRows:
    """The array as rows that are read from the file. dtype: read the bytes as this type."""
    dtype = dtype or getattr(torch, entry.dtype)
    return FileRows(file, entry.shape, dtype, offset=len(array_header(entry)))


def load_scales(file: AnyFile, entry: ArrayEntry) -> np.ndarray:
    """Read the column scales of a table, float32. Raises FormatError if one is negative or not finite."""
    scales = load_array(file, entry)
    check_scales(scales.reshape(-1), os.fspath(file))
    return scales


def shard_files(table: TableEntry, locate: Locator) -> list[StoredFile]:
    return [locate.shard(s, table.shards) for s in table.shards]
