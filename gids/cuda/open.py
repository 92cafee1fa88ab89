"""open_device: from a name to a CUDA device, with an error for each thing that can be missing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from gids.cuda.compiler import Compiler, open_compiler
from gids.cuda.cuda_device import CudaDevice
from gids.cuda.driver import Driver, ask_driver
from gids.cuda.libcuda import Libcuda
from gids.cuda.sources import installed_sources
from gids.errors import NoDeviceError

_lock = threading.Lock()
_open: dict[int, CudaDevice] = {}


def open_cuda(device: str | torch.device | None, *, load: Callable[[str], Any] = ctypes.CDLL) -> CudaDevice:
    """gids.cuda.open_device. load: opens a shared library."""
    index = _index(device)
    toolkit = _torch_toolkit()
    driver = ask_driver(load)
    _check_driver(driver, toolkit, "torch was built with")
    if index is None:
        index = torch.cuda.current_device()
    if index >= len(driver.devices):
        have = ", ".join(f"cuda:{i} {d.name}" for i, d in enumerate(driver.devices))
        raise ValueError(
            f"no device cuda:{index}: the driver has {have}; CUDA_VISIBLE_DEVICES may hide others"
        )
    with _lock:
        if index not in _open:
            cupy = "cupy-cuda12x" if toolkit[0] == 12 else "cupy-cuda13x"
            compiler = open_compiler(installed_sources(), cupy)
            _check_driver(driver, compiler.version, "CuPy compiles with")
            _check_target(driver, index, compiler)
            _start_torch()
            library = Libcuda(load)
            library.call("cuInit", 0)
            _open[index] = CudaDevice(index, library, compiler)
        return _open[index]


def _index(device: str | torch.device | None) -> int | None:
    try:
        wanted = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'cuda' or 'cuda:0' (got {device!r})") from error
    if wanted.type != "cuda":
        raise ValueError(f"device must be 'cuda' or 'cuda:0' (got {str(wanted)!r})")
    return wanted.index


def _torch_toolkit() -> tuple[int, int]:
    """The CUDA version that torch was built with. Raises NoDeviceError without CUDA."""
    version = torch.version.cuda
    if version is None:
        raise NoDeviceError(
            f"device='cuda' needs a CUDA build of torch; this is {torch.__version__}: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _start_torch() -> None:
    start: Callable[[], None] = torch.cuda.init
    start()


def _check_driver(driver: Driver, toolkit: tuple[int, int], whose: str) -> None:
    """Raise NoDeviceError without a driver or device, or if the driver's major version is too old."""
    if driver.version is not None and driver.version[0] < toolkit[0]:
        raise NoDeviceError(
            f"the NVIDIA driver supports CUDA {driver.version[0]}.{driver.version[1]}; {whose} CUDA "
            f"{toolkit[0]}.{toolkit[1]}: update the driver, or install packages for CUDA {driver.version[0]}"
        )
    if driver.fault:
        raise NoDeviceError(f"no CUDA device: {driver.fault}; run `gids info --system` for details")


def _check_target(driver: Driver, index: int, compiler: Compiler) -> None:
    """Raise NoDeviceError if the device needs PTX and its driver is too old for the toolkit's PTX."""
    device = driver.devices[index]
    if not compiler.target(device.capability).startswith("compute_"):
        return
    if driver.version is not None and driver.version < compiler.version:
        (old, old_minor), (new, new_minor) = driver.version, compiler.version
        package = "nvidia-cuda-nvrtc-cu12" if old == 12 else "nvidia-cuda-nvrtc"
        raise NoDeviceError(
            f"{device.name} needs PTX from NVRTC, which has CUDA {new}.{new_minor}; the NVIDIA driver "
            f"supports PTX of CUDA {old}.{old_minor} and older: update the driver, or "
            f"pip install '{package}=={old}.{old_minor}.*'"
        )
