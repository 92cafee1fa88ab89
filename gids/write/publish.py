"""Puts a finished dataset in its place, in one step, and removes what no dataset refers to any more.

Called by Workplace and restripe. A conversion publishes like this, so that a kill or a loss of power at any
moment leaves the old dataset or the new one at NAME, and the next writer of NAME finishes the rest:

1. Its journal lists the folders of shards outside the dataset before they are made.
2. All files of the new dataset, and the directories that name them, are synced.
3. The journal records "publish": the checksum of the new manifest, and the folders of the dataset at NAME.
4. NAME and NAME.partial/dataset are exchanged; both parent directories are synced. (Where the system cannot
   exchange: NAME becomes NAME.partial/replaced, then NAME.partial/dataset becomes NAME.)
5. What was replaced becomes NAME.partial/replaced. Its folders of shards are removed, then it, then the rest
   of NAME.partial, the journal last.

A "publish" without its manifest in NAME.partial/dataset means that step 4 is done: only step 5 is left.
Whatever removes a folder of shards first reads the manifests that may refer to it (remove_shard_folder).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gids.errors import FormatError
from gids.store.array_checks import file_crc32c
from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST
from gids.write.sync import sync_directory, write_synced

_MARK = "gids-shards.json"
_LEFTOVERS = "leftovers.json"
_MAX_LEFTOVERS_BYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def dataset_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a dataset; of a symbolic link to one, where that leads."""
    absolute = Path(os.path.abspath(path))
    return absolute.resolve() if absolute.is_symlink() else absolute


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Where the work of a conversion to `path` lies while it is not finished."""
    dataset = dataset_path(path)
    return dataset.with_name(f"{dataset.name}.partial")


def shard_folder(directory: str | os.PathLike[str], dataset: Path, id_: str) -> Path:
    """Where a dataset's shards lie in a directory of the user's."""
    return Path(directory).resolve() / f"{dataset.name}.shards-{id_}"


def make_shard_folder(folder: Path, dataset: Path) -> None:
    """Make a folder for shards, durably, with a mark that says for which dataset."""
    folder.mkdir(exist_ok=True)
    mark = {"format": "gids shards", "dataset": str(dataset)}
    write_synced(folder / _MARK, json.dumps(mark).encode() + b"\n")
    sync_directory(folder)
    sync_directory(folder.parent)


def remove_shard_folder(folder: Path, dataset: Path) -> None:
    """Remove a folder that make_shard_folder made, unless a dataset refers to it.

    Asked are the dataset at `dataset` and the one that the folder's mark names; one that cannot be read may
    refer to it. A folder that is none of shards is left alone.
    """
    if ".shards-" not in folder.name or not folder.is_dir() or folder.is_symlink():
        return
    made_for = _dataset_of(folder)
    if not made_for and set(os.listdir(folder)) - {_MARK}:
        return
    for owner in {dataset, Path(made_for or dataset)}:
        named = shard_folders_of(owner)
        if named is None or folder.resolve() in named:
            return
    remove_tree(folder, last=_MARK)
    sync_directory(folder.parent)  # before whatever lists it forgets it


def shard_folders_of(path: Path) -> set[Path] | None:
    """The folders outside it in which the dataset at `path` has shards; None when it cannot be read."""
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return set()
    except FormatError:
        return None if (path / MANIFEST).exists() else set()
    except OSError:
        return None
    shards = [Path(s) for table in manifest.tables for s in table.shards]
    return {s.parent.parent.resolve() for s in shards if s.is_absolute()}


def write_leftovers(path: Path, folders: Iterable[Path]) -> None:
    """Write down in a dataset, durably, the folders of shards of which some will be left over."""
    write_synced(path / _LEFTOVERS, json.dumps([str(f) for f in folders]).encode() + b"\n")
    sync_directory(path)


def leftovers(path: Path) -> list[Path]:
    """The folders that write_leftovers wrote down."""
    try:
        with open(path / _LEFTOVERS, "rb") as file:
            found = json.loads(file.read(_MAX_LEFTOVERS_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [Path(f) for f in found if isinstance(f, str)] if isinstance(found, list) else []


def remove_leftovers(path: Path) -> None:
    """Remove of the folders that were written down those that nothing refers to, and the list."""
    for folder in leftovers(path):
        remove_shard_folder(folder, path)
    (path / _LEFTOVERS).unlink(missing_ok=True)


def remove_tree(root: Path, *, last: str) -> None:
    """Remove a directory, after everything else the file that says what it is."""
    for entry in list(os.scandir(root)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != last:
            os.unlink(entry.path)
    sync_directory(root)
    (root / last).unlink(missing_ok=True)
    try:
        root.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # another writer has begun to use it
            raise


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


def publication(partial: Path, path: Path) -> dict[str, Any]:
    """Step 3: what the journal is to record of NAME.partial/dataset, which is synced."""
    old = (shard_folders_of(path) or set()) | set(leftovers(path))
    return {"manifest": file_crc32c(partial / "dataset" / MANIFEST), "replaces": sorted(map(str, old))}


def put_in_place(partial: Path, path: Path, *, replace: bool) -> None:
    """Step 4. The caller is the only writer of the dataset at `path`, which is there if it is to be replaced.

    Raises FileExistsError when something else is there, OSError: nothing is changed then.
    """
    new = partial / "dataset"
    if replace:
        try:
            check_replaceable(path)
        except FormatError as error:  # it came meanwhile: the work is not to be thrown away
            raise FileExistsError(str(error)) from None
        if not _exchange(new, path):
            aside = partial / "replaced"
            os.rename(path, aside)
            try:
                os.rename(new, path)
            except OSError:
                os.rename(aside, path)
                raise
    else:
        try:
            os.rename(new, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FileExistsError(
                f"{path} already exists: choose another name, or replace it with --overwrite"
            ) from None
    sync_directory(path.parent)
    sync_directory(partial)


def is_published(partial: Path, record: Mapping[str, Any]) -> bool:
    """Whether step 4 was done for a dataset whose publication was recorded."""
    manifest = partial / "dataset" / MANIFEST
    return not (manifest.is_file() and file_crc32c(manifest) == record["manifest"])


def clean_up(partial: Path, path: Path, record: Mapping[str, Any]) -> None:
    """Step 5, as far as the dataset that was replaced. May be done again. Raises OSError."""
    new, replaced = partial / "dataset", partial / "replaced"
    if new.exists():
        os.rename(new, replaced)
    for folder in record["replaces"]:
        remove_shard_folder(Path(folder), path)
    if replaced.exists():
        shutil.rmtree(replaced)


def take_back(partial: Path, path: Path) -> None:
    """Give a dataset its name back that step 4 was about to replace, in two steps, and did not.

    Raises FileExistsError when something else has the name by now.
    """
    replaced = partial / "replaced"
    if not replaced.exists():
        return
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} is in the way of the dataset that was there, which is now {replaced}: "
            "move one of them to another place"
        )
    os.rename(replaced, path)
    sync_directory(path.parent)
    sync_directory(partial)


def _dataset_of(folder: Path) -> str:
    """The path of the dataset that a folder of shards was made for; "" when it is none."""
    try:
        return str(json.loads((folder / _MARK).read_bytes())["dataset"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


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
