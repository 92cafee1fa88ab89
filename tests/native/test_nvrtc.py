"""The headers that host and GPU share, and the kernels, compile for old and new GPUs, without a GPU.

No code depends on the number of the architecture, so two are enough. With NVRTC and CCCL from PyPI, and the
options of the product; tests/cuda/test_compiler.py has CuPy's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
from pathlib import Path

import pytest

from gids.cuda.compiler import compile_options

NATIVE = Path(__file__).parents[2] / "native"
INCLUDE = NATIVE / "include"
OLDEST, NEWEST = 75, 120
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
KERNELS = sorted(path.relative_to(NATIVE).as_posix() for path in NATIVE.rglob("*.cu"))
TRIALS = Path(__file__).parents[1] / "cuda" / "kernels.cu"


class Nvrtc:
    """The CUDA run-time compiler, which needs neither GPU nor driver: its library from PyPI, by ctypes."""

    def __init__(self, package: Path) -> None:
        self._lib = ctypes.CDLL(str(next((package / "lib").glob("libnvrtc.so.*"))))
        include = package / "include"
        self._include = [INCLUDE, include / "cccl", include]
        version = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(*map(ctypes.byref, version)))
        self._version = version[0].value, version[1].value

    def compile(self, source: str, arch: int, *, ptx: bool = False, optimize: bool = True) -> bytes:
        """A cubin for sm_`arch`, or PTX; fails the test with the compiler's log."""
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None)
        )
        options = compile_options(f"{'compute' if ptx else 'sm'}_{arch}", self._include)
        if not optimize and self._version >= (12, 9):
            options.append("--Ofast-compile=max")
        encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        try:
            if self._lib.nvrtcCompileProgram(program, len(options), encoded):
                pytest.fail(f"sm_{arch}:\n{self._text(program, 'ProgramLog').decode()}", pytrace=False)
            return self._text(program, "PTX" if ptx else "CUBIN")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, error: int) -> None:
        assert error == 0, f"NVRTC error {error}"


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(d) / "cu13" for d in spec.submodule_search_locations] if spec else []  # type: ignore[union-attr]
    for package in packages:
        if any((package / "lib").glob("libnvrtc.so.*")) and (package / "include" / "cccl").is_dir():
            return Nvrtc(package)
    pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-cccl")


def part(number: int, source: str) -> tuple[str, str]:
    """Its headers, and the rest in a namespace of its own: helpers of several files may have one name."""
    lines = source.splitlines()
    own = "\n".join(line for line in lines if not line.startswith("#include"))
    return (
        "\n".join(line for line in lines if line.startswith("#include")),
        f"namespace part_{number} {{\n{own}\n}}",
    )


@pytest.mark.parametrize("arch", [OLDEST, pytest.param(NEWEST, marks=pytest.mark.slow)])
def test_headers_and_kernels_compile(nvrtc: Nvrtc, arch: int) -> None:
    """All in one program, which takes a third of the time of one for each."""
    sources = [(NATIVE / kernel).read_text() for kernel in KERNELS]
    parts = [part(*each) for each in enumerate([*sources, TRIALS.read_text()])]
    assert HEADERS
    headers = [f'#include "{header}"' for header in HEADERS]
    program = "\n".join([*headers, *(head for head, _ in parts), *(own for _, own in parts)])
    assert nvrtc.compile(program, arch, optimize=False).startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_compiles_alone_as_in_the_product(nvrtc: Nvrtc, kernel: str) -> None:
    """Optimized, which takes most of the time."""
    assert nvrtc.compile((NATIVE / kernel).read_text(), 90).startswith(b"\x7fELF")


@pytest.mark.slow
def test_kernels_that_poll_fit_blocks_of_1024_threads(nvrtc: Nvrtc) -> None:
    source = (NATIVE / "io/request_queue.cu").read_text()
    assert 0 < registers(nvrtc.compile(source, 80), "gids_read_pages") <= 64


@pytest.mark.slow
def test_a_poll_is_relaxed_and_a_fence_follows_the_last(nvrtc: Nvrtc) -> None:
    """In the kernel whose only loop is a poll. The first sleep is longer than the others."""
    source = (NATIVE / "io/request_queue.cu").read_text()
    ptx = nvrtc.compile(source, 90, ptx=True).decode(errors="replace")
    [kernel] = re.findall(r"^\.visible \.entry gids_await_round\(.*?^}", ptx, re.MULTILINE | re.DOTALL)
    said = re.findall(r"\b(?:ld|fence)(?:\.\w+)*\.(?:relaxed|acquire|acq_rel|sc)(?:\.\w+)*", kernel)
    assert said == ["ld.relaxed.sys.b64", "fence.acq_rel.sys"]
    assert re.search(r"selp\.\w+\s+(%\w+), 40000, 4000.*?nanosleep\.u32 \1;", kernel, re.DOTALL)


def registers(cubin: bytes, kernel: str) -> int:
    """Registers of a thread: up to sm_89, the top byte of sh_info of the kernel's section."""
    sections, count, names = (
        struct.unpack_from(f, cubin, at)[0] for f, at in (("<Q", 40), ("<H", 60), ("<H", 62))
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections + 64 * i) for i in range(count)]
    for header in headers:
        name = cubin[headers[names][4] + header[0] :].split(b"\0", 1)[0]
        if name == f".text.{kernel}".encode():
            return int(header[7] >> 24)
    pytest.fail(f"no kernel {kernel}")
