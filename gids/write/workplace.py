"""Workplace: the directory in which a dataset is built, until one rename makes it the dataset.

Called by DatasetWriter and partition(). NAME.partial/ contains

    lock           made first and removed last; its holder (flock) is the only writer of NAME
    progress.json  the key of the command, the folders of shards outside, and what is finished
    dataset/       becomes NAME
    replaced/      the dataset that had the name
    scratch/       temporary files

An item is finished when its files and their names are on disk and progress.json lists it. A command with the
same key keeps finished items; otherwise everything starts again. Publishing writes the manifest, syncs all
files and directories, renames dataset/ to NAME and syncs the parent. So after a kill or a loss of power at
any moment, NAME is the whole dataset or does not exist.

With overwrite, the dataset at NAME moves to replaced/ just before, and is removed with the workplace. A kill
between the two renames leaves nothing at NAME; the next writer first moves the old dataset back.

While dataset/ exists, the folders in progress.json belong to unfinished work, and are removed with it. If it
does not exist, the work was published: then they belong to the dataset, wherever it is by now, and stay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gids.errors import FormatError, StorageError
from gids.sizes import format_bytes
from gids.store.files import Locator, faults
from gids.store.manifest import MANIFEST, Manifest, dump_manifest, entry_json
from gids.write.files import lock, replace_file, sync_directory, sync_tree, write_synced

_LOCK, _PROGRESS = "lock", "progress.json"
_VERSION = "gids progress 1"
_NAMES = {MANIFEST, "graph", "nodes", "tables"}  # in a dataset's directory
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def dataset_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a dataset."""
    return Path(os.path.abspath(path))


def partial_path(path: str | os.PathLike[str]) -> Path:
    """The directory of an unfinished conversion to `path`."""
    dataset = dataset_path(path)
    return dataset.with_name(f"{dataset.name}.partial")


def is_workplace(folder: Path) -> bool:
    """Whether a dataset is built there, or was when that was interrupted."""
    return folder.suffix == ".partial" and (folder / _LOCK).is_file()


def is_dataset(path: Path) -> bool:
    """Whether a directory has the manifest of a gids dataset."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return False
    with open(manifest, "rb") as file:
        return b'"format": "gids"' in file.read(200)


def is_shard_folder(folder: Path) -> bool:
    """Whether a folder has a name that a workplace gives to folders of shards."""
    return re.fullmatch(r".+\.shards-[0-9a-f]{8}", folder.name) is not None


def already_exists(path: Path, *, overwrite: bool = False) -> FileExistsError:
    """The error for a dataset whose path is taken. overwrite: by something else than a dataset."""
    if overwrite:
        return FileExistsError(
            f"{path} is a link, is no gids dataset or contains other files, and is not replaced: move it "
            "away, or choose another name"
        )
    return FileExistsError(
        f"{path} already exists, and a dataset never changes: choose another name, or remove it first"
    )


class Workplace:
    """An open workplace, locked against other processes.

    path: the dataset to make. key: JSON that describes the command and its sources; None: the work is never
    resumed. stripe_dirs: directories for shards, in place of dataset/. overwrite: replace a dataset that is
    at the path. on_bytes(n): progress. Raises FileExistsError if the path is taken or another writer has it,
    FileNotFoundError, ValueError.

    Attributes: root (dataset/), scratch, folders (of shards, one per stripe directory), resumed,
    restart_reason (why existing work is not resumed, or "").
    """

    def __init__(
        self,
        path: Path,
        stripe_dirs: Sequence[Path],
        key: Mapping[str, Any] | None,
        *,
        overwrite: bool = False,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.path, self.partial = path, partial_path(path)
        self.root, self.scratch = self.partial / "dataset", self.partial / "scratch"
        self._overwrite, self._replaced = overwrite, self.partial / "replaced"
        self._key, self._on_bytes, self._pid = json.loads(json.dumps(key)), on_bytes, os.getpid()
        self.needed_bytes = 0  # of the whole dataset, if known
        self.folders: list[Path] = []
        self._done: dict[str, Any] = {}
        self.resumed, self.restart_reason = False, ""
        self._check_paths(stripe_dirs)
        self._fd: int | None = None
        try:
            with self._explaining(self.path.name):
                self._fd = self._locked()
        except StorageError:
            with contextlib.suppress(OSError):  # it has earlier work, or does not exist
                self.partial.rmdir()
            raise
        self._put_back()
        if self._is_taken():
            if not self.root.exists():  # a writer was killed after it had published
                self._remove()
            self._unlock()
            raise already_exists(self.path, overwrite=self._overwrite)
        try:
            with self._explaining(self.path.name):
                self._prepare(stripe_dirs)
        except OSError:
            self.close(discard=not self.has_progress)
            raise

    def _check_paths(self, stripe_dirs: Sequence[Path]) -> None:
        """Raise errors before any file is made."""
        for directory in stripe_dirs:
            if not directory.is_dir():
                raise FileNotFoundError(f"stripe directory {directory} does not exist")
            try:
                str(directory.resolve()).encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"stripe directory {directory} has a name that is not UTF-8, which a manifest cannot "
                    "have: choose another directory"
                ) from None
            if directory.resolve().is_relative_to(self.partial.resolve()):
                raise ValueError(
                    f"stripe directory {directory} is inside {self.partial}, which is removed: choose a "
                    "directory outside"
                )
        if around := next(filter(is_dataset, self.path.parents), None):
            raise ValueError(
                f"{self.path} is inside the dataset {around}, which never changes: choose a path outside"
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path.parent} does not exist: make it first")
        try:
            # Listed at once: another writer makes the lock first, and removes it last.
            names = os.listdir(self.partial)
        except FileNotFoundError:
            if self._is_taken():
                raise already_exists(self.path, overwrite=self._overwrite) from None
            names = []
        except NotADirectoryError:
            names = [self.partial.name]
        own = {
            _LOCK,
            _PROGRESS,
            f"{_PROGRESS}.new",
            *(p.name for p in (self.root, self._replaced, self.scratch)),
        }
        if self.partial.is_symlink() or (names and (_LOCK not in names or set(names) - own)):
            raise FileExistsError(
                f"{self.partial} exists and does not belong to a conversion: rename it, or choose another "
                f"name than {self.path.name}"
            )

    def _put_back(self) -> None:
        """Move the dataset that was to be replaced back, if the new one has not got its name."""
        if self._replaced.exists() and not os.path.lexists(self.path):
            os.rename(self._replaced, self.path)
            sync_directory(self.path.parent)

    def _is_taken(self) -> bool:
        """Whether something is at the path that this writer may not replace."""
        is_ours = not self.path.is_symlink() and is_dataset(self.path)
        is_replaced = self._overwrite and is_ours and _NAMES.issuperset(os.listdir(self.path))
        return os.path.lexists(self.path) and not is_replaced

    def _locked(self) -> int:
        """A descriptor of the lock, which is made if necessary. Raises FileExistsError, OSError."""

        def open_file() -> int:
            while True:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.partial)
                with contextlib.suppress(FileNotFoundError):  # another process is removing the directory
                    return os.open(self.partial / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

        try:
            fd = lock(self.partial / _LOCK, open_file, wait=False)
        except BlockingIOError:
            raise FileExistsError(
                f"another writer, of this or another process, is writing {self.path}: wait for it, or choose "
                "another name"
            ) from None
        sync_directory(self.partial)
        sync_directory(self.partial.parent)
        return fd

    def _prepare(self, stripe_dirs: Sequence[Path]) -> None:
        """Resume the work that is there, or begin."""
        before = self._load()
        is_there = self.root.is_dir()
        self.folders = [Path(f) for f in before.get("folders", ())]
        self.resumed = is_there and self._key is not None and before.get("key") == self._key
        if self.resumed:
            self._done = before["done"]
        else:
            if is_there and before.get("done"):
                self.restart_reason = _difference(before["key"], self._key)
            self._forget()
            self.folders = [
                directory.resolve() / f"{self.path.name}.shards-{secrets.token_hex(4)}"
                for directory in stripe_dirs
            ]
            self._save(self._key)
            self.root.mkdir()
            sync_directory(self.partial)  # it exists before the folders do
            for folder in self.folders:
                folder.mkdir()
                sync_directory(folder.parent)
        for folder in (self.scratch, self._replaced):
            shutil.rmtree(folder, ignore_errors=True)
        self.scratch.mkdir()

    def _load(self) -> dict[str, Any]:
        """The content of progress.json; empty if there is none of this version."""
        try:
            progress = json.loads((self.partial / _PROGRESS).read_bytes())
            return progress if progress["version"] == _VERSION else {}
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return {}

    def _save(self, key: Any) -> None:
        folders = list(map(str, self.folders))
        progress = {"version": _VERSION, "key": key, "folders": folders, "done": self._done}
        replace_file(self.partial / _PROGRESS, json.dumps(progress).encode())

    def _forget(self) -> None:
        """Remove unfinished work, so that a kill in between leaves nothing that is taken for finished."""
        self._done = {}
        if not self.root.exists():  # it was published: the folders are the dataset's
            return
        with contextlib.suppress(OSError):  # the disk is full
            self._save(None)
        for folder in filter(is_shard_folder, self.folders):
            if folder.is_dir():
                shutil.rmtree(folder)
                sync_directory(folder.parent)
        shutil.rmtree(self.root)

    def _remove(self) -> None:
        """Remove NAME.partial, the lock last."""
        self._put_back()
        (self.partial / _PROGRESS).unlink(missing_ok=True)
        for entry in list(os.scandir(self.partial)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != _LOCK:
                os.unlink(entry.path)
        sync_directory(self.partial)
        (self.partial / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another writer uses it
            self.partial.rmdir()

    def _unlock(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            with contextlib.suppress(OSError):  # in FUSE, what was removed is there until it is closed
                self.partial.rmdir()

    @property
    def has_progress(self) -> bool:
        """Whether a later writer with the same key would find work to resume."""
        return self._key is not None and bool(self._done)

    def once(self, item: str, size_bytes: int, work: Callable[[], Any]) -> Any:
        """Call `work`, unless this item is finished already. Returns its result, as entry_json makes it.

        item: its name, in which types and tables are encoded as in paths. size_bytes: progress, if it is
        finished. `work` syncs the data of the files that it writes.
        """
        if self._fd is None:
            raise ValueError(f"the writer of {self.path.name} is closed: make a new one")
        if item in self._done:
            self._on_bytes(size_bytes)
            return self._done[item]
        with self._explaining(unquote(item)):
            result = entry_json(work())
            if self._key is not None:
                self._sync_names()
                self._done[item] = result
                self._save(self._key)
        return result

    def _sync_names(self) -> None:
        for folder in (self.root, *self.folders):
            sync_tree(folder)

    def publish(self, manifests: Mapping[str, Manifest], *, check: Callable[[], None] = lambda: None) -> None:
        """Write the manifests, sync everything, rename the dataset to its path, and close the workplace.

        manifests: of the dataset (folder ""), or of each part, by its folder. check: called last. Raises its
        errors, FormatError if a file does not match its manifest, FileExistsError if something has the name
        by now, StorageError.
        """
        with self._explaining("the manifest"):
            for folder, manifest in manifests.items():
                write_synced(self.root / folder / MANIFEST, dump_manifest(manifest))
                for fault in faults(manifest, Locator(self.root / folder, self.folders)):
                    raise FormatError(fault)
            self._sync_names()
            shutil.rmtree(self.scratch)
            sync_directory(self.partial)
            check()
            if self._is_taken():
                raise already_exists(self.path, overwrite=self._overwrite)
            if self._overwrite and self.path.exists():
                os.rename(self.path, self._replaced)
                sync_directory(self.partial)
            os.rename(self.root, self.path)
            sync_directory(self.path.parent)
            sync_directory(self.partial)
        with contextlib.suppress(OSError):  # the next writer removes what is left
            self._remove()
        self._unlock()

    @property
    def in_own_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def close(self, *, discard: bool) -> None:
        """Close without publishing. discard: remove the work; else it can be resumed. A forked child removes
        nothing."""
        if discard and self.in_own_process and self._fd is not None:
            with contextlib.suppress(OSError):
                self._forget()
                self._remove()
        self._unlock()

    @contextlib.contextmanager
    def _explaining(self, item: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            explained = self.explain_full(error, item)
            if explained is None:
                raise
            raise explained from error

    def explain_full(self, error: OSError, item: str) -> StorageError | None:
        """A StorageError with advice if the error means that the disk is full, else None."""
        if error.errno not in _FULL or isinstance(error, StorageError):
            return None
        disks = [self.path.parent, *(folder.parent for folder in self.folders)]
        # What a quota leaves is not known.
        figures = [] if error.errno == errno.EDQUOT else [_free(disks)]
        if self.needed_bytes:
            figures.append(f"{format_bytes(self.needed_bytes)} needed in total")
        room = f" ({', '.join(figures)})" if figures else ""
        cure = "nothing was published; free space and try again, at"
        if self.has_progress:
            cure = "free space and run the same command again to resume, or delete"
        what = f"{os.strerror(error.errno)} while writing {item}{room}; {cure}"
        return StorageError(error.errno, what, self.partial if self.has_progress else self.path)


def _difference(before: Any, now: Any) -> str:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return "it cannot be resumed"
    names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    return f"{', '.join(names)} changed"


def _free(directories: Sequence[Path]) -> str:
    """The free space on the fullest of the disks of these directories, as text."""
    disks = [(directory, os.statvfs(directory)) for directory in directories]
    free = [(d.f_files == 0 or d.f_favail > 0, d.f_bavail * d.f_frsize, path) for path, d in disks]
    has_inodes, free_bytes, fullest = min(free, key=lambda disk: disk[:2])
    where = f" on the disk of {fullest}" if len(directories) > 1 else ""
    return f"{format_bytes(free_bytes)}{', no inodes' * (not has_inodes)} free{where}"
