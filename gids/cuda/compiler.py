"""Device sources, and their compiler: NVRTC, through CuPy's binding. Machine code is cached on disk.

Called by the CUDA device when it loads a unit. Needs no driver and no GPU, so the tests compile every unit
with the same options, or for the host. cupy.RawModule is not used: it needs a driver to compile, adds
-ftz=true, and its cache misses changes of headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gids.errors import NoDeviceError

_log = logging.getLogger("gids.cuda")
_DIGEST_BYTES = 32
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


def compile_options(target: str, include: Sequence[Path]) -> list[str]:
    """NVRTC's options. target: "sm_90" for machine code, "compute_90" for PTX. include: header folders."""
    return [
        f"-arch={target}",
        "-std=c++20",
        "-default-device",
        "-lineinfo",
        *(f"-I{path}" for path in include),
    ]


class Compiler:
    """Compiles units. nvrtc: CuPy's binding. cccl: the folder of <cuda/atomic>. cache: a folder."""

    def __init__(self, sources: Sources, nvrtc: Any, cccl: Path, cache: Path) -> None:
        self.sources = sources
        self._nvrtc, self._cccl, self._cache = nvrtc, cccl, cache
        self.version: tuple[int, int] = tuple(nvrtc.getVersion())
        """The CUDA version of NVRTC."""

    def target(self, capability: tuple[int, int]) -> str:
        """The target for a device: its machine code, or PTX if the device is newer than the toolkit.

        Raises NoDeviceError for a device that the toolkit no longer supports.
        """
        number = capability[0] * 10 + capability[1]
        major, minor = self.version
        known = sorted(int(arch) for arch in self._nvrtc.getSupportedArchs())
        if number in known:
            return f"sm_{number}"
        older = [arch for arch in known if arch < number]
        if not older:
            raise NoDeviceError(
                f"the device has compute capability {capability[0]}.{capability[1]}; CUDA {major}.{minor} "
                f"supports {known[0] // 10}.{known[0] % 10} and newer: install packages for an older CUDA, "
                "such as cupy-cuda12x"
            )
        return f"compute_{older[-1]}"

    def compile(self, unit: Unit, target: str) -> bytes:
        """A cubin, or PTX for a compute_ target. Raises RuntimeError, with NVRTC's log, on an error."""
        options = compile_options(target, [self.sources.include, self._cccl])
        path = self._cache / f"{Path(unit.name).stem}-{target}-{self._key(unit, options)}.bin"
        if (code := _load(path)) is None:
            _log.info("compiling %s for %s, once: it is kept in %s", unit.name, target, self._cache)
            begun = time.perf_counter()
            code = self._run(unit, options, ptx=target.startswith("compute_"))
            _log.info("compiled %s in %.1f s", unit.name, time.perf_counter() - begun)
            _save(path, code)
        return code

    def _key(self, unit: Unit, options: list[str]) -> str:
        """A hash of everything that the machine code depends on."""
        key = hashlib.sha256()
        made_from = [str(self.version), *options, unit.name, unit.text]
        made_from += [path.read_text() for path in self.sources.headers()]
        made_from.append((self._cccl / "cuda" / "std" / "__cccl" / "version.h").read_text())
        for text in made_from:
            key.update(text.encode() + b"\0")
        return key.hexdigest()[:24]

    def _run(self, unit: Unit, options: list[str], *, ptx: bool) -> bytes:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(unit.text, str(unit.path), (), ())
        try:
            try:
                nvrtc.compileProgram(program, tuple(options))
            except nvrtc.NVRTCError as error:
                log = nvrtc.getProgramLog(program)
                raise RuntimeError(f"{unit.path} does not compile ({error}):\n{log}") from None
            code: bytes | str = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
            return code.encode() if isinstance(code, str) else code
        finally:
            nvrtc.destroyProgram(program)


def open_compiler(sources: Sources, package: str = "cupy-cuda13x") -> Compiler:
    """The compiler of the installed CuPy. Raises ImportError, which names package, without CuPy or NVRTC."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's own warnings, which users may have turned into errors
            import cupy
            from cupy.cuda import nvrtc
    except ImportError as error:
        raise ImportError(
            f"device='cuda' needs CuPy to compile kernels, but it cannot be imported ({error}): "
            f"pip install '{package}[ctk]'"
        ) from error
    cccl = Path(cupy.__file__).parent / "_core" / "include" / "cupy" / "_cccl" / "libcudacxx"
    if not (cccl / "cuda" / "atomic").is_file():
        raise ImportError(
            f"CuPy {cupy.__version__} has no CCCL headers ({cccl}): pip install -U '{package}[ctk]'"
        )
    try:
        return Compiler(sources, nvrtc, cccl, cache_folder())
    except RuntimeError as error:  # CuPy opens the library at the first call
        raise ImportError(f"CuPy cannot find NVRTC ({error}): pip install '{package}[ctk]'") from error


def cache_folder() -> Path:
    """The folder of compiled kernels: $GIDS_KERNEL_CACHE, or gids/kernels in the user's cache folder."""
    if chosen := os.environ.get("GIDS_KERNEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gids" / "kernels"


def _load(path: Path) -> bytes | None:
    """The code stored there; None if it is missing or incomplete."""
    try:
        digest, code = (data := path.read_bytes())[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    except OSError:
        return None
    return code if hashlib.sha256(code).digest() == digest else None


def _save(path: Path, code: bytes) -> None:
    """Store the code atomically, as others may read meanwhile. Log a warning if it cannot be stored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
    except OSError as error:
        _log.warning("cannot store compiled kernels: %s (set GIDS_KERNEL_CACHE to a writable folder)", error)
