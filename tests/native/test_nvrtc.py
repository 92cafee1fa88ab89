"""The headers that host and GPU share, and the kernels, compile for old and new GPUs, without a GPU.

No code depends on the number of the architecture, so two are enough. With NVRTC and CCCL from PyPI, and the
options of the product; tests/cuda/test_compiler.py has CuPy's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from gids.cuda.compiler import compile_options

NATIVE = Path(__file__).parents[2] / "native"
INCLUDE = NATIVE / "include"
OLDEST, NEWEST = 75, 120
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
KERNELS = sorted(path.relative_to(NATIVE).as_posix() for path in NATIVE.rglob("*.cu"))
REGISTERS = {
    32: "enter_window retire_window find_rows clear_set take_lines describe_misses show_counters post_round "
    "await_round check_seeds note_nodes count_neighbors leave_out_later take_neighbors mark_first sum_parts "
    "scan_parts relabel weigh_edges count_weighted",
    40: "scan_lines collect_round draw_neighbors draw_replaced",
    48: "admit_pages draw_labor count_labor",
    56: "look_up read_pages gather_packed order_rows",
    64: "gather_lines gather_host_lines gather_round fill_lines draw_least draw_weighted",
    80: "draw_weighted_replaced",
}
"""The kernels gids_… by the most registers that they may use. A multiprocessor has 65,536 registers and room
for 2,048 threads: with 32 registers all fit, with 64 half of them."""
MEASURED = (80, 90, 100)
MOST_SHARED = 4096
"""Bytes of shared memory of a block. 8 blocks on a multiprocessor have less than its 100 KB."""
TRIALS = Path(__file__).parents[1] / "cuda" / "kernels.cu"

_USAGE = re.compile(
    r"Function properties for '?(gids_\w+?)'?\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
)


class Usage(NamedTuple):
    """Registers of a thread, shared memory of a block, and bytes that a thread spills."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


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
        return self._compile(source, arch, "PTX" if ptx else "CUBIN", ptx=ptx, optimize=optimize)

    def usage(self, source: str, arch: int) -> dict[str, Usage]:
        """What the kernels of a source use on sm_`arch`, as ptxas reports it."""
        log = self._compile(source, arch, "ProgramLog", more=["--ptxas-options=-v"]).decode()
        return {
            kernel: Usage(int(registers), int(shared or 0), int(stores) + int(loads))
            for kernel, stores, loads, registers, shared in _USAGE.findall(log)
        }

    def _compile(
        self,
        source: str,
        arch: int,
        wanted: str,
        *,
        ptx: bool = False,
        optimize: bool = True,
        more: Sequence[str] = (),
    ) -> bytes:
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None)
        )
        options = [*compile_options(f"{'compute' if ptx else 'sm'}_{arch}", self._include), *more]
        if not optimize and self._version >= (12, 9):
            options.append("--Ofast-compile=max")
        encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        try:
            if self._lib.nvrtcCompileProgram(program, len(options), encoded):
                pytest.fail(f"sm_{arch}:\n{self._text(program, 'ProgramLog').decode()}", pytrace=False)
            return self._text(program, wanted)
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


def stated_registers() -> dict[str, int]:
    """The registers that each kernel may use."""
    return {f"gids_{kernel}": most for most, kernels in REGISTERS.items() for kernel in kernels.split()}


@pytest.mark.slow
@pytest.mark.parametrize("unit", KERNELS)
def test_kernels_use_the_registers_that_are_stated_and_spill_none(nvrtc: Nvrtc, unit: str) -> None:
    """As in the product, which compiles each unit alone. Each is compiled once for each architecture."""
    source, stated = (NATIVE / unit).read_text(), stated_registers()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        used = list(pool.map(lambda arch: nvrtc.usage(source, arch), MEASURED))
    kernels = set(re.findall(r"\bvoid\s+(gids_\w+)\(", source))
    for arch, of_kernels in zip(MEASURED, used, strict=True):
        print(f"sm_{arch}", of_kernels)
        assert set(of_kernels) == kernels
        for kernel, usage in of_kernels.items():
            assert usage.spilled_bytes == 0, f"{kernel} spills on sm_{arch}: {usage}"
            assert usage.shared_bytes <= MOST_SHARED, f"{kernel} on sm_{arch}: {usage}"
            assert usage.registers <= stated[kernel], f"{kernel} on sm_{arch}: {usage}"


def test_every_kernel_has_a_stated_number_of_registers() -> None:
    sources = "".join((NATIVE / unit).read_text() for unit in KERNELS)
    assert set(re.findall(r"\bvoid\s+(gids_\w+)\(", sources)) == set(stated_registers())


@pytest.mark.slow
def test_a_poll_is_relaxed_and_a_fence_follows_the_last(nvrtc: Nvrtc) -> None:
    """In the kernel whose only loop is a poll. The first sleep is longer than the others."""
    source = (NATIVE / "io/request_queue.cu").read_text()
    ptx = nvrtc.compile(source, 90, ptx=True).decode(errors="replace")
    [kernel] = re.findall(r"^\.visible \.entry gids_await_round\(.*?^}", ptx, re.MULTILINE | re.DOTALL)
    said = re.findall(r"\b(?:ld|fence)(?:\.\w+)*\.(?:relaxed|acquire|acq_rel|sc)(?:\.\w+)*", kernel)
    assert said == ["ld.relaxed.sys.b64", "fence.acq_rel.sys"]
    assert re.search(r"selp\.\w+\s+(%\w+), 40000, 4000.*?nanosleep\.u32 \1;", kernel, re.DOTALL)
