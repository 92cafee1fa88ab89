"""The headers that host and GPU share, and the kernels, compile for old and new GPUs, without a GPU.

All units are one program, as headers take most of the time. The emulator and tests/cuda/test_compiler.py
compile each alone. With NVRTC and CCCL from PyPI, and the options of the product.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
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
    32: "enter_window retire_window find_rows clear_set take_lines describe_misses show_counters "
    "await_round check_seeds note_nodes count_neighbors leave_out_later take_neighbors mark_first sum_parts "
    "scan_parts relabel weigh_edges count_weighted",
    40: "scan_lines post_round draw_replaced",
    48: "admit_pages draw_neighbors draw_labor count_labor",
    56: "look_up order_rows",
    64: "gather_annex keep_rows gather_lines gather_host_lines take_round draw_least draw_weighted",
    80: "draw_weighted_replaced",
}
"""The kernels gids_… by the most registers that they may use. A multiprocessor has 65,536 registers and room
for 2,048 threads: with 32 registers all fit, with 64 half of them."""
MEASURED = (90, 100)
SPILLED = {("gids_take_round", 90): 32, ("gids_take_round", 100): 32}
"""Bytes, where that is cheaper than half of the threads: a finite value that became infinite is noted."""
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

    def usage(self, source: str, arch: int) -> dict[str, Usage]:
        """What the kernels of a source use on sm_`arch`, as ptxas reports it."""
        log = self.compile(source, f"sm_{arch}", "ProgramLog", "--ptxas-options=-v").decode()
        return {
            kernel: Usage(int(registers), int(shared or 0), int(stores) + int(loads))
            for kernel, stores, loads, registers, shared in _USAGE.findall(log)
        }

    def compile(self, source: str, target: str, wanted: str, *more: str) -> bytes:
        """What is wanted: "CUBIN", "PTX" or "ProgramLog". Fails the test with the compiler's log."""
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None)
        )
        options = [*compile_options(target, self._include), *more]
        encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        try:
            if self._lib.nvrtcCompileProgram(program, len(options), encoded):
                pytest.fail(f"{target}:\n{self._text(program, 'ProgramLog').decode()}", pytrace=False)
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


@pytest.fixture(scope="module")
def program() -> str:
    """All headers and units. Each unit is in a namespace: helpers of several may have one name."""
    lines = [f'#include "{header}"' for header in HEADERS]
    for number, unit in enumerate([*KERNELS, TRIALS]):
        lines.append(f"namespace part_{number} {{")
        for line in (NATIVE / unit).read_text().splitlines():
            lines.insert(0, line) if line.startswith("#include") else lines.append(line)
        lines.append("}")
    return "\n".join(lines)


@pytest.mark.parametrize("arch", [OLDEST, pytest.param(NEWEST, marks=pytest.mark.slow)])
def test_headers_and_kernels_compile(nvrtc: Nvrtc, program: str, arch: int) -> None:
    code = nvrtc.compile(program, f"sm_{arch}", "CUBIN", "--Ofast-compile=max")
    assert code.startswith(b"\x7fELF")


def stated_registers() -> dict[str, int]:
    """The registers that each kernel may use."""
    return {f"gids_{kernel}": most for most, kernels in REGISTERS.items() for kernel in kernels.split()}


@pytest.mark.slow
@pytest.mark.parametrize("arch", MEASURED)
def test_kernels_use_the_registers_that_are_stated_and_spill_none(
    nvrtc: Nvrtc, program: str, arch: int
) -> None:
    used, stated = nvrtc.usage(program, arch), stated_registers()
    print(used)
    assert used.keys() == stated.keys()
    for kernel, usage in used.items():
        assert usage.spilled_bytes <= SPILLED.get((kernel, arch), 0), f"{kernel} spills: {usage}"
        assert usage.shared_bytes <= MOST_SHARED, f"{kernel}: {usage}"
        assert usage.registers <= stated[kernel], f"{kernel}: {usage}"


def test_every_kernel_has_a_stated_number_of_registers() -> None:
    sources = "".join((NATIVE / unit).read_text() for unit in KERNELS)
    assert set(re.findall(r"\bvoid\s+(gids_\w+)\(", sources)) == set(stated_registers())


@pytest.mark.slow
def test_a_poll_is_relaxed_and_a_fence_follows_the_last(nvrtc: Nvrtc) -> None:
    """In the kernel whose only loop is a poll. The first sleep is longer than the others."""
    source = (NATIVE / "io/request_queue.cu").read_text()
    ptx = nvrtc.compile(source, "compute_90", "PTX").decode(errors="replace")
    [kernel] = re.findall(r"^\.visible \.entry gids_await_round\(.*?^}", ptx, re.MULTILINE | re.DOTALL)
    said = re.findall(r"\b(?:ld|fence)(?:\.\w+)*\.(?:relaxed|acquire|acq_rel|sc)(?:\.\w+)*", kernel)
    assert said == ["ld.relaxed.sys.b64", "fence.acq_rel.sys"]
    assert re.search(r"selp\.\w+\s+(%\w+), 40000, 4000.*?nanosleep\.u32 \1;", kernel, re.DOTALL)
