"""Workplace: the directory in which a dataset is built before it is published. Called by DatasetWriter.

NAME.partial/ contains `journal`; `dataset/`, which becomes NAME; `scratch/`, for temporary files; `aside/`,
for temporary files that are kept when a conversion resumes; and, while publishing, `replaced/`, the old
dataset. publish.py describes the steps.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gids.errors import FormatError, StorageError
from gids.sizes import format_bytes
from gids.store.files import Locator, faults
from gids.store.manifest import MANIFEST, Manifest, dump_manifest, entry_json
from gids.store.part import part_paths
from gids.write.files import sync_directory, sync_tree, write_synced
from gids.write.journal import Journal
from gids.write.publish import (
    already_exists,
    check_replaceable,
    clean_up,
    dataset_path,
    is_dataset,
    is_published,
    is_recorded,
    locked_directory,
    make_shard_folder,
    manifests_crc32c,
    partial_path,
    publication,
    put_in_place,
    remove_shard_folder,
    remove_tree,
    shard_folder,
    take_back,
)

_JOURNAL = "journal"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_workplace(folder: Path) -> bool:
    """Whether a dataset is built there, or was when that was interrupted."""
    return folder.suffix == ".partial" and (folder / _JOURNAL).is_file()


class Workplace:
    """An open workplace, locked against other processes.

    path: see dataset_path. key: JSON that describes the input, or None if the work must not be resumed.
    stripe_dirs: directories for shards, in place of dataset/. of_parts: dataset/ becomes a directory of
    parts. on_bytes(n): progress. Raises FileExistsError, FileNotFoundError, FormatError.

    Attributes: root (dataset/), scratch, aside (made when needed), folders (of shards, one per stripe
    directory), resumed, restart_reason (why existing work is not resumed, or "").
    """

    def __init__(
        self,
        path: Path,
        stripe_dirs: Sequence[Path],
        key: Mapping[str, Any] | None,
        *,
        overwrite: bool,
        of_parts: bool = False,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.path = path
        self._of_parts, self._on_bytes = of_parts, on_bytes
        self.partial = partial_path(path)
        self.root = self.partial / "dataset"
        self.scratch = self.partial / "scratch"
        self.aside = self.partial / "aside"
        self._overwrite, self._pid = overwrite, os.getpid()
        self._check_paths(stripe_dirs)
        self._resumable = self._is_published = False
        self.needed_bytes = 0  # of the whole dataset, if known
        self.folders: list[Path] = []
        try:
            with self._explaining(self.path.name):
                self._journal = _open_journal(self.partial, key)
        except StorageError:
            with contextlib.suppress(OSError):  # it has earlier work, or does not exist
                self.partial.rmdir()
            raise
        self._resumable = key is not None
        try:
            if _settle(self._journal, self.partial, self.path):
                self._journal.clear()
            self._check_name()
        except BaseException:
            if self._journal.is_empty and not self.root.exists():
                remove_tree(self.partial, last=_JOURNAL)
            self._journal.close()
            raise
        try:
            with self._explaining(self.path.name):
                self._prepare(stripe_dirs, key)
        except OSError:
            self.close(discard=not self.has_progress)
            raise

    def _prepare(self, stripe_dirs: Sequence[Path], key: Mapping[str, Any] | None) -> None:
        """Resume the work of the journal, or begin."""
        self.resumed = self._journal.resumed and self.root.is_dir()
        self.restart_reason = self._journal.difference
        if not self.resumed:
            if not self._journal.is_empty:
                self._journal.abandon()
            for stale in self._journal.folders:
                remove_shard_folder(Path(stale), self.path)
            for directory in (self.root, self.aside):
                if directory.exists():
                    shutil.rmtree(directory)
            folders = [str(shard_folder(d, self.path, self._journal.id)) for d in stripe_dirs]
            self._journal.restart(key, folders)
        self.folders = [Path(f) for f in self._journal.folders]
        self.root.mkdir(exist_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        for folder in self.folders:
            make_shard_folder(folder, self.path)

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
            for own in (self.path, self.partial):
                if directory.resolve().is_relative_to(own.resolve()):
                    raise ValueError(
                        f"stripe directory {directory} is inside {own}, which is replaced or removed: "
                        "choose a directory outside"
                    )
        if around := next(filter(is_dataset, self.path.parents), None):
            raise ValueError(
                f"{self.path} is inside the dataset {around}, and would be removed together with it: choose "
                "a path outside"
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path.parent} does not exist: make it first")
        try:
            # Listed at once: another writer makes the journal first, and removes it last.
            names = os.listdir(self.partial)
        except FileNotFoundError:
            self._check_name()
            return
        except NotADirectoryError:
            names = [self.partial.name]
        if names and _JOURNAL not in names:
            raise FileExistsError(
                f"{self.partial} exists and does not belong to a conversion: rename it, or choose another "
                f"name than {self.path.name}"
            )

    def _check_name(self) -> None:
        if os.path.lexists(self.path):
            if _mount_id(self.path) != _mount_id(self.path.parent):
                inside = f"give a name inside it, such as {self.path / 'data.gids'}"
                outside = "give another name, or mount the directory that it is in"
                raise FileExistsError(
                    f"{self.path} is a mount point, which cannot be replaced: "
                    f"{outside if is_dataset(self.path) else inside}"
                )
            if not self._overwrite:
                raise already_exists(self.path)
            check_replaceable(self.path, of_parts=self._of_parts)

    @property
    def has_progress(self) -> bool:
        """Whether a later writer with the same key would find work to resume."""
        return self._resumable and bool(self._journal.done or self._journal.saved)

    def save(self, item: str, value: Any) -> None:
        """Record, durably, how much of an unfinished item is on disk. value: JSON."""
        if self._resumable:
            self._journal.record(item=item, saved=value)

    def saved(self, item: str, files: Mapping[Path, int]) -> Any:
        """The last value saved for an item; None: it begins again. files: with sizes, which it must have."""
        is_whole = all(path.is_file() and path.stat().st_size == size for path, size in files.items())
        return self._journal.saved.get(item) if is_whole else None

    def is_done(self, item: str) -> bool:
        """Whether an item is done, by an earlier writer perhaps."""
        return item in self._journal.done

    def once(
        self, item: str, size_bytes: int, work: Callable[[], Any], folders: Iterable[Path] | None = None
    ) -> Any:
        """Call `work`, unless this item is done already. Returns its result, as entry_json makes it.

        item: its name, in which types and tables are encoded as in paths. size_bytes: progress, if it is
        done. folders: those below root in which it makes files; None: any.
        """
        if self._journal.is_closed:
            raise ValueError(f"the writer of {self.path.name} is closed: make a new one")
        if self.is_done(item):
            self._on_bytes(size_bytes)
            return self._journal.done[item]
        with self._explaining(unquote(item)):
            result = entry_json(work())
            if self._resumable:
                self._sync_names(folders)
            self._journal.record(item=item, done=result)
        return result

    def _sync_names(self, folders: Iterable[Path] | None = None) -> None:
        """Make the names of files in these folders durable, and theirs; None: all names."""
        if folders is None:
            for folder in (self.root, *self.folders):
                sync_tree(folder)
            return
        changed = {folder for folder in folders if folder.is_dir()}
        for folder in list(changed):
            changed.update(p for p in folder.parents if p.is_relative_to(self.root))
        for folder in sorted(changed):
            sync_directory(folder)

    def publish(
        self,
        manifests: Mapping[str, Manifest],
        *,
        is_locked: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the manifests, sync everything, rename the dataset to its path, and close the workplace.

        manifests: of the dataset (folder ""), or of each part, by its folder. Waits for other writers of the
        dataset that is replaced, unless the caller has locked it. check: called last, when no writer can
        change that dataset any more. Raises its errors, FormatError if a file does not match its manifest,
        FileExistsError if something else has the name by now, StorageError.
        """
        with self._explaining("the manifest"):
            if self._journal.publication is not None:  # of a killed writer; its manifest is written again
                self._journal.record(publication=None)
            for folder, manifest in manifests.items():
                write_synced(self.root / folder / MANIFEST, dump_manifest(manifest))
                for fault in faults(manifest, Locator(self.root / folder, self.folders)):
                    raise FormatError(fault)
            self._sync_names()
            sync_directory(self.partial)
            replaces = self._overwrite and self.path.is_dir()
            with contextlib.ExitStack() as locks:
                for root in (self.path, *part_paths(self.path)) if replaces and not is_locked else ():
                    locks.enter_context(locked_directory(root))
                check()
                record = publication(self.partial, self.path, self.folders)
                self._journal.record(publication=record)
                put_in_place(self.partial, self.path, replace=replaces, of_parts=self._of_parts)
        self._is_published = True
        try:
            clean_up(self.partial, self.path, record)
            remove_tree(self.partial, last=_JOURNAL)
        except OSError as error:
            what = f"the dataset is published, but {error.strerror} while removing the old files"
            what += f"; the next command that writes {self.path.name} removes what is left in"
            raise StorageError(error.errno or 0, what, self.partial) from error
        finally:
            self._journal.close()

    @property
    def in_own_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def close(self, *, discard: bool) -> None:
        """Close without publishing. discard: remove the work; else it can be resumed. A forked child removes
        nothing."""
        if not self._is_published and self.in_own_process and not self._journal.is_closed:
            with contextlib.suppress(OSError):
                _settle(self._journal, self.partial, self.path)  # Ctrl-C may have interrupted step 4
                if discard:
                    self._journal.abandon()
                    for folder in self.folders:
                        remove_shard_folder(folder, self.path)
                    remove_tree(self.partial, last=_JOURNAL)
        self._journal.close()

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


def finish_published(path: Path, key: Mapping[str, Any], *, but: Collection[str] = ()) -> bool:
    """Clean up after a writer that was killed after it had published; undo it if it was killed while it did.

    but: names in the key that do not matter, because publishing changed their values.

    Returns whether it had an equal key and its dataset is still at `path`. Raises FileExistsError while
    another process writes there, OSError.
    """
    partial = partial_path(path)
    if not (partial / _JOURNAL).is_file():
        with contextlib.suppress(OSError):  # it does not exist, or is not empty
            partial.rmdir()
        return False
    try:
        opened = _open_journal(partial, key)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return False  # the next writer reports that the disk is full
    with contextlib.closing(opened) as journal:
        record = journal.publication
        if not _settle(journal, partial, path) or record is None:
            return False
        keys = (journal.key or {}, json.loads(json.dumps(key)))
        before, now = ({n: v for n, v in k.items() if n not in but} for k in keys)
        is_equal = journal.resumed or before == now
        remove_tree(partial, last=_JOURNAL)
    return is_equal and bool(manifests_crc32c(path) == record["manifest"])


def restore(path: str | os.PathLike[str]) -> None:
    """Rename a dataset back that a killed writer had moved away to replace it, if nothing is at `path`.

    Raises FileExistsError while another process writes there, OSError.
    """
    if not os.path.lexists(path):
        finish_published(dataset_path(path), {})


def _settle(journal: Journal, partial: Path, path: Path) -> bool:
    """Finish the publication of a killed writer and return True, or undo it."""
    record = journal.publication
    if record is not None and is_published(partial, path, record):
        clean_up(partial, path, record)
        return True
    take_back(partial, path)
    if record is not None and not is_recorded(partial / "dataset", record):
        journal.abandon()
    return False


def _open_journal(partial: Path, key: Mapping[str, Any] | None) -> Journal:
    try:
        return Journal(partial / _JOURNAL, key)
    except BlockingIOError:
        raise FileExistsError(
            f"another writer, of this or another process, is writing {partial.with_suffix('')}: wait for it, "
            "or choose another name"
        ) from None


def _free(directories: Sequence[Path]) -> str:
    """The free space on the fullest of the disks of these directories, as text."""
    disks = [(directory, os.statvfs(directory)) for directory in directories]
    free = [(d.f_files == 0 or d.f_favail > 0, d.f_bavail * d.f_frsize, path) for path, d in disks]
    has_inodes, free_bytes, fullest = min(free, key=lambda disk: disk[:2])
    where = f" on the disk of {fullest}" if len(directories) > 1 else ""
    return f"{format_bytes(free_bytes)}{', no inodes' * (not has_inodes)} free{where}"


def _mount_id(path: Path) -> str:
    """Of the mount that a path is in. os.path.ismount() takes subvolumes of Btrfs for mounts."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return Path(f"/proc/self/fdinfo/{fd}").read_text().partition("mnt_id:")[2].split()[0]
    finally:
        os.close(fd)
