"""Closing: a context manager that closes itself.

Used by what owns memory, files or threads: loaders, streams, engines, samplers, scratch files, GPU caches.
"""

from __future__ import annotations

from typing import Self


class Closing:
    """Calls close(), which the subclass defines, at the end of a ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
