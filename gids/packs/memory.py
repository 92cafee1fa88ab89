"""The memory budget of packs: what a superbatch needs beside the packs themselves, and what is left for them.

Called by the loader before anything is allocated. Knows sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gids.packs.spaces import Space
from gids.store.geometry import align_up, div_ceil

ALIGNMENT = 4096
"""Of the parts of a pack, in scratch and in memory."""

_OUTPUTS = 2
"""One minibatch is with the consumer, one is gathered."""

_MINIBATCHES = 7
"""Sampled ones in memory: one with the consumer, three that are read ahead, three that are written."""

_LISTS_SHARE = 8
"""Row lists of the packs of a superbatch take at most an eighth of the memory."""

_LIST_ROW_BYTES = 1.25
"""Bytes of a row in a row list, about."""

_SETS = 20
"""Row sets: the resident rows', the present pack's, one to sweep by, one to collect in, 16 to try cuts."""

_PIECE_SHARE = 512
"""A piece of a sweep takes at most 1/512 of the memory."""

_WRITE_SHARE = 16
"""Write buffers take at most 1/16 of the memory."""

PIECES = 8
"""Pieces that a sweep reads at a time."""

_LEAST_BUFFER_BYTES = 32 << 10
_LEAST_PACKS = 4
_MOST_PACKS = 1024
_SPARE_BUFFERS = 16
"""Write buffers beside the one of each pack: those that are being written."""


@dataclass(frozen=True)
class PackPlan:
    """How memory is shared out. purposes: bytes by purpose, "packs" among them. most_packs: of a superbatch.

    piece_bytes: of one read of a sweep. buffer_bytes: of a write buffer.
    """

    purposes: Mapping[str, int]
    most_packs: int
    piece_bytes: int
    buffer_bytes: int

    @property
    def pack_bytes(self) -> int:
        """For the resident rows and two packs."""
        return self.purposes["packs"]

    def buffer_count(self, packs: int) -> int:
        """Write buffers of a superbatch of so many packs."""
        return packs + _SPARE_BUFFERS


@dataclass(frozen=True, kw_only=True)
class PackBudget:
    """What packs may take.

    output_row_bytes: bytes of an output row, by table. bounce_bytes: memory of the loader's engine.
    sampler_bytes: of the sampler.
    """

    spaces: Sequence[Space]
    output_row_bytes: Mapping[str, int]
    bounce_bytes: int
    sampler_bytes: int
    memory_bytes: int

    def share(self, rows: Mapping[str, int], minibatch_bytes: int, wanted_rows: int) -> PackPlan | None:
        """Give every purpose its bytes; the rest is for packs. None if nothing is left.

        rows: rows that the largest minibatch reads, by table. minibatch_bytes: its memory. wanted_rows: sum
        of the distinct rows of each minibatch, over all minibatches and spaces.
        """
        purposes = self.needed(rows, minibatch_bytes, wanted_rows)
        left = self.memory_bytes - sum(purposes.values())
        if left <= 0:
            return None
        return PackPlan({**purposes, "packs": left}, self._most_packs, self._piece_bytes, self._buffer_bytes)

    def needed(self, rows: Mapping[str, int], minibatch_bytes: int, wanted_rows: int) -> dict[str, int]:
        """Bytes by purpose, without packs."""
        sets = sum(space.set_bytes for space in self.spaces)
        return {
            "bounce pool": self.bounce_bytes,
            "sampler": self.sampler_bytes,
            "outputs": _OUTPUTS * self._output_bytes(rows),
            "minibatches": _MINIBATCHES * (minibatch_bytes + 4 * sum(rows.values())),
            "row sets": _SETS * sets,
            "row lists": min(self.memory_bytes // _LISTS_SHARE, int(_LIST_ROW_BYTES * wanted_rows)),
            "counts": 2 * (sum(2 * space.row_count for space in self.spaces) + sets),
            "sweep": 2 * PIECES * self._piece_bytes,
            "write buffers": (self._most_packs + _SPARE_BUFFERS) * self._buffer_bytes,
        }

    @property
    def _most_packs(self) -> int:
        buffers = self.memory_bytes // _WRITE_SHARE // _LEAST_BUFFER_BYTES
        return max(_LEAST_PACKS, min(_MOST_PACKS, buffers - _SPARE_BUFFERS))

    @property
    def _piece_bytes(self) -> int:
        longest = max(t.page_bytes for space in self.spaces for t in space.tables)
        return align_up(min(1 << 20, max(64 << 10, self.memory_bytes // _PIECE_SHARE)), longest)

    @property
    def _buffer_bytes(self) -> int:
        room = self.memory_bytes // _WRITE_SHARE // (self._most_packs + _SPARE_BUFFERS)
        return min(1 << 20, max(_LEAST_BUFFER_BYTES, room // ALIGNMENT * ALIGNMENT))

    def _output_bytes(self, rows: Mapping[str, int]) -> int:
        return sum(
            ALIGNMENT * max(1, div_ceil(rows.get(t.name, 0) * self.output_row_bytes[t.name], ALIGNMENT))
            for space in self.spaces
            for t in space.tables
        )
