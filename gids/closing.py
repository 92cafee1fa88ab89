"""Closing: a context manager that closes itself. A base of loaders, streams and engines."""

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
