"""The headers that host and GPU share, and the kernels, compile for every GPU generation, without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

NATIVE = Path(__file__).parents[2] / "native"
INCLUDE = NATIVE / "include"
ARCHS = [75, 80, 86, 89, 90, 100, 120]
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
KERNELS = sorted(path.relative_to(NATIVE).as_posix() for path in NATIVE.rglob("*.cu"))


@pytest.fixture(scope="module")
def nvrtc() -> ModuleType:
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc as module

    try:
        module.getVersion()
    except Exception as error:
        pytest.skip(f"CuPy finds no NVRTC: {error}")
    return module


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    import cupy

    bundled = Path(cupy.__file__).parent / "_core/include/cupy/_cccl"
    found = [bundled / name for name in ("libcudacxx", "cub", "thrust")]
    pathfinder = pytest.importorskip("cuda.pathfinder")
    cudart = pathfinder.find_nvidia_header_directory("cudart")
    if cudart is None:
        pytest.skip("the CUDA run-time headers are not installed")
    return ("-std=c++20", "-default-device", f"-I{INCLUDE}", *(f"-I{d}" for d in (*found, cudart)))


def compile_for(nvrtc: ModuleType, source: str, arch: int, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(source, "test.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch=sm_{arch}", *options))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        pytest.fail(f"sm_{arch}: {error}\n{nvrtc.getProgramLog(program)}", pytrace=False)
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_headers_compile_for_the_gpu(nvrtc: ModuleType, options: tuple[str, ...], arch: int) -> None:
    assert HEADERS
    source = "".join(f'#include "{header}"\n' for header in HEADERS)
    source += "__global__ void size(unsigned long long* out) { *out = gids::align_up(*out, 512); }\n"
    cubin = compile_for(nvrtc, source, arch, options)
    assert cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("header", HEADERS)
def test_each_shared_header_stands_alone(nvrtc: ModuleType, options: tuple[str, ...], header: str) -> None:
    assert compile_for(nvrtc, f'#include "{header}"\n', 90, options)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_compile_for_the_gpu(
    nvrtc: ModuleType, options: tuple[str, ...], kernel: str, arch: int
) -> None:
    source = (NATIVE / kernel).read_text()
    assert compile_for(nvrtc, source, arch, options)[:4] == b"\x7fELF"
