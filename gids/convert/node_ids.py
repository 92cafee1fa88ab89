"""NodesById: the nodes of one type by the ids in a table, to number the ends of edges. For readers/tables.py.

The ids are written to scratch files, as a dataset stores them, and NodeIds finds them there.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gids.convert.arrow_table import ArrowTable
from gids.convert.source_files import shown
from gids.convert.stream_rows import saved
from gids.errors import FormatError
from gids.store.ids import MAX_ID_BYTES, NodeIds, number_keys, text_keys
from gids.store.manifest import position_dtype
from gids.store.rows import FileRows, Rows


class NodesById:
    """The nodes of a type, which are the rows of a table, by the ids in one of its columns.

    scratch: a directory to make, kept as long as arrays are read. Memory: 24 bytes per node, to sort the
    keys; the files are mapped.

    Attributes: is_text; arrays (those of a dataset, by role).

    Raises FormatError for a missing id, one that is too long, and an id of two rows.
    """

    def __init__(self, ntype: str, table: ArrowTable, column: str, *, scratch: Path) -> None:
        self._table, self._column, self._scratch = table, column, scratch
        self.is_text = table.ids_are_text(column)
        self.arrays: dict[str, Rows] = {}
        scratch.mkdir()
        keys = self._write_ids()
        order = np.argsort(keys, kind="stable")
        self._save("id_key", keys[order])
        self._save("id_node", order.astype(position_dtype(len(order))))
        self._stored = NodeIds(ntype, len(keys), {role: partial(self._mapped, role) for role in self.arrays})
        self._refuse_repeats(ntype)

    def nodes_of(self, table: ArrowTable, column: str, target: Path) -> FileRows:
        """The node of each id in a column of a table, int64[rows], in a file; -1: no node has the id."""
        return saved(target, map(self._find, table.ids(column, as_text=self.is_text)))

    def _find(self, ids: Any) -> np.ndarray:
        if self.is_text:
            nodes = self._stored.find_texts(*_text(ids))
        else:
            nodes = self._stored.find_numbers(ids.fill_null(0).to_numpy())
        return np.where(ids.is_null().to_numpy(zero_copy_only=False), -1, nodes)

    def _write_ids(self) -> np.ndarray:
        """Write the ids in the order of the nodes. Returns their keys, int64[nodes]."""
        keys, text_bytes = [np.empty(0, np.int64)], 0
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(open(self._scratch / "id", "wb"))
            offsets = stack.enter_context(open(self._scratch / "id_offset", "wb"))
            offsets.write(np.zeros(1, np.int64).data)
            row = 0
            for ids in self._table.ids(self._column, as_text=self.is_text):
                self._check(ids, row)
                row += len(ids)
                keys.append(_keys(ids))
                if self.is_text:
                    text, bounds = _text(ids)
                    data.write(text.data)
                    offsets.write((bounds[1:] + text_bytes).data)
                    text_bytes += len(text)
                else:
                    data.write(ids.to_numpy().data)
        kind, count = (torch.uint8, text_bytes) if self.is_text else (torch.int64, row)
        self.arrays["id"] = FileRows(self._scratch / "id", (count,), kind)
        if self.is_text:
            self.arrays["id_offset"] = FileRows(self._scratch / "id_offset", (row + 1,), torch.int64)
        return np.concatenate(keys)

    def _save(self, role: str, values: np.ndarray) -> None:
        """Write an array of a dataset."""
        with open(self._scratch / role, "wb") as out:  # tofile() does not say that a disk is full
            out.write(values.data)
        self.arrays[role] = FileRows(self._scratch / role, values.shape, getattr(torch, values.dtype.name))

    def _mapped(self, role: str) -> np.ndarray:
        dtype = str(self.arrays[role].dtype).removeprefix("torch.")
        path = self._scratch / role
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

    def _check(self, ids: Any, first: int) -> None:
        """Raise FormatError for a missing id, and for one that is too long. first: row of the first id."""
        if ids.null_count:
            at = first + int(np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))[0])
            raise FormatError(f"{self._table.where(at)}: the node has no id in column {self._column!r}")
        if self.is_text:
            long = np.flatnonzero(np.diff(_text(ids)[1]) > MAX_ID_BYTES)
            if len(long):
                raise FormatError(
                    f"{self._table.where(first + int(long[0]))}: the id in column {self._column!r} has more "
                    f"than {MAX_ID_BYTES} bytes, the limit"
                )

    def _refuse_repeats(self, ntype: str) -> None:
        """Raise FormatError for an id of two nodes: of nodes with its key, the first one is found."""
        keys = self._mapped("id_key")
        equal = np.flatnonzero(keys[1:] == keys[:-1])
        for row in self._mapped("id_node")[equal + 1].tolist():
            if (first := int(self._stored.nodes_of(self._stored, row, row + 1)[0])) != row:
                places = " and ".join(map(self._table.where, (first, row)))
                raise FormatError(f"two {ntype!r} nodes have the id {shown(self._stored[row])}: {places}")


def _keys(ids: Any) -> np.ndarray:
    """The keys of an array of ids, int64[n]. A null may have any key."""
    if str(ids.type) == "int64":
        return number_keys(ids.fill_null(0).to_numpy())
    return text_keys(*_text(ids))


def _text(ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 of a large_string array, and the offset of each id in it, int64[n + 1]."""
    _, offsets, data = ids.buffers()
    if not len(ids):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    bounds = np.frombuffer(offsets, np.int64, len(ids) + 1, 8 * ids.offset)
    text = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return text[bounds[0] : bounds[-1]], bounds - bounds[0]


def resembling(table: ArrowTable, column: str, id_: str) -> str | None:
    """An id in a column that is written in another way: 25 for 25.0, 025 or " 25"; None: there is none."""
    pa: Any = importlib.import_module("pyarrow")

    def plain(texts: Any) -> Any:  # in lower case, without blanks, and zeros before and after whole numbers
        texts = pa.compute.utf8_lower(pa.compute.utf8_trim_whitespace(texts))
        return pa.compute.replace_substring_regex(texts, r"^[+]?(-?)0*([0-9]+)([.]0*)?$", r"\1\2")

    for ids in table.ids(column, as_text=table.ids_are_text(column)):
        row = pa.compute.index(plain(ids.cast(pa.large_string())), plain(pa.array([id_], "large_string"))[0])
        if row.as_py() >= 0:
            return str(ids[row.as_py()].as_py())
    return None


def are_positions(table: ArrowTable, column: str) -> bool:
    """Whether a column of whole numbers is 0, 1, 2, …: then ids are node numbers."""
    if table.ids_are_text(column):
        return False
    row = 0
    for ids in table.ids(column, as_text=False):
        if ids.null_count or (ids.to_numpy() != np.arange(row, row + len(ids))).any():
            return False
        row += len(ids)
    return True
