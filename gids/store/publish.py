"""Moves a finished dataset into its place, and keeps track of the folders that its shards have elsewhere.

Called by whoever writes or changes a dataset. Removes only what carries the mark of a dataset.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from pathlib import Path

from gids.errors import FormatError
from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST

_MARK = "gids-shards.json"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def shard_folder(directory: str | os.PathLike[str], dataset: Path, id_: str) -> Path:
    """Where a dataset's shards lie in a directory of the user's."""
    return Path(directory).resolve() / f"{dataset.name}.shards-{id_}"


def make_shard_folder(folder: Path, dataset: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / _MARK).write_text(json.dumps({"format": "gids shards", "dataset": str(dataset)}) + "\n")


def remove_shard_folder(folder: Path) -> None:
    """Remove a folder that make_shard_folder made; leave any other alone."""
    if (folder / _MARK).is_file() and ".shards-" in folder.name:
        shutil.rmtree(folder)


def dataset_of(folder: Path) -> str:
    """The path of the dataset that a folder of shards was made for; "" when it is none."""
    try:
        return str(json.loads((folder / _MARK).read_text())["dataset"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def partial_path(dataset: Path) -> Path:
    """Where the work of a conversion to `dataset` lies while it is not finished."""
    return dataset.with_name(f"{dataset.name}.partial")


def is_dataset(path: Path) -> bool:
    """Whether a directory's manifest begins as that of a dataset does."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return False
    with open(manifest, "rb") as file:
        return b'"format": "gids"' in file.read(200)


def check_replaceable(path: Path) -> None:
    """Raise FormatError unless `path` holds a dataset or nothing."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if not is_dataset(path):
        raise FormatError(f"{path} exists and is not a gids dataset; it is left alone: choose another name")


def publish(dataset: Path, path: Path) -> None:
    """Rename `dataset` to `path`, durably. A dataset that is there is replaced in one step and removed."""
    sync_tree(dataset)
    if not path.exists():
        os.rename(dataset, path)
        sync_directory(path.parent)
        return
    check_replaceable(path)
    folders = _shard_folders_of(path)
    if not _exchange(dataset, path):  # an old kernel or file system: two steps, old data kept between them
        aside = dataset.with_name("replaced")
        os.rename(path, aside)
        os.rename(dataset, path)
        dataset = aside
    sync_directory(path.parent)
    shutil.rmtree(dataset)
    for folder in folders:
        remove_shard_folder(folder)


def sync_tree(root: Path) -> None:
    """Make the names of all files below root durable (their data is synced as it is written)."""
    for folder, _, _ in os.walk(root):
        sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _shard_folders_of(path: Path) -> set[Path]:
    try:
        manifest = read_manifest(path)
    except (FormatError, OSError):
        return set()  # damaged: what it names is not to be trusted
    shards = [Path(s) for table in manifest.tables for s in table.shards]
    return {s.parent.parent for s in shards if s.is_absolute()}


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths atomically. False when the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
