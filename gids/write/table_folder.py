"""The folder of a table that is being written: where its files go, and what killed writers left. Called by
TableWriter.

A new table has a folder of a name of its own, `tables/TABLE.XXXXXXXX` (and one of that name in every place
for shards elsewhere), which no manifest names until it is published. Its writer holds it by a lock (`flock`);
one that nobody holds and no manifest names is what a killed writer left, and goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from gids.errors import FormatError
from gids.store.files import Locator, read_manifest
from gids.store.manifest import Manifest, TableEntry
from gids.write.sync import sync_directory

_TABLES = "tables"
_OURS = re.compile(r"[\w-]+\.(bin|npy)")


class TableFolder:
    """A new folder, locked until close(). Made while the caller is the dataset's only writer.

    stem: what its name begins with. Shards are laid out as those of the dataset's first table: as many, in
    the dataset or in the same places outside it. Removes what killed writers left. Raises FormatError for a
    place that may not be used, OSError.

    Attributes: shards (paths as a manifest has them), checksums (the same), directories (of all the files).
    """

    def __init__(self, root: Path, manifest: Manifest, locate: Locator, stem: str) -> None:
        like = manifest.tables[0].shards if manifest.tables else ()
        for shard in like:
            locate.shard(shard)
        outside = [Path(s).parent.parent for s in like if os.path.isabs(s)]
        _remove_leftovers(root, manifest, outside)
        self._root = root
        self.name = f"{stem}.{secrets.token_hex(4)}"
        main = root / _TABLES / self.name
        main.mkdir(parents=True)
        for parent in (main.parent, root):  # the others are looked for where it is
            sync_directory(parent)
        self._fd = os.open(main, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.directories = [main, *dict.fromkeys(place / self.name for place in outside)]
        self.checksums = f"{_TABLES}/{self.name}/checksum.bin"
        places = [str(p / self.name) for p in outside] or [f"{_TABLES}/{self.name}"] * max(1, len(like))
        self.shards = tuple(f"{place}/shard-{i:02d}.bin" for i, place in enumerate(places))

    @property
    def is_in_place(self) -> bool:
        """Whether it is still the dataset's: not when the whole dataset was replaced meanwhile."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.directories[0]))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove the files, unless the manifest names them."""
        with contextlib.suppress(FormatError, OSError):  # no dataset is there any more
            if self.name in _named(read_manifest(self._root)):
                return
        _remove_folders(*self.directories)

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._fd)


def remove_replaced(entry: TableEntry, locate: Locator, manifest: Manifest) -> None:
    """Remove the files of a table that this manifest no longer names; what cannot be removed stays."""
    with contextlib.suppress(FormatError, OSError):
        main = locate.array(entry.checksums).parent
        outside = {locate.shard(shard).parent for shard in entry.shards} - {main}
        if not {folder.name for folder in (main, *outside)} & _named(manifest):
            _remove_folders(main, *sorted(outside))


def _named(manifest: Manifest) -> set[str]:
    """Names of the folders that a manifest's tables have."""
    return {Path(p).parent.name for t in manifest.tables for p in (t.checksums.path, *t.shards)}


def _remove_leftovers(root: Path, manifest: Manifest, outside: Sequence[Path]) -> None:
    if not (root / _TABLES).is_dir():
        return
    named = _named(manifest)
    for folder in sorted((root / _TABLES).iterdir()):
        if folder.name in named or folder.is_symlink() or not folder.is_dir():
            continue
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_folders(folder, *(place / folder.name for place in outside))
        except BlockingIOError:
            pass  # somebody writes it
        finally:
            os.close(fd)


def _remove_folders(main: Path, *outside: Path) -> None:
    """Remove the folders of a table, that in the dataset last: it is where the others are looked for."""
    for folder in outside:
        _remove_folder(folder)
        with contextlib.suppress(OSError):
            sync_directory(folder.parent)
    _remove_folder(main)


def _remove_folder(folder: Path) -> None:
    """Remove a table's files, and the folder when nothing else is in it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        folder.rmdir()
