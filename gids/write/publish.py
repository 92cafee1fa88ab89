"""Publishes a finished dataset, or a changed manifest, in one step, and removes files that no dataset uses.

Called by Workplace, and by the writers of heat and tables. New files are synced before a manifest names them,
and old ones are removed after that.

After a kill or a loss of power at any moment, NAME is the old dataset or
the new one, and the next writer of NAME finishes the rest. The steps are:

1. The journal lists the folders of shards outside the dataset before they are made.
2. All files of the new dataset and their directories are synced.
3. The journal records "publication": the new manifest (its checksum, and the inode and time of its file), and
   the shard folders of the old dataset, with those that were made for the new one and have no shard.
4. NAME and NAME.partial/dataset are exchanged; both parent directories are synced. (If the system cannot
   exchange, NAME becomes NAME.partial/replaced, then NAME.partial/dataset becomes NAME.)
5. The old dataset becomes NAME.partial/replaced. These shard folders are removed, then itself, then the rest
   of NAME.partial, with the journal last.

If the journal has a publication whose manifest is not in NAME.partial/dataset, or whose file is in NAME, step
4 is done and step 5 is left. (Both have that manifest if a damaged dataset is converted again.) If neither
has the file, as in a copy, nothing tells which one is new: it is made again. Before a shard folder is
removed, all manifests that may use it are read (remove_shard_folder).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gids.errors import FormatError, StorageError
from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST, Manifest, dump_manifest
from gids.store.part import part_paths
from gids.store.rows import file_crc32c
from gids.write.files import lock, sync_directory, write_synced

_MARK = "gids-shards.json"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def dataset_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a dataset, with symbolic links resolved."""
    absolute = Path(os.path.abspath(path))
    return absolute.resolve() if absolute.is_symlink() else absolute


def partial_path(path: str | os.PathLike[str]) -> Path:
    """The directory of an unfinished conversion to `path`."""
    dataset = dataset_path(path)
    return dataset.with_name(f"{dataset.name}.partial")


def stripe_directories(stripe: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The directories for shards. Raises TypeError for one path, of which each character is a directory."""
    if isinstance(stripe, str | os.PathLike):
        raise TypeError(f"stripe must be a list of directories: give [{os.fspath(stripe)!r}]")
    return [Path(directory) for directory in stripe]


def shard_folder(directory: str | os.PathLike[str], dataset: Path, id_: str) -> Path:
    """The folder of a dataset's shards in a stripe directory."""
    return Path(directory).resolve() / f"{dataset.name}.shards-{id_}"


def make_shard_folder(folder: Path, dataset: Path) -> None:
    """Make a folder for shards, durably, with a mark that names its dataset."""
    folder.mkdir(exist_ok=True)
    mark = {"format": "gids shards", "dataset": str(dataset)}
    write_synced(folder / _MARK, json.dumps(mark).encode() + b"\n")
    sync_directory(folder)
    sync_directory(folder.parent)


def is_shard_folder(folder: Path) -> bool:
    """Whether make_shard_folder made it."""
    return ".shards-" in folder.name and (folder / _MARK).is_file()


def remove_shard_folder(folder: Path, dataset: Path) -> None:
    """Remove a folder made by make_shard_folder, unless a dataset uses it.

    Reads the manifests of `dataset` and of the dataset in the folder's mark; if one cannot be read, keeps the
    folder. Ignores folders that have no shards.
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
    sync_directory(folder.parent)  # before it is removed from any list


def shard_folders_of(path: Path) -> set[Path] | None:
    """The shard folders outside the dataset, or the parts, at `path`; None if a manifest cannot be read."""
    folders: set[Path] = set()
    for root in part_paths(path) or [path]:
        try:
            manifest = read_manifest(root)
        except FileNotFoundError:
            continue
        except FormatError:
            if (root / MANIFEST).exists():
                return None
            continue
        except OSError:
            return None
        shards = [Path(s) for table in manifest.tables for s in table.shards]
        folders |= {s.parent.parent.resolve() for s in shards if s.is_absolute()}
    return folders


def remove_tree(root: Path, *, last: str) -> None:
    """Remove a directory; the file `last` is removed after all others."""
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
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # another writer uses it
            raise


def already_exists(path: Path) -> FileExistsError:
    """The error for a path that is not to be replaced."""
    cure = "choose another name, or replace it (--overwrite; in Python overwrite=True)"
    return FileExistsError(f"{path} already exists: {cure}")


def is_dataset(path: Path) -> bool:
    """Whether a directory has the manifest of a gids dataset."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return False
    with open(manifest, "rb") as file:
        return b'"format": "gids"' in file.read(200)


def check_replaceable(path: Path, *, of_parts: bool = False) -> None:
    """Raise FormatError unless `path` is a dataset (of_parts: a directory of parts alone) or an empty
    directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    parts = part_paths(path)
    if not (parts and all(map(is_dataset, parts)) if of_parts else is_dataset(path)):
        what = "a directory of parts" if of_parts else "a gids dataset"
        raise FormatError(f"{path} exists and is not {what}, so it is not replaced: choose another name")
    if of_parts and (others := {*path.iterdir()} - {*parts}):
        raise FormatError(f"{min(others)} is not a part, and would be removed: move it to another path")


def manifests_crc32c(path: Path) -> int | None:
    """The CRC32C of a dataset's manifest, or of those of all parts in a directory; None: there is none."""
    files = [root / MANIFEST for root in part_paths(path) or [path]]
    if not all(file.is_file() for file in files):
        return None
    crc = 0
    for file in files:
        crc = file_crc32c(file, crc=crc)
    return crc


def publication(partial: Path, path: Path, folders: Iterable[Path] = ()) -> dict[str, Any]:
    """Step 3: the record of NAME.partial/dataset for the journal. folders: for shards, made for it."""
    new_path = partial / "dataset"
    old, new = (shard_folders_of(dataset) or set() for dataset in (path, new_path))
    unused = old | set(folders) - new
    return {
        "manifest": manifests_crc32c(new_path),
        "file": _manifest_file(new_path),
        "replaces": sorted(map(str, unused)),
    }


def put_in_place(partial: Path, path: Path, *, replace: bool, of_parts: bool = False) -> None:
    """Step 4. The caller is the only writer of the dataset at `path`. replace: there is a dataset to replace.
    of_parts: see check_replaceable.

    Raises FileExistsError if `path` is something else, StorageError if it cannot be renamed, OSError; then
    nothing has changed.
    """
    new = partial / "dataset"
    if replace:
        try:
            check_replaceable(path, of_parts=of_parts)
        except FormatError as error:  # made by another process; the work must not be discarded
            raise FileExistsError(str(error)) from None
        try:
            if not _exchange(new, path):
                aside = partial / "replaced"
                os.rename(path, aside)
                try:
                    os.rename(new, path)
                except OSError:
                    os.rename(aside, path)
                    raise
        except OSError as error:
            raise _explained(error, path) from error
    else:
        try:
            os.rename(new, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise already_exists(path) from None
    sync_directory(path.parent)
    sync_directory(partial)


def is_published(partial: Path, path: Path, record: Mapping[str, Any]) -> bool:
    """Whether step 4 is done for this record."""
    return bool(manifests_crc32c(partial / "dataset") != record["manifest"]) or is_recorded(path, record)


def is_recorded(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether the dataset at `path` is that of the record, and neither an equal one nor a copy."""
    return bool(_manifest_file(path) == record.get("file", []))  # earlier versions recorded none


def _manifest_file(path: Path) -> list[int] | None:
    """The inode and time of a dataset's manifest, or of that of the first part; None: there is none."""
    file = (part_paths(path) or [path])[0] / MANIFEST
    return [file.stat().st_ino, file.stat().st_mtime_ns] if file.is_file() else None


def clean_up(partial: Path, path: Path, record: Mapping[str, Any]) -> None:
    """Step 5 for the replaced dataset. May be repeated. Raises OSError."""
    new, replaced = partial / "dataset", partial / "replaced"
    if new.exists():
        os.rename(new, replaced)
    for folder in record["replaces"]:
        remove_shard_folder(Path(folder), path)
    if replaced.exists():
        shutil.rmtree(replaced)


def take_back(partial: Path, path: Path) -> None:
    """Rename a dataset back that an interrupted step 4 had moved away.

    Raises FileExistsError if `path` exists.
    """
    replaced = partial / "replaced"
    if not replaced.exists():
        return
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists, so the dataset that had this name and is now {replaced} cannot be restored: "
            "move one of them to another path"
        )
    os.rename(replaced, path)
    sync_directory(path.parent)
    sync_directory(partial)


def _dataset_of(folder: Path) -> str:
    """The path of the dataset that a shard folder was made for, or ""."""
    try:
        return str(json.loads((folder / _MARK).read_bytes())["dataset"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _explained(error: OSError, path: Path) -> OSError:
    """An error of renaming what is at `path`, with what to do."""
    if error.errno == errno.EXDEV:
        name, copy = shlex.quote(str(path)), shlex.quote(f"{path}.copy")
        what = (
            "a directory in a lower layer of an overlay file system, such as a container's image, cannot be "
            f"replaced; copy it to the upper layer (mv {name} {copy} && mv {copy} {name}), then run the same "
            "command again"
        )
    elif error.errno == errno.EBUSY:
        what = "a mount point cannot be replaced; give another name, or mount the directory that it is in"
    else:
        return error
    return StorageError(error.errno, what, path)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two paths atomically. Returns False if the system cannot."""
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


# Changing an existing dataset: a reader sees the old manifest or the new one


@contextlib.contextmanager
def changing(root: Path, what: str) -> Iterator[Manifest]:
    """Lock the dataset against other writers, and yield its manifest. The end of the process also unlocks it.

    what: what fails if there is an OSError, see unchanged_on_error.
    """
    with unchanged_on_error(root, what):
        read_manifest(root)  # its errors are clearer than open()'s
        with locked_directory(root):
            yield read_manifest(root)


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Lock the directory at `path`, waiting for other holders. Raises OSError."""
    fd = lock(path, lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    try:
        yield
    finally:
        os.close(fd)


def replace_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the manifest, durably. The caller is in changing(). Raises OSError, FormatError."""
    new, data = root / f"{MANIFEST}.new", dump_manifest(manifest)
    write_synced(new, data)
    sync_directory(root)  # the names of new directories beside it
    os.rename(new, root / MANIFEST)
    sync_directory(root)


@contextlib.contextmanager
def unchanged_on_error(root: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a StorageError which says that `what` failed and the dataset is unchanged."""
    try:
        yield
    except (StorageError, FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        message = f"{what} failed ({error.strerror}); the dataset is unchanged"
        raise StorageError(error.errno or 0, message, root) from error
