"""NodeIds: the ids that the user's own data gives the nodes of a type, and the nodes of ids.

Ids are whole numbers or text. A dataset stores them in the order of the nodes, and sorted by a key of 64
bits, to find the node of an id: docs/internals/format.md. Made by FeatureStore; `gids convert` computes the
same keys. Knows no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import torch

from gids.errors import FormatError, MissingError
from gids.store.rows import Rows, blocks

ID_ROLES = ("id", "id_offset", "id_key", "id_node")
"""The arrays of a node type with ids. Numbers have no id_offset."""
MAX_ID_BYTES = 1024
_BLOCK = 1 << 20


def number_keys(ids: np.ndarray) -> np.ndarray:
    """The keys of ids that are numbers: int64[n] -> int64[n]. Different ids have different keys."""
    return mixed(ids.astype(np.int64, copy=False).view(np.uint64)).view(np.int64)


def text_keys(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The keys of ids that are text: int64[n].

    data: their UTF-8, uint8[bytes]. offsets: int64[n + 1]; id i is data[offsets[i]:offsets[i + 1]].
    """
    lengths = np.diff(offsets)
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))  # the 8 bytes from each byte on
    keys = mixed(lengths.astype(np.uint64))
    rows = np.arange(len(lengths))
    for first in range(0, int(lengths.max(initial=0)), 8):
        rows = rows[lengths[rows] > first]
        unused = np.maximum(0, 8 - (lengths[rows] - first)).astype(np.uint64) * np.uint64(8)
        word = words[offsets[rows] + first] & (np.uint64(0xFFFFFFFFFFFFFFFF) >> unused)
        keys[rows] = mixed(keys[rows] ^ word)
    return keys.view(np.int64)


def mixed(values: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 for each uint64. It is a permutation of all 2^64 numbers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = values ^ (values >> np.uint64(31))
    return result


class NodeIds:
    """The ids of the nodes of one type, in the order of the nodes: `ids[7]` is the id of node 7.

    A node without an id of its own has its number as id. Ids are read from the dataset when they are used,
    and only those that are asked for. Immutable; any thread may call.

    Attributes: ntype; is_text (True: ids are str; False: ids are int).
    """

    def __init__(self, ntype: str, count: int, arrays: Mapping[str, Callable[[], np.ndarray]]) -> None:
        """arrays: by role, a function that maps the array; empty: ids are node numbers."""
        self.ntype, self._count = ntype, count
        self._arrays = {role: map_array() for role, map_array in arrays.items()}
        self.is_text = "id_offset" in arrays

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        kind = "text" if self.is_text else "whole numbers" if self._arrays else "node numbers"
        return f"NodeIds({self.ntype!r}, {self._count} ids, {kind})"

    @overload
    def __getitem__(self, nodes: int) -> str | int: ...
    @overload
    def __getitem__(self, nodes: slice | torch.Tensor | np.ndarray) -> list[str] | np.ndarray: ...
    def __getitem__(
        self, nodes: int | slice | torch.Tensor | np.ndarray
    ) -> str | int | list[str] | np.ndarray:
        """The ids of nodes. nodes: a node number, a slice, or an array or CPU tensor, int[n].

        Returns a str or an int for one node. For several, text is a list of str, and numbers are a new array,
        int64[n]. Raises IndexError for a node out of range, FormatError if the stored text is damaged.
        """
        if isinstance(nodes, slice):
            start, stop, step = nodes.indices(self._count)
            chosen = np.arange(start, stop, step)
        elif isinstance(nodes, (torch.Tensor, np.ndarray)):
            chosen = np.asarray(nodes)
            if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
                raise TypeError(
                    f"nodes are {chosen.dtype}{list(chosen.shape)}; they must be whole numbers, [n]"
                )
        else:
            [id_] = self[np.asarray([range(self._count)[nodes]])]
            return id_ if isinstance(id_, str) else int(id_)
        outside = np.flatnonzero((chosen < 0) | (chosen >= self._count))
        if len(outside):
            raise IndexError(
                f"node {chosen[outside[0]]} is out of range for the {self._count} {self.ntype!r} nodes"
            )
        if self.is_text:
            return self._texts(chosen)
        ids = self._arrays["id"][chosen] if self._arrays else chosen
        return np.array(ids, np.int64)

    def find(self, ids: Sequence[str] | Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """The nodes with these ids, int64[n] on the CPU, such as for seeds.

        ids: a list of str, or whole numbers (a list, an array or a CPU tensor, [n]). Reads a few pages of the
        dataset per id. Raises MissingError, a KeyError, that names the first id that no node has; TypeError
        for ids of another type.
        """
        wanted: Sequence[str] | np.ndarray
        if self.is_text:
            wanted = self._checked_texts(ids)
            encoded = [id_.encode(errors="surrogatepass") for id_ in wanted]
            data = np.frombuffer(b"".join(encoded), np.uint8)
            nodes = self.find_texts(data, _bounds(np.fromiter(map(len, encoded), np.int64, len(encoded))))
        else:
            wanted = numbers = np.asarray(ids)
            if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
                raise TypeError(f"ids of {self.ntype!r} nodes are whole numbers, [n]; got {numbers.dtype}")
            nodes = self.find_numbers(numbers.astype(np.int64))
            nodes[numbers > np.iinfo(np.int64).max] = -1  # uint64
        unknown = np.flatnonzero(nodes < 0)
        if len(unknown):
            more = f", nor {len(unknown) - 1} others of these ids" if len(unknown) > 1 else ""
            first = wanted[int(unknown[0])]
            shown = repr(first) if isinstance(first, str) else str(first)
            raise MissingError(f"no {self.ntype!r} node has the id {shown}{more}")
        return torch.from_numpy(nodes)

    def nodes_of(self, other: NodeIds, first: int, stop: int) -> np.ndarray:
        """The nodes with the ids of other's nodes first … stop - 1, int64[stop - first]; -1: no node has it.

        Both store ids of one kind.
        """
        if self.is_text:
            return self.find_texts(*other._bytes(np.arange(first, stop)))
        return self.find_numbers(np.array(other._arrays["id"][first:stop]))

    def find_numbers(self, wanted: np.ndarray) -> np.ndarray:
        """The nodes with these ids, int64[n]; -1: no node."""
        if not self._arrays:
            return np.where((wanted >= 0) & (wanted < self._count), wanted, -1)
        ids = self._arrays["id"]
        return self._find_keys(number_keys(wanted), lambda nodes, queries: ids[nodes] == wanted[queries])

    def _checked_texts(self, ids: object) -> Sequence[str]:
        if isinstance(ids, str) or not isinstance(ids, (Sequence, np.ndarray)):
            raise TypeError(f"ids of {self.ntype!r} nodes are text: give a list of str")
        for id_ in ids:
            if not isinstance(id_, str):
                raise TypeError(f"ids of {self.ntype!r} nodes are text, but {id_!r} is not")
        return list(ids)

    def find_texts(self, data: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """The nodes with these ids, int64[n]; -1: no node. data, bounds: their UTF-8, as of text_keys()."""
        padded = np.append(data, np.uint8(0))

        def is_same(nodes: np.ndarray, queries: np.ndarray) -> np.ndarray:
            stored, ends = self._bytes(nodes)
            at = _places(bounds[queries], ends)
            differ = _bounds(stored != padded[np.minimum(at, len(data))])[ends]
            same: np.ndarray = np.diff(ends) == np.diff(bounds)[queries]
            same &= differ[1:] == differ[:-1]
            return same

        return self._find_keys(text_keys(data, bounds), is_same)

    def _find_keys(
        self, keys: np.ndarray, is_same: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """The node of each key, or -1. is_same(nodes, positions of queries): whether a node has that id."""
        sorted_keys, node_of = self._arrays["id_key"], self._arrays["id_node"]
        nodes = np.full(len(keys), -1, np.int64)
        queries, at = np.arange(len(keys)), np.searchsorted(sorted_keys, keys)
        while len(queries):  # more than once only for two ids of one key
            inside = at < self._count
            queries, at = queries[inside], at[inside]
            equal = sorted_keys[at] == keys[queries]
            queries, at = queries[equal], at[equal]
            candidates = np.asarray(node_of[at], np.int64)
            if len(candidates) and not 0 <= candidates.min() <= candidates.max() < self._count:
                raise FormatError(f"id_node of {self.ntype!r} is damaged: see `gids verify`")
            same = is_same(candidates, queries)
            nodes[queries[same]] = candidates[same]
            queries, at = queries[~same], at[~same] + 1
        return nodes

    def _texts(self, nodes: np.ndarray) -> list[str]:
        data, bounds = self._bytes(nodes)
        text, ends = data.tobytes(), bounds.tolist()
        try:
            return [text[a:b].decode() for a, b in pairwise(ends)]
        except ValueError as error:
            raise self._damaged(error) from None

    def _bytes(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The UTF-8 of the ids of nodes, as text_keys() takes it."""
        offsets, data = self._arrays["id_offset"], self._arrays["id"]
        starts, stops = offsets[nodes], offsets[nodes + 1]
        if ((starts < 0) | (stops < starts) | (stops > np.minimum(len(data), starts + MAX_ID_BYTES))).any():
            raise self._damaged("an offset is out of range")
        bounds = _bounds(stops - starts)
        return np.asarray(data[_places(starts, bounds)]), bounds

    def _damaged(self, what: object) -> FormatError:
        return FormatError(f"the ids of {self.ntype!r} are damaged ({what}): `gids verify` lists all faults")


def _bounds(lengths: np.ndarray) -> np.ndarray:
    """Where pieces of these lengths begin and end, one after the other: int64[n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _places(starts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Where each byte of pieces is that begin at starts and are as long as bounds say: int64[bounds[-1]]."""
    return np.repeat(starts - bounds[:-1], np.diff(bounds)) + np.arange(bounds[-1])


def checked_keys(keys: Rows, block_bytes: int) -> Iterator[object]:
    """Yield the sorted keys of ids in pieces. Raises FormatError unless they ascend."""
    last = np.iinfo(np.int64).min
    for start, block in blocks(keys, block_bytes):
        values = np.concatenate([[last], block.numpy()])
        falls = np.flatnonzero(values[1:] < values[:-1])
        if len(falls):
            raise FormatError(f"id_key[{start + falls[0]}] is less than the entry before it")
        last = values[-1]
        yield block
