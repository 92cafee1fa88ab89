"""The files of a dataset: find them, check that they may be used, and check their headers and sizes.

Called by FeatureStore, `verify` and the writers. Array files are `.npy` with exactly the header that
`npy_header` makes, so headers are compared, never parsed. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.dtypes import ARRAY_DTYPES, make_bools_proper
from gids.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, ArrayEntry, Manifest, TableEntry, load_manifest
from gids.store.quantize import check_scales
from gids.store.rows import FileRows


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """The bytes before the data of a `.npy` file (version 1.0, C order, padded to a multiple of 64)."""
    lengths = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': '{ARRAY_DTYPES[dtype].str}', 'fortran_order': False, 'shape': ({lengths}), }}"
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
    if not root.exists():
        replaced = root.with_name(f"{root.name}.partial") / "replaced"
        if replaced.is_dir():
            raise FileNotFoundError(
                f"no dataset at {root}: a conversion was killed while it replaced the dataset. "
                f"Run the same command again, or rename {replaced} to {root}"
            )
        raise FileNotFoundError(f"no dataset at {root}: make one with `gids convert SOURCE {root}`")
    path = root / MANIFEST
    if not path.is_file():
        cure = "is it a gids dataset?"
        if root.suffix == ".partial":
            cure = "to finish it, run the same `gids convert` command again"
        elif any(root.glob("part-[0-9]*.gids")):
            cure = "it is a directory of parts: open it with gids.distributed.open(), or one of its parts"
        raise FormatError(f"{root} has no {MANIFEST}; {cure}")
    with open(path, "rb") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    try:
        return load_manifest(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


class Locator:
    """Turns the paths in a manifest into paths of files, and refuses those that are not allowed.

    After symbolic links are followed, a path must be inside the dataset, or (shards only) inside one of
    ``allow_dirs``.
    """

    def __init__(self, root: Path, allow_dirs: Sequence[str | os.PathLike[str]] = ()) -> None:
        if isinstance(allow_dirs, (str, bytes, os.PathLike)):
            raise TypeError("allow_dirs must be a list of directories, not a single path")
        self.root = root
        self.allowed = tuple(Path(d).resolve() for d in allow_dirs)

    def array(self, entry: ArrayEntry) -> Path:
        path = self.root / entry.path
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise FormatError(
                f"{path} leads to {path.resolve()}, outside the dataset; only shards may be outside"
            )
        return path

    def shard(self, path: str, among: Sequence[str] = ()) -> Path:
        """The path of a shard. among: all shards of the table; the error lists their directories too."""
        full = self.root / path
        if not self._is_allowed(full):
            outside = [self.root / s for s in (path, *among) if not self._is_allowed(self.root / s)]
            directories = sorted({str(_stripe_dir_of(shard.resolve())) for shard in outside})
            options = " ".join(f"--allow-dir {shlex.quote(d)}" for d in directories)
            raise FormatError(
                f"shard {full.resolve()} is outside the dataset {self.root.name}; if you trust it, "
                f"open with allow_dirs={directories} (or gids ... {options})"
            )
        return full

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
    for entry in manifest.arrays():
        try:
            path = locate.array(entry)
            header, what = array_header(entry), f"{entry.dtype}{list(entry.shape)}"
            yield from _size_faults(path, array_bytes(entry), what)
            if header and path.is_file():
                with open(path, "rb") as file:
                    if file.read(len(header)) != header:
                        yield f"{path} does not have the header of a .npy file with {what}"
        except (FormatError, OSError) as error:
            yield str(error)
    for table in manifest.tables:
        for index in range(len(table.shards)):
            try:
                path = locate.shard(table.shards[index], table.shards)
                pages = table.geometry.shard_page_count(index)
                yield from _size_faults(
                    path, pages * table.page_bytes, f"{pages} pages of {table.page_bytes}"
                )
            except (FormatError, OSError) as error:
                yield str(error)


def _size_faults(path: Path, expected: int, what: str) -> Iterator[str]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        yield f"{path} is missing"
        return
    if not stat.S_ISREG(found.st_mode):
        yield f"{path} is not a regular file"
    elif found.st_size != expected:
        verb = "truncated" if found.st_size < expected else "too long"
        sizes = f"{found.st_size} bytes, expected {expected} ({what})"
        yield f"{path} is {verb}: {sizes}; restore it, or convert the source again"


def map_array(path: Path, entry: ArrayEntry) -> np.ndarray:
    """The array as a read-only memory map (an ordinary array when it is raw and empty)."""
    dtype = ARRAY_DTYPES[entry.dtype]
    offset = len(array_header(entry))
    if offset + math.prod(entry.shape) == 0:
        return np.empty(entry.shape, dtype)
    return np.memmap(path, dtype, "r", offset, entry.shape)


def load_array(path: Path, entry: ArrayEntry) -> np.ndarray:
    """Read the array into memory."""
    values = np.fromfile(path, ARRAY_DTYPES[entry.dtype], offset=len(array_header(entry)))
    if values.size != math.prod(entry.shape):
        raise FormatError(f"{path} was truncated after the dataset was opened")
    if entry.dtype == "bool":
        make_bools_proper(torch.from_numpy(values))
    return values.reshape(entry.shape)


def array_rows(path: Path, entry: ArrayEntry, dtype: torch.dtype | None = None) -> FileRows:
    """The array as rows that are read from the file. dtype: read the bytes as this type."""
    dtype = dtype or getattr(torch, entry.dtype)
    return FileRows(path, entry.shape, dtype, offset=len(array_header(entry)))


def load_scales(path: Path, entry: ArrayEntry) -> np.ndarray:
    """Read the column scales of a table, float32. Raises FormatError if one is negative or not finite."""
    scales = load_array(path, entry)
    check_scales(scales.reshape(-1), str(path))
    return scales


def shard_files(table: TableEntry, locate: Locator) -> list[Path]:
    return [locate.shard(s, table.shards) for s in table.shards]
