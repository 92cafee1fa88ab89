"""GraphBolt's Feature and FeatureStore interfaces over a dataset, for GraphBolt's own stages.

Users make them. Rows are read through a cache when GraphBolt asks for them, without lookahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from dgl import graphbolt as gb

from gids.cache.output_dtype import converted, out_dtype_of
from gids.closing import Closing
from gids.graphbolt.fetcher import keys_of, table_of
from gids.loader import FeatureLoader
from gids.loader.options import explain_names
from gids.loader.source import Dataset, Source, as_source


class _ReadOnly(Closing):
    """What a Feature and a FeatureStore have in common: a FeatureLoader, and no way to change rows."""

    feature_loader: FeatureLoader
    _opened: ExitStack

    def update(self, *_: object, **__: object) -> NoReturn:
        name = self.feature_loader.store.name
        raise TypeError(f"{name} cannot be changed: a gids dataset is written once, by `gids convert`")

    def is_pinned(self) -> bool:
        return False

    def pin_memory_(self) -> NoReturn:
        name = self.feature_loader.store.name
        raise TypeError(f"{name} is on disk and cannot be pinned: device='cuda' has rows in GPU memory")

    def close(self) -> None:
        """Release engine and cache. Reading afterwards raises. Idempotent."""
        self.feature_loader.close()
        self._opened.close()


class Feature(_ReadOnly, gb.Feature):  # type: ignore[misc]  # GraphBolt has no types
    """One table of a dataset as GraphBolt's Feature. Read-only; not for several threads at once.

    source: gids.open(...), or for default options the dataset's path or a gids.FeatureStore. table: its name,
    such as ``"paper.feat"``. dtype, device, minibatch_rows: as in gids.FeatureLoader. Memory is divided
    once, at the first read, for reads up to a quarter larger, or for minibatch_rows.

    Raises KeyError for a table that does not exist, and the errors of gids.FeatureLoader.
    """

    @explain_names("gids.graphbolt.Feature")
    def __init__(
        self,
        source: FeatureLoader | Source | Dataset,
        table: str,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._opened = ExitStack()
        if isinstance(source, FeatureLoader):  # a FeatureStore's
            self.feature_loader = source
        else:
            single = _one_by_one(source, self._opened, "gids.graphbolt.Feature")
            self.feature_loader = FeatureLoader(
                single, [table], dtype=dtype, device=device, minibatch_rows=minibatch_rows
            )
            table = self.feature_loader.tables[0].name
        self.table = next(known for known in self.feature_loader.tables if known.name == table)

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Rows, of the FeatureLoader's dtype, on its device. Blocks.

        ids: [n] of any integer dtype, may repeat. None: all rows, in host memory. Raises IndexError for a row
        out of range, StorageError.
        """
        if ids is None:
            rows = self.table.read_rows(torch.arange(self.table.row_count))
            return converted(rows, self.table, out_dtype_of(self.table, self.feature_loader.dtype))
        ids = ids.to(self.feature_loader.device, torch.int64)
        name = self.table.name
        with self.feature_loader.attach([ids], lambda rows: {name: rows}) as stream:
            return next(stream)[1][name]

    def size(self) -> torch.Size:
        """Shape of one row."""
        return torch.Size(self.table.shape)

    def count(self) -> int:
        """Number of rows."""
        return self.table.row_count

    def metadata(self) -> dict[str, Any]:
        return {"table": self.table.name, "row_count": self.table.row_count, "dtype": self.table.dtype}

    def __repr__(self) -> str:
        return f"Feature({self.table!r})"


class FeatureStore(_ReadOnly, gb.FeatureStore):  # type: ignore[misc]  # GraphBolt has no types
    """The tables of a dataset as GraphBolt's FeatureStore, through one cache. Read-only.

    source: gids.open(...), or for default options the dataset's path or a gids.FeatureStore. All tables share
    one cache. dtype, device, minibatch_rows: as in Feature. Keys are (domain, type, name): ``("node",
    "paper", "feat")``, ``("edge", "author:writes:paper", "weight")``. The type of a homogeneous dataset
    may be None.
    """

    @explain_names("gids.graphbolt.FeatureStore")
    def __init__(
        self,
        source: Source | Dataset,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._opened = ExitStack()
        single = _one_by_one(source, self._opened, "gids.graphbolt.FeatureStore")
        self.store = single.store
        self.feature_loader = FeatureLoader(
            single, list(self.store.tables), dtype=dtype, device=device, minibatch_rows=minibatch_rows
        )
        self._features = {name: Feature(self.feature_loader, name) for name in self.store.tables}

    def __getitem__(self, key: tuple[str, str | None, str]) -> Feature:
        return self._features[table_of(self.store, *key).name]

    def read(
        self, domain: str, type_name: str | None, feature_name: str, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self[domain, type_name, feature_name].read(ids)

    def size(self, domain: str, type_name: str | None, feature_name: str) -> torch.Size:
        return self[domain, type_name, feature_name].size()

    def count(self, domain: str, type_name: str | None, feature_name: str) -> int:
        return self[domain, type_name, feature_name].count()

    def metadata(self, domain: str, type_name: str | None, feature_name: str) -> dict[str, Any]:
        return self[domain, type_name, feature_name].metadata()

    def keys(self) -> list[tuple[str, str | None, str]]:
        return keys_of(self.store)

    def __len__(self) -> int:
        return len(self._features)

    def stats(self) -> dict[str, Any]:
        """As in gids.FeatureLoader."""
        return self.feature_loader.stats()


def _one_by_one(source: Source | Dataset, closing: ExitStack, name: str) -> Source:
    """The source for reads that come one by one: without a window. The stage gids_fetch looks ahead."""
    opened = as_source(source, closing)
    opened.refuse_parts(name)
    return opened.with_options(window=0, planned=1)
