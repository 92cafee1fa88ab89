"""Device sources are compiled with the product's options, and again only after a change."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from gids.cuda.compiler import Compiler, Sources, cache_folder, installed_sources, open_compiler

NATIVE = Path(__file__).parents[2] / "native"


class FakeNvrtc:
    """A compiler whose machine code is the source and its options."""

    class NVRTCError(Exception):
        pass

    def __init__(self) -> None:
        self.compiled = 0
        self.programs: dict[int, str] = {}

    def getVersion(self) -> tuple[int, int]:
        return (13, 4)

    def getSupportedArchs(self) -> list[int]:
        return [75, 80, 90, 100]

    def createProgram(self, text: str, name: str, headers: object, names: object) -> int:
        assert (headers, names) == ((), ())
        self.programs[len(self.programs)] = f"{name}\n{text}"
        return len(self.programs) - 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled += 1
        if "broken" in self.programs[program]:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION")
        self.programs[program] += "\n" + " ".join(options)

    def getProgramLog(self, program: int) -> str:
        return "unit.cu(1): error"

    def getCUBIN(self, program: int) -> bytes:
        return b"cubin " + self.programs[program].encode()

    def getPTX(self, program: int) -> str:
        return "ptx " + self.programs[program]

    def destroyProgram(self, program: int) -> None:
        del self.programs[program]
        self.programs[-program - 1] = "destroyed"


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    root = tmp_path / "kernels"
    (root / "include" / "gids").mkdir(parents=True)
    (root / "noun").mkdir()
    (root / "include" / "gids" / "shared.h").write_text("// shared")
    (root / "noun" / "unit.cu").write_text('extern "C" __global__ void unit() {}')
    return Sources(root)


@pytest.fixture
def cccl(tmp_path: Path) -> Path:
    version = tmp_path / "cccl" / "cuda" / "std" / "__cccl" / "version.h"
    version.parent.mkdir(parents=True)
    version.write_text("3.0")
    return tmp_path / "cccl"


def test_a_unit_is_recompiled_only_after_a_change(sources: Sources, cccl: Path, tmp_path: Path) -> None:
    nvrtc, cache = FakeNvrtc(), tmp_path / "cache"

    def compile_once(target: str = "sm_90") -> bytes:
        return Compiler(sources, nvrtc, cccl, cache).compile(sources.unit("noun/unit.cu"), target)

    code = compile_once()
    assert code.startswith(f"cubin {sources.root}/noun/unit.cu\n".encode())
    options = f"-arch=sm_90 -std=c++20 -default-device -lineinfo -I{sources.include} -I{cccl}"
    assert code.decode().endswith(options)
    assert (compile_once(), nvrtc.compiled) == (code, 1)
    for path in [
        sources.root / "include" / "gids" / "shared.h",
        sources.root / "noun" / "unit.cu",
        cccl / "cuda" / "std" / "__cccl" / "version.h",
    ]:
        before = nvrtc.compiled
        path.write_text(path.read_text() + "\n")
        compile_once()
        compile_once()
        assert nvrtc.compiled == before + 1, path
    assert compile_once("compute_100").startswith(b"ptx ")
    assert len(list(cache.iterdir())) == nvrtc.compiled


def test_a_damaged_file_in_the_cache_is_not_used(sources: Sources, cccl: Path, tmp_path: Path) -> None:
    nvrtc, cache = FakeNvrtc(), tmp_path / "cache"
    compiler, unit = Compiler(sources, nvrtc, cccl, cache), sources.unit("noun/unit.cu")
    code = compiler.compile(unit, "sm_90")
    (kept,) = cache.iterdir()
    for damage in (b"", kept.read_bytes()[:-1], b"x" * 100):
        kept.write_bytes(damage)
        assert compiler.compile(unit, "sm_90") == code
    assert nvrtc.compiled == 4


def test_without_a_writable_cache_it_compiles_and_warns(
    sources: Sources, cccl: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    compiler = Compiler(sources, FakeNvrtc(), cccl, tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "gids.cuda"):
        assert compiler.compile(sources.unit("noun/unit.cu"), "sm_90")
    assert "cannot store compiled kernels" in caplog.text
    assert "GIDS_KERNEL_CACHE" in caplog.text


def test_a_compile_error_shows_the_log(sources: Sources, cccl: Path, tmp_path: Path) -> None:
    (sources.root / "noun" / "unit.cu").write_text('extern "C" __global__ void broken() {')
    nvrtc = FakeNvrtc()
    compiler = Compiler(sources, nvrtc, cccl, tmp_path / "cache")
    with pytest.raises(RuntimeError, match=r"noun/unit.cu does not compile \(NVRTC_.*\):\nunit.cu\(1\)"):
        compiler.compile(sources.unit("noun/unit.cu"), "sm_90")
    assert set(nvrtc.programs.values()) == {"destroyed"}
    assert not (tmp_path / "cache").exists()


def test_the_target_is_the_device_or_the_newest_known_one(
    sources: Sources, cccl: Path, tmp_path: Path
) -> None:
    compiler = Compiler(sources, FakeNvrtc(), cccl, tmp_path)
    assert [compiler.target(c) for c in [(7, 5), (9, 0), (10, 0)]] == ["sm_75", "sm_90", "sm_100"]
    assert [compiler.target(c) for c in [(8, 9), (12, 1)]] == ["compute_80", "compute_100"]
    with pytest.raises(RuntimeError, match=r"capability 7\.0; CUDA 13\.4 supports 7\.5 and newer"):
        compiler.target((7, 0))


def test_the_user_chooses_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIDS_KERNEL_CACHE", "/chosen")
    assert cache_folder() == Path("/chosen")
    monkeypatch.delenv("GIDS_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/gids/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "gids" / "kernels"


def test_a_missing_cupy_names_the_package(monkeypatch: pytest.MonkeyPatch, sources: Sources) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
        open_compiler(sources, "cupy-cuda12x")


def test_the_installed_sources_are_those_of_the_repository() -> None:
    sources = installed_sources()
    for path in [*NATIVE.glob("*/*.cu"), *(NATIVE / "include").rglob("*.h")]:
        assert (sources.root / path.relative_to(NATIVE)).read_text() == path.read_text()
