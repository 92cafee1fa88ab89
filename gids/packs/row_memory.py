"""RowMemory: the memory of resident rows and packs. HostRows: the one on the CPU. HostGather copies its rows.

Called by superbatches, which decide what is in memory, and where; HostGather also by RowReader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from gids import _core
from gids.cache.output_dtype import Bytes, Outputs
from gids.packs.spaces import Rows

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.packs.device_loads import KvikioExtents
    from gids.packs.scratch import ScratchFile
    from gids.store import Table


class HostGather(Outputs):
    """Outputs to which rows are copied from memory. threads: that copy."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        threads: int,
        output_dtype: torch.dtype | None,
        pool_bytes: int = 0,
        output_rows: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(tables, output_dtype, keep_bytes=pool_bytes, rows=output_rows)
        self._workers, self._pool_bytes = _core.Workers.create(threads), pool_bytes

    def lend(self) -> int:
        """Give the memory back that no features are in, until it is needed. Returns the bytes of features."""
        self.pool.keep(0)
        self.pool.keep(self._pool_bytes)
        return self.pool.taken_bytes

    def close(self) -> None:
        """Give the memory back that no features are in. Idempotent."""
        self.pool.keep(0)

    def copy(
        self,
        table: Table,
        rows: Rows,
        holders: Sequence[tuple[_core.RowSet, _core.PackMemory, int]],
        out: Bytes,
    ) -> int:
        """Copy rows of a table from the first of holders that has them: (set, memory, offset of its rows).

        rows: numbers of the holders' sets. out: of take(); rows that no holder has do not change there.
        Returns how many were copied.
        """
        form = self.forms[table.name]
        missing: int = _core.gather_packed(
            self._workers,
            rows,
            list(holders),
            row_bytes=table.row_bytes,
            stored_as=form.stored_as,
            wanted_as=form.wanted_as,
            row_values=form.values,
            scales=form.scales,
            out=out,
        )
        return len(rows) - missing


Bad = tuple[int, int]
"""The first byte of an extent of the scratch file that could not be read, and the errno."""


class Extent(NamedTuple):
    """A part of the scratch file, and where it goes in the memory."""

    offset: int
    at: int
    nbytes: int


class Wanted(NamedTuple):
    """Rows of a table that a minibatch reads. holders: (row set, where its rows begin in the memory) of the
    resident rows and of the pack, or of another pack with a part of the rows; the sets are those of keep()
    and load()."""

    table: Table
    rows: Rows
    holders: tuple[tuple[Any, int], ...]


class Load(Protocol):
    """A pack on its way from scratch to memory."""

    def wait(self) -> tuple[list[Any], list[Bad]]:
        """The row set of each space, and what could not be read. Blocks until the pack is in memory."""

    def close(self) -> None:
        """Stop it. Idempotent. Blocks for one read at most."""


@dataclass
class PackSource:
    """A scratch file, opened to read packs from. files: which of the engine's are those of the scratch file.
    kvikio: reads it in place of the engine, to a device."""

    engine: Engine
    priority: _core.Priority
    files: range
    kvikio: KvikioExtents | None = None

    def close(self) -> None:
        """Idempotent. The loads are closed."""
        if self.kvikio is not None:
            self.kvikio.close()


class RowMemory(ABC):
    """Attributes: swept: memory that a sweep can write rows to; None if rows come from scratch only. host:
    copies rows that are in host memory."""

    swept: _core.PackMemory | None
    host: HostGather

    @property
    @abstractmethod
    def peak_output_bytes(self) -> int: ...

    def lend_outputs(self) -> int:
        """Free the outputs that nobody uses, for a sweep. Returns the bytes of the others."""
        return 0

    @property
    def second_output_bytes(self) -> int:
        """The most that outputs of second streams took, if peak_output_bytes leaves them out."""
        return 0

    def open(
        self, engine: Engine, priority: _core.Priority, files: range, scratch: ScratchFile
    ) -> PackSource:
        """See PackSource."""
        return PackSource(engine, priority, files)

    @abstractmethod
    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        """Begin to read a pack. Does not block. lists: its rows in each space. half: 0 or 1."""

    @abstractmethod
    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        """Row sets of the resident rows."""

    @abstractmethod
    def discard(self, at: int, nbytes: int) -> None:
        """Lend these bytes to a sweep until they are written again. Their contents are lost."""

    @abstractmethod
    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        """The rows of a minibatch in the order in which it reads them, by table, ready for torch.

        parts: of each pack with rows of the minibatch. Its rows are copied before the next part is asked for.
        """

    def ids_on_host(self, ids: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Ids of a minibatch on the CPU."""
        return ids

    def from_host(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Features that are in host memory, as the loader returns them."""
        return features

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent. No load and no sweep is going on."""


class HostRows(RowMemory):
    """nbytes: for the resident rows and two packs."""

    def __init__(self, host: HostGather, nbytes: int) -> None:
        self.host = host
        self.swept = _core.PackMemory.create(nbytes)

    @property
    def peak_output_bytes(self) -> int:
        return self.host.pool.peak_bytes

    def lend_outputs(self) -> int:
        return self.host.lend()

    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        files, memory = source.files, self.memory
        reads = [
            _core.PackRead(
                source.engine.native, source.priority, files[0], offset, memory, at, nbytes, files=len(files)
            )
            for offset, at, nbytes in extents
        ]
        return _HostLoad(reads, extents, lists)

    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        return list(resident)

    def discard(self, at: int, nbytes: int) -> None:
        self.memory.discard(at, nbytes)

    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        memory = self.memory
        outputs: dict[str, tuple[Table, Bytes]] = {}
        missing: Counter[str] = Counter()
        for wanted in parts:
            for table, rows, holders in wanted:
                if table.name not in outputs:
                    outputs[table.name] = (table, self.host.take(table, len(rows)))
                    missing[table.name] = len(rows)
                _, out = outputs[table.name]
                packed = [(rows_of_pack, memory, at) for rows_of_pack, at in holders]
                missing[table.name] -= self.host.copy(table, rows, packed, out)
        if any(missing.values()):
            raise AssertionError(f"rows are in no pack, or in two: {dict(missing)}")
        return {name: self.host.tensor(*output) for name, output in outputs.items()}

    def close(self) -> None:
        """See RowMemory.close(). Features in use keep their memory, as does a gather in another thread."""
        self.swept = None
        self.host.close()

    @property
    def memory(self) -> _core.PackMemory:
        """Of the resident rows and packs. Raises ValueError after close()."""
        if self.swept is None:
            raise ValueError("this loader is closed: make a new one")
        return self.swept


class _HostLoad:
    def __init__(
        self, reads: list[_core.PackRead], extents: Sequence[Extent], lists: Sequence[_core.RowList]
    ) -> None:
        self._reads, self._extents, self._lists = reads, extents, lists

    def wait(self) -> tuple[list[Any], list[Bad]]:
        bad = [
            (extent.offset + begin, code)
            for read, extent in zip(self._reads, self._extents, strict=True)
            for begin, _, code in read.wait()
        ]
        return [rows.to_set() for rows in self._lists], bad

    def close(self) -> None:
        self._reads.clear()  # the end of a PackRead cancels it
