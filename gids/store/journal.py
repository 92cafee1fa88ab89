"""Journal: what an unfinished dataset has safely on disk, so that a killed conversion resumes.

Called by DatasetWriter. One line of JSON per record, appended and synced after the data it speaks of; a torn
last line is ignored. It lies beside the dataset that is being built, never in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEADER = "gids journal 1"


class Journal:
    """An open, locked journal.

    Attributes: id (8 hex digits, kept when resuming); done (item -> what was recorded when it was finished);
    pages (item -> pages of it on disk); folders (where shards go, if elsewhere). Raises BlockingIOError when
    another process holds it.
    """

    def __init__(self, path: Path, key: Mapping[str, Any] | None) -> None:
        self.id = secrets.token_hex(4)
        self.done: dict[str, Any] = {}
        self.pages: dict[str, int] = {}
        self.difference = ""  # why a journal that was there is not continued
        self.folders: list[str] = []  # for shards, elsewhere
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - see close()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        self.resumed = self._load(json.loads(json.dumps(key)))

    def restart(self, key: Mapping[str, Any] | None, folders: list[str]) -> None:
        """Forget what was recorded; begin with what this dataset is made from."""
        self.done.clear()
        self.pages.clear()
        self.folders = folders
        self._file.truncate(0)
        self.record({"journal": _HEADER, "id": self.id, "key": key, "folders": folders})

    def record(self, fields: Mapping[str, Any]) -> None:
        """Append a record and wait until it is on disk."""
        self._file.write(json.dumps(fields).encode() + b"\n")
        os.fdatasync(self._file.fileno())

    def record_pages(self, item: str, pages: int) -> None:
        self.record({"item": item, "pages": pages})
        self.pages[item] = pages

    def record_done(self, item: str, result: Any) -> None:
        self.record({"item": item, "done": result})
        self.done[item] = result

    def close(self) -> None:
        self._file.close()

    def _load(self, key: Any) -> bool:
        self._file.seek(0)
        records, length = [], 0
        for line in self._file.read().split(b"\n")[:-1]:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
            length += len(line) + 1
        self._file.truncate(length)  # a torn line must not swallow the next record
        if not records or records[0].get("journal") != _HEADER:
            return False
        self.folders = records[0]["folders"]
        if key is None or records[0]["key"] != key:
            self.difference = _difference(records[0]["key"], key)
            return False
        self.id = records[0]["id"]
        for record in records[1:]:
            if "done" in record:
                self.done[record["item"]] = record["done"]
            else:
                self.pages[record["item"]] = record["pages"]
        return True


def _difference(before: Any, now: Any) -> str:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return "it cannot be resumed"
    names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    return f"{', '.join(names)} changed"
