"""Parameters of tests that open an I/O engine by name."""

from __future__ import annotations

import pytest

from gids import _core

needs_uring = pytest.mark.skipif(bool(_core.why_no_uring()), reason=f"no io_uring: {_core.why_no_uring()}")
URING = pytest.param("uring", marks=needs_uring)
