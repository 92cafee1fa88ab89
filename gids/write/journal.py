"""Journal: records which parts of an unfinished dataset are on disk, so that a killed conversion resumes.

Called by Workplace. Each record is a line of JSON, appended and synced after its data; an incomplete last
line is ignored. The file is beside the new dataset, not in it. The holder of its lock is the only writer of
that dataset's name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gids.write.files import lock, sync_directory

_HEADER = "gids journal 3"


class Journal:
    """An open, locked journal. Makes its directory.

    Attributes: resumed (whether its work can be resumed with this key); difference (why not, or ""); id (8
    hex digits, kept when resuming); done (item -> its recorded result); saved (unfinished item -> what is on
    disk of it); folders (of shards outside the dataset); key (of the work that is recorded, or None);
    publication (recorded before publishing, with any key, or None). Raises BlockingIOError if another process
    holds it.
    """

    def __init__(self, path: Path, key: Mapping[str, Any] | None) -> None:
        self.id = secrets.token_hex(4)
        self.done: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.difference = ""
        self.folders: list[str] = []
        self.key: Any = None
        self.publication: dict[str, Any] | None = None
        self._file, self._folder = _locked(path), path.parent
        self.resumed = self._load(json.loads(json.dumps(key)))

    @property
    def is_empty(self) -> bool:
        """Whether it has no records."""
        return os.fstat(self._file.fileno()).st_size == 0

    def abandon(self) -> None:
        """Record that this work must not be resumed, before any of it is removed. Keeps the folders."""
        try:
            self.record(abandoned=True)
        except OSError:  # the disk is full
            self._file.truncate(0)
        self.resumed, self.publication = False, None

    def clear(self) -> None:
        """Remove all records."""
        self.done.clear()
        self.saved.clear()
        self.folders, self.difference = [], ""
        self.resumed, self.publication = False, None
        self._file.truncate(0)

    def restart(self, key: Mapping[str, Any] | None, folders: list[str]) -> None:
        """Remove all records and begin again with this key."""
        self.clear()
        self.folders = folders
        self.record(journal=_HEADER, id=self.id, key=key, folders=folders)

    def record(self, **fields: Any) -> None:
        """Append a record and sync it: (item, done), (item, saved) or publication, all JSON.

        Raises OSError, which leaves the journal unchanged.
        """
        data = json.dumps(fields).encode() + b"\n"
        size_bytes = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fdatasync(self._file.fileno())
        except OSError:
            self._file.truncate(size_bytes)
            raise
        self._take(fields)

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # in FUSE, what was removed is there until it is closed
            self._folder.rmdir()

    def _take(self, record: Mapping[str, Any]) -> None:
        self.publication = record.get("publication", self.publication)
        for name, results in (("done", self.done), ("saved", self.saved)):
            if name in record:
                results[record["item"]] = record[name]

    def _load(self, key: Any) -> bool:
        self._file.seek(0)
        records, length = [], 0
        for line in self._file.read().split(b"\n")[:-1]:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
            length += len(line) + 1
        self._file.truncate(length)  # the next record must not continue an incomplete line
        if not records:
            return False
        header, *others = records
        if not isinstance(header, dict) or header.get("journal") != _HEADER:
            self.difference = "it was begun by another version of gids"
            return False
        self.folders, self.key = header["folders"], header["key"]
        if any("abandoned" in record for record in others):
            return False
        is_same = key is not None and header["key"] == key
        for record in others:
            if is_same or "publication" in record:
                self._take(record)
        if is_same:
            self.id = header["id"]
        else:
            self.difference = _difference(header["key"], key)
        return is_same


def _locked(path: Path) -> io.FileIO:
    """Open or make the file and lock it. Raises BlockingIOError, OSError."""

    def open_file() -> int:
        while True:
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path.parent)
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # another process is removing the directory
                if not path.parent.parent.is_dir():
                    raise

    file = io.FileIO(lock(path, open_file, wait=False), "a+")
    sync_directory(path.parent)
    sync_directory(path.parent.parent)
    return file


def _difference(before: Any, now: Any) -> str:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return "it cannot be resumed"
    names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    return f"{', '.join(names)} changed"
