"""RowMemory: the memory of resident rows and packs. HostRows: the one on the CPU. HostGather copies its rows.

Called by superbatches, which decide what is in memory, and where; HostGather also by RowReader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.output_dtype import out_dtype_of, row_form
from gids.packs.spaces import Rows
from gids.store.dtypes import make_bools_proper

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.packs.scratch import ScratchFile
    from gids.store import Table


Bytes = npt.NDArray[np.uint8]


class HostGather:
    """threads: that copy rows. pool_bytes: memory of outputs that is kept for later ones. output_rows: rows
    that an output has room for, by table."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        threads: int,
        output_dtype: torch.dtype | None,
        pool_bytes: int = 0,
        output_rows: Mapping[str, int] | None = None,
    ) -> None:
        self._workers = _core.Workers.create(threads)
        self._pool_bytes, self._pool = pool_bytes, _core.BufferPool.create(pool_bytes)
        self._dtypes = {t.name: out_dtype_of(t, output_dtype) for t in tables}
        self._forms = {t.name: row_form(t, output_dtype) for t in tables}
        self._output_rows = output_rows or {}

    @property
    def peak_bytes(self) -> int:
        """The most that outputs took."""
        found: int = self._pool.peak_bytes
        return found

    def lend(self) -> int:
        """Give the memory back that no features are in, until it is needed. Returns the bytes of features."""
        self._pool.keep(0)
        self._pool.keep(self._pool_bytes)
        return self._pool.taken_bytes

    def close(self) -> None:
        """Give the memory back that no features are in. Idempotent."""
        self._pool.keep(0)

    def take(self, table: Table, count: int) -> Bytes:
        """Memory for the output of so many rows: uint8[count, bytes of a row]."""
        form, room = self._forms[table.name], self._output_rows.get(table.name, 0)
        flat = self._pool.take(count * form.out_row_bytes, room * form.out_row_bytes)
        return flat.reshape(count, form.out_row_bytes)

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
        form = self._forms[table.name]
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

    def tensor(self, table: Table, out: Bytes) -> torch.Tensor:
        """What copy() has filled, as features."""
        flat = torch.from_numpy(out.reshape(-1)).view(self._dtypes[table.name])
        return make_bools_proper(flat.view(len(out), *table.shape))


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


class PackSource(Protocol):
    """A scratch file, opened to read packs from."""

    def load(self, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int) -> Load:
        """Begin to read a pack. Does not block. lists: its rows in each space. half: 0 or 1."""

    def close(self) -> None:
        """Idempotent. The loads are closed."""


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

    @abstractmethod
    def open(
        self, engine: Engine, priority: _core.Priority, files: range, scratch: ScratchFile
    ) -> PackSource:
        """files: which of the engine's are those of the scratch file."""

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
        return self.host.peak_bytes

    def lend_outputs(self) -> int:
        return self.host.lend()

    def open(
        self, engine: Engine, priority: _core.Priority, files: range, scratch: ScratchFile
    ) -> PackSource:
        return _HostSource(engine, priority, files, self)

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


class _HostSource:
    def __init__(self, engine: Engine, priority: _core.Priority, files: range, rows: HostRows) -> None:
        self._engine, self._priority, self._files, self._rows = engine, priority, files, rows

    def load(self, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int) -> Load:
        engine, files, memory = self._engine.native, self._files, self._rows.memory
        reads = [
            _core.PackRead(engine, self._priority, files[0], offset, memory, at, nbytes, files=len(files))
            for offset, at, nbytes in extents
        ]
        return _HostLoad(reads, extents, lists)

    def close(self) -> None:
        """Nothing is open beside the engine."""


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
