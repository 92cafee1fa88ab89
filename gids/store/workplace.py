"""Workplace: where a dataset is built before it is published, and what is done. Called by DatasetWriter.

NAME.partial/ holds `journal`, `dataset/` (which becomes NAME), `scratch/`, and `aside/`, whose files outlive
a kill as those of dataset/ do. Knows none of their contents.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gids.errors import StorageError
from gids.sizes import format_bytes
from gids.store.array_file import file_crc32c
from gids.store.journal import Journal
from gids.store.manifest import MANIFEST
from gids.store.publish import (
    check_replaceable,
    make_shard_folder,
    partial_path,
    publish,
    remove_shard_folder,
    shard_folder,
    sync_tree,
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Workplace:
    """An open workplace, locked against other processes.

    key: what the dataset is made from, JSON, or None when work is never to be resumed. stripe_dirs: where
    shards go instead of dataset/. Raises FileExistsError, FileNotFoundError, FormatError.

    Attributes: root (dataset/), scratch, aside (made by whoever needs it), folders (one for shards in each
    stripe directory), resumed, restart_reason (why work that was found is not continued, or "").
    """

    def __init__(
        self, path: Path, stripe_dirs: Sequence[Path], key: Mapping[str, Any] | None, *, overwrite: bool
    ) -> None:
        self.path = path
        self.partial = partial_path(path)
        self.root = self.partial / "dataset"
        self.scratch = self.partial / "scratch"
        self.aside = self.partial / "aside"
        self._check_places(stripe_dirs, overwrite)
        self._resumable = key is not None
        self.needed_bytes = 0  # of the whole dataset, when the caller knows
        self.folders: list[Path] = []
        try:
            self.partial.mkdir(exist_ok=True)
            self._journal = Journal(self.partial / "journal", key)
        except BlockingIOError:
            raise FileExistsError(f"another process is writing {self.partial}; wait for it") from None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            what = f"{os.strerror(error.errno)} to begin {self.path.name} ({_free([self.path.parent])})"
            with contextlib.suppress(OSError):  # it holds an earlier writer's work, or was never made
                self.partial.rmdir()
            cure = "nothing was written; make room on its disk, or choose another, at"
            raise StorageError(error.errno, f"{what}; {cure}", self.path) from error
        try:
            self._prepare(stripe_dirs, key)
        except OSError as error:
            explained = self.explain_full(error, self.path.name)
            self.close(discard=not self.has_progress)
            if explained is None:
                raise
            raise explained from error

    def _prepare(self, stripe_dirs: Sequence[Path], key: Mapping[str, Any] | None) -> None:
        """Continue the journal's work, or begin."""
        self.resumed = self._journal.resumed and self.root.is_dir() and not self._was_published()
        self.restart_reason = self._journal.difference
        if not self.resumed:
            for stale in self._journal.folders:
                remove_shard_folder(Path(stale))
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.rmtree(self.aside, ignore_errors=True)
            self._journal.restart(
                key, [str(shard_folder(d, self.path, self._journal.id)) for d in stripe_dirs]
            )
        self.folders = [Path(f) for f in self._journal.folders]
        self.root.mkdir(exist_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        for folder in self.folders:
            make_shard_folder(folder, self.path)

    def _check_places(self, stripe_dirs: Sequence[Path], overwrite: bool) -> None:
        for directory in stripe_dirs:
            if not directory.is_dir():
                raise FileNotFoundError(f"stripe directory {directory} does not exist")
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path.parent} does not exist; make it first")
        if self.path.exists():
            if not overwrite:
                raise FileExistsError(f"{self.path} exists; choose another name, or --overwrite it")
            check_replaceable(self.path)
        if self.partial.exists() and not (self.partial / "journal").exists() and any(self.partial.iterdir()):
            raise FileExistsError(f"{self.partial} is in the way and is not a conversion's; remove it")

    def _was_published(self) -> bool:
        # A kill between publishing and cleaning up leaves what was replaced, or nothing, in dataset/.
        recorded = self._journal.done.get("publish")
        manifest = self.root / MANIFEST
        return recorded is not None and not (manifest.is_file() and file_crc32c(manifest) == recorded)

    @property
    def has_progress(self) -> bool:
        """Whether a later writer with the same key would find work to continue."""
        return self._resumable and bool(self._journal.done or self._journal.pages)

    def pages_done(self, item: str) -> int:
        """How many pages of an unfinished item are on disk."""
        return self._journal.pages.get(item, 0)

    def record_pages(self, item: str, pages: int) -> None:
        """Remember that so many pages of an item are on disk."""
        if self._resumable:
            self._journal.record_pages(item, pages)

    def remember(self, item: str, value: Any) -> None:
        """Keep something about an unfinished item, as JSON; it is on disk when this returns."""
        if self._resumable:
            self._journal.record_done(f"about {item}", value)

    def recall(self, item: str) -> Any:
        """What was last remembered about an item, or None."""
        return self._journal.done.get(f"about {item}")

    def once(self, item: str, work: Callable[[], Any], on_skip: Callable[[], None]) -> Any:
        """Do one piece of work unless it is done already; what it returned, as JSON."""
        if item in self._journal.done:
            on_skip()
            return self._journal.done[item]
        with self._explaining(item):
            result = work()
            self._journal.record_done(item, result)
        return result

    def publish(self, manifest: bytes) -> None:
        """Write the manifest, sync everything and rename the dataset into place; close the workplace."""
        with self._explaining("the manifest"):
            with open(self.root / MANIFEST, "wb") as file:
                file.write(manifest)
                file.flush()
                os.fsync(file.fileno())
            for folder in self.folders:
                sync_tree(folder)
            self._journal.record_done("publish", file_crc32c(self.root / MANIFEST))
            publish(self.root, self.path)
        self._journal.close()
        shutil.rmtree(self.partial)

    def close(self, *, discard: bool) -> None:
        """Leave without publishing; discard: remove the work, else leave it to be resumed."""
        if discard:
            for folder in self.folders:
                remove_shard_folder(folder)
            shutil.rmtree(self.partial, ignore_errors=True)
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
        """An error that says what to do, for one that says that the disk is full; else None."""
        if error.errno not in _FULL or isinstance(error, StorageError):
            return None
        free = _free([self.path.parent, *(folder.parent for folder in self.folders)])
        if self.needed_bytes:
            free += f", {format_bytes(self.needed_bytes)} needed in all"
        cure = "nothing was published; make room and try again, at"
        if self.has_progress:
            cure = "make room and run the same command again, it resumes; or delete"
        what = f"{os.strerror(error.errno)} while writing {item} ({free}); {cure}"
        return StorageError(error.errno, what, self.partial if self.has_progress else self.path)


def _free(places: Sequence[Path]) -> str:
    """What the fullest of these directories' disks has left, for an error that says that one is full."""

    def bytes_free(place: Path) -> int:
        disk = os.statvfs(place)
        return disk.f_bavail * disk.f_frsize

    def lacks_inodes(place: Path) -> bool:
        disk = os.statvfs(place)
        return disk.f_files > 0 and disk.f_favail == 0

    place = min(places, key=lambda p: (not lacks_inodes(p), bytes_free(p)))
    where = f" on the disk of {place}" if len(places) > 1 else ""
    return f"{format_bytes(bytes_free(place))}{', no inodes' * lacks_inodes(place)} free{where}"
