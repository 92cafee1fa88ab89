from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes, for 1 to 4 ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()
