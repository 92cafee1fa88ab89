"""`gids info --system`, with and without each item."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError

import pytest
from commands import gids

from gids.cli.system import Item, as_table, describe_system
from gids.cuda.driver import Device, ask_driver


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


class FakeCuda:
    """libcuda with H-class devices; init: what cuInit returns."""

    def __init__(self, devices=1, init=0):
        self.devices, self.init = devices, init

    def __call__(self, name):
        assert name == "libcuda.so.1"
        return self

    def cuDriverGetVersion(self, out):
        return self.put(out, 13010)

    def cuInit(self, flags):
        return self.init

    def cuGetErrorString(self, status, out):
        return self.put(out, f"failure {status}".encode())

    def cuDeviceGetCount(self, out):
        return self.put(out, self.devices)

    def cuDeviceGet(self, out, index):
        return self.put(out, index)

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H%d" % (100 + device.value)
        return 0

    def cuDeviceTotalMem_v2(self, out, device):
        return self.put(out, 80_000_000_000)

    def cuDeviceGetAttribute(self, out, number, device):
        return self.put(out, {75: 9, 76: 0}[number])

    @staticmethod
    def put(out, value):
        out._obj.value = value  # type: ignore[attr-defined]
        return 0


def machine(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


BARE = {"proc/meminfo": "MemTotal:       8000000 kB\nMemAvailable:   6000000 kB\n"}
NO_GDS = "GPUDirect Storage does not work: no nvidia-fs"


def look(root, load, path=None, kvikio=NO_GDS):
    items = describe_system(path or root, root=root, load=load, try_kvikio=lambda _: kvikio)  # type: ignore[arg-type]
    return {i.item: i for i in items}


@pytest.fixture
def packages(monkeypatch):
    """The installed packages; none."""
    installed: dict[str, str] = {}

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("gids.bench.machine.version", version)
    return installed


def test_a_machine_without_anything_is_described(tmp_path, packages):
    found = look(tmp_path, no_library)
    assert found["memory"].found == "unknown: not in /proc/meminfo"
    assert found["CUDA driver"] == Item("CUDA driver", "no NVIDIA driver (libcuda.so.1 not found)")
    for name in ("torch", "dgl", "cupy", "kvikio"):
        assert found[name] == Item(name, "not installed"), "nothing to advise without a GPU"
    assert not [name for name in found if name.startswith("CUDA device")]
    assert found[f"GPUDirect Storage at {tmp_path}"].found == "not tried: no CUDA device"
    assert list(tmp_path.iterdir()) == [], "the file that was tried is gone"
    why = look(tmp_path, no_library, tmp_path / "none")[f"direct I/O at {tmp_path}/none"].found
    assert why.startswith("not tried: ")
    assert why.endswith("No such file or directory")


def test_a_machine_with_everything_needs_no_advice(tmp_path, packages):
    packages |= {"torch": "2.13.0+cu130", "cupy-cuda13x": "13.6.0", "kvikio-cu13": "26.10.0"}
    root = machine(tmp_path, BARE)
    found = look(root, FakeCuda(), kvikio="")
    gds = f"GPUDirect Storage at {root}"
    assert found[gds].found == "yes, by kvikio"
    assert found["memory"].found == "8.2 GB, 6.1 GB available"
    assert found["CUDA driver"].found == "CUDA 13.1"
    assert found["CUDA device 0"].found == "NVIDIA H100, 80.0 GB, compute capability 9.0"
    assert found["cupy"].found == "13.6.0"
    names = ["memory", "CUDA driver", "torch", "cupy", "kvikio", "CUDA device 0", gds]
    assert [found[n].advice for n in names] == [""] * len(names)


def test_advice_names_what_a_gpu_needs(tmp_path, packages):
    packages |= {"torch": "2.13.0+cpu"}
    found = look(machine(tmp_path, BARE), FakeCuda(devices=2))
    assert "CUDA build" in found["torch"].advice
    gds = f"GPUDirect Storage at {tmp_path}"
    assert found[gds].found == "no: GPUDirect Storage does not work: no nvidia-fs"
    assert "load nvidia-fs" in found[gds].advice
    for name in ("cupy", "kvikio"):
        assert found[name].advice == "pip install 'gids-loader[cuda13]' (CUDA 12: 'gids-loader[cuda12]')"


def test_driver_that_does_not_start_gives_the_reason():
    assert ask_driver(FakeCuda(init=802)).fault == "the driver does not start: failure 802"
    assert "start it by spawn" in ask_driver(FakeCuda(init=3)).fault, "in a forked process"
    none = ask_driver(FakeCuda(devices=0))
    assert (none.version, none.devices, none.fault) == ((13, 1), [], "the driver has no device")
    device = Device("NVIDIA H100", 80_000_000_000, (9, 0))
    assert ask_driver(FakeCuda()).devices == [device]


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("0::/jobs/7", "jobs/memory.max"),
        ("5:memory:/jobs/7", "memory/jobs/7/memory.limit_in_bytes"),
    ],
)
def test_limit_of_the_control_group_is_shown(tmp_path, packages, group, name):
    name = f"sys/fs/cgroup/{name}"
    files = {"proc/self/cgroup": f"3:cpu:/\n{group}\n", name: "1000000000\n"}
    found = look(machine(tmp_path, BARE | files), no_library)["memory"]
    assert found.found == "8.2 GB, 6.1 GB available, limited to 1.0 GB"
    assert "control group" in found.advice
    for fine in ("max\n", "9223372036854771712\n"):
        assert look(machine(tmp_path, {name: fine}), no_library)["memory"].advice == ""


def test_missing_direct_io_and_io_uring_give_a_reason(tmp_path, packages, monkeypatch):
    answer = {
        "io_uring": False,
        "io_uring_note": "refused by a seccomp filter",
        "direct": False,
        "direct_note": "Invalid argument",
        "alignment": 1,
        "file_system": "tmpfs",
        "memlock_bytes": -1,
    }
    monkeypatch.setattr("gids.io.probe", lambda path: answer)
    name = f"direct I/O at {tmp_path}"
    found = look(tmp_path, no_library)
    assert found[name].found == "tmpfs, no O_DIRECT (Invalid argument)"
    assert "local file system" in found[name].advice
    assert found["io_uring"].found == "no: refused by a seccomp filter"
    assert "io_uring_disabled" in found["io_uring"].advice
    assert "`ulimit -l`" in found["io_uring"].advice
    answer |= {"direct": True, "alignment": 512, "file_system": "ext4", "io_uring_note": ""}
    found = look(tmp_path, no_library)
    assert found[name] == Item(name, "ext4, O_DIRECT, alignment 512 B")
    assert found["io_uring"] == Item("io_uring", "yes")


def test_the_command_runs_on_this_machine(tmp_path, capsys):
    gids("info", "--system", tmp_path, "--json")
    found = json.loads(capsys.readouterr().out)
    assert {"kernel", "cores", "memory", "io_uring", "torch"} <= {i["item"] for i in found}
    assert all(i.keys() == {"item", "found", "advice"} for i in found)
    items = [Item("kernel", "Linux 5.4", "upgrade"), Item("cores", "2 of 2")]
    assert list(as_table(items)) == ["kernel  Linux 5.4", "        -> upgrade", "cores   2 of 2"]
