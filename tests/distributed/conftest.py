"""Processes for ranks, and datasets that several files read. Who changes one restores it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from partition_example import Datasets
from programs import CITED, write_cited
from rank_pool import RankPool

from gids.write.partition import partition


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes, for 1 to 4 ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    """One node type; tables of every dtype."""
    return Datasets(tmp_path_factory.mktemp("rich"))


@pytest.fixture(scope="session")
def cited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of one type."""
    return write_cited(tmp_path_factory.mktemp("cited") / "one.gids", CITED[:1])


@pytest.fixture(scope="session")
def cited_parts(cited: Path) -> Path:
    """The same in two parts."""
    partition(cited, cited.with_name("parts"), 2)
    return cited.with_name("parts")
