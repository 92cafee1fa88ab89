"""The headers that host and GPU share, and the kernels, compile for old and new GPUs, without a GPU.

All units are one program, as headers take most of the time. The emulator and tests/cuda/test_compiler.py
compile each alone. With NVRTC and CCCL from PyPI, and the compiler and the cache of the product.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gids.cuda.compiler import Compiler, Sources, Unit

NATIVE = Path(__file__).parents[2] / "native"
SOURCES = Sources(NATIVE)
KERNELS = sorted(path.relative_to(NATIVE).as_posix() for path in NATIVE.rglob("*.cu"))
TRIALS = Path(__file__).parents[1] / "cuda" / "kernels.cu"
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
SPILLED = {"gids_take_round": 32}
"""Bytes, where that is cheaper than half of the threads: a finite value that became infinite is noted."""
MOST_SHARED = 4096
"""Bytes of shared memory of a block. 8 blocks on a multiprocessor have less than its 100 KB."""

_USAGE = re.compile(
    r"Function properties for '?(gids_\w+?)'?\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
)


class Nvrtc:
    """The CUDA run-time compiler, which needs neither GPU nor driver: its library from PyPI, by the names
    of CuPy's binding. options: further ones. log: of the last program."""

    class NVRTCError(Exception):
        pass

    def __init__(self, package: Path, *options: str) -> None:
        self._lib = ctypes.CDLL(str(next((package / "lib").glob("libnvrtc.so.*"))))
        self.options = (f"-I{package / 'include'}", *options)

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def createProgram(self, text: str, name: str, headers: object, names: object) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        create = self._lib.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:
        encoded = [option.encode() for option in (*options, *self.options)]
        words = (ctypes.c_char_p * len(encoded))(*encoded)
        error = self._lib.nvrtcCompileProgram(program, len(encoded), words)
        self.log = self._text(program, "ProgramLog").decode()
        self._check(error)

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self.log

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._text(program, "CUBIN")

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        return self._text(program, "PTX")

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._check(self._lib.nvrtcDestroyProgram(ctypes.byref(program)))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, error: int) -> None:
        if error:
            raise self.NVRTCError(f"NVRTC error {error}")


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of NVRTC and CCCL."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(d) / "cu13" for d in spec.submodule_search_locations] if spec else []  # type: ignore[union-attr]
    for package in packages:
        if any((package / "lib").glob("libnvrtc.so.*")) and (package / "include" / "cccl").is_dir():
            return package
    pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-cccl")


@pytest.fixture(scope="module")
def program() -> Unit:
    """All headers and units. Each unit is in a namespace: helpers of several may have one name."""
    lines = [f'#include "{path.relative_to(SOURCES.include).as_posix()}"' for path in SOURCES.headers()]
    for number, unit in enumerate([*KERNELS, TRIALS]):
        lines.append(f"namespace part_{number} {{")
        for line in (NATIVE / unit).read_text().splitlines():
            lines.insert(0, line) if line.startswith("#include") else lines.append(line)
        lines.append("}")
    return Unit("all.cu", NATIVE / "all.cu", "\n".join(lines), ())


def compiler_of(nvrtc: Nvrtc, package: Path, folder: Path) -> Compiler:
    return Compiler(SOURCES, nvrtc, package / "include" / "cccl", folder)


@pytest.mark.parametrize("target", ["compute_75", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_headers_and_kernels_compile(
    package: Path, program: Unit, target: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """For the oldest GPU to PTX, for the newest one to machine code. Kept in pytest's cache."""
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    folder = request.config.cache.mkdir("nvrtc") if has_cache else tmp_path
    code = compiler_of(Nvrtc(package, "--Ofast-compile=max"), package, folder).compile(program, target)
    assert b"gids_gather_lines" in code


def stated_registers() -> dict[str, int]:
    """The registers that each kernel may use."""
    return {f"gids_{kernel}": most for most, kernels in REGISTERS.items() for kernel in kernels.split()}


def test_every_kernel_has_a_stated_number_of_registers() -> None:
    sources = "".join((NATIVE / unit).read_text() for unit in KERNELS)
    assert set(re.findall(r"\bvoid\s+(gids_\w+)\(", sources)) == set(stated_registers())


@pytest.mark.slow
def test_kernels_use_the_registers_that_are_stated_and_spill_none(
    package: Path, program: Unit, tmp_path: Path
) -> None:
    """As ptxas reports it for sm_90."""
    nvrtc = Nvrtc(package, "--ptxas-options=-v")
    compiler_of(nvrtc, package, tmp_path).compile(program, "sm_90")
    used, stated = _USAGE.findall(nvrtc.log), stated_registers()
    print(used)
    assert {kernel for kernel, *_ in used} == stated.keys()
    for kernel, stores, loads, registers, shared in used:
        assert int(stores) + int(loads) <= SPILLED.get(kernel, 0), f"{kernel} spills"
        assert int(shared or 0) <= MOST_SHARED, kernel
        assert int(registers) <= stated[kernel], f"{kernel} uses {registers} registers"


@pytest.mark.slow
def test_a_poll_is_relaxed_and_a_fence_follows_the_last(package: Path, tmp_path: Path) -> None:
    """In the kernel whose only loop is a poll. The first sleep is longer than the others."""
    compiler = compiler_of(Nvrtc(package), package, tmp_path)
    ptx = compiler.compile(SOURCES.unit("io/request_queue.cu"), "compute_90").decode(errors="replace")
    [kernel] = re.findall(r"^\.visible \.entry gids_await_round\(.*?^}", ptx, re.MULTILINE | re.DOTALL)
    said = re.findall(r"\b(?:ld|fence)(?:\.\w+)*\.(?:relaxed|acquire|acq_rel|sc)(?:\.\w+)*", kernel)
    assert said == ["ld.relaxed.sys.b64", "fence.acq_rel.sys"]
    assert re.search(r"selp\.\w+\s+(%\w+), 40000, 4000.*?nanosleep\.u32 \1;", kernel, re.DOTALL)
