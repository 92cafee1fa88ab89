"""The installed device sources: units (native/<noun>/*.cu) and the headers shared with the host.

Used by the compiler, and by tests that compile the same sources for the host. Needs neither torch nor CUDA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(\w+)\s*\(')


@dataclass(frozen=True)
class Unit:
    """One source, compiled on its own. name: "cache/device_cache.cu". kernels: their names, in order."""

    name: str
    path: Path
    text: str
    kernels: tuple[str, ...]


class Sources:
    """A folder with include/gids/*.h and <noun>/*.cu."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.include = root / "include"

    def unit(self, name: str) -> Unit:
        """The unit at a path below the root, or at an absolute path. Raises KeyError for an unknown one."""
        path = self.root / name
        if not path.is_file():
            have = sorted(p.relative_to(self.root).as_posix() for p in self.root.glob("*/*.cu"))
            raise KeyError(f"no device source {name!r} in {self.root} (has {', '.join(have) or 'none'})")
        text = path.read_text()
        kernels = tuple(_KERNEL.findall(text))
        if len(kernels) != text.count("__global__"):
            raise ValueError(f'{path}: write each kernel as extern "C" __global__ void NAME(')
        return Unit(name, path, text, kernels)

    def headers(self) -> list[Path]:
        """All headers that a unit may include."""
        return sorted(self.include.rglob("*.h"))


def installed_sources() -> Sources:
    """The sources beside gids._core. Raises ImportError if they are missing."""
    from gids import _core

    root = Path(_core.__file__).parent / "kernels"
    if not (root / "include" / "gids" / "target.h").is_file():
        raise ImportError(f"the device sources of gids are missing ({root}): reinstall gids")
    return Sources(root)
