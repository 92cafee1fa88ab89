"""`gpu_check.sh --pack`: the archive is small, and the check runs from it without network."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu_check
import gpu_pack

from gids import _core

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "https_proxy": "http://127.0.0.1:9"}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git clone of five files. Wheels are empty files instead of built and downloaded ones."""
    for name in (
        "gids/__init__.py",
        "docs/api.md",
        "docs/schema.json",
        "tools/gpu_check.sh",
        "tests/test_a.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "notes.txt").write_text("not tracked")
    for command in (["init", "-q"], ["add", "gids", "docs", "tools", "tests"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(gpu_pack, "_build", lambda root, wheels: (wheels / "gids-1.whl").touch())
    monkeypatch.setattr(gpu_pack, "_download", lambda wheels: (wheels / "tqdm-1.whl").touch())
    return tmp_path


def test_the_archive_holds_tracked_files_wheels_and_commit(repository):
    (repository / "tests/test_a.py").write_text("changed")
    archive = repository / "x.tar"
    assert gpu_pack.pack(repository, archive, "abc") == archive.stat().st_size
    with tarfile.open(archive) as tar:
        names = [
            "docs/schema.json",
            "tests/test_a.py",
            "tools/gpu_check.sh",
            "wheels/gids-1.whl",
            "wheels/tqdm-1.whl",
        ]
        names.append("wheels/commit.txt")
        assert tar.getnames() == [f"gids-gpu-check/{name}" for name in names]
        files = {name: tar.extractfile(f"gids-gpu-check/{name}") for name in (names[1], names[-1])}
        assert [file.read() for file in files.values() if file] == [b"changed", b"abc"]


build = gpu_pack._build


def build_without_compiling(root, wheels):
    """In place of gpu_pack._build, which compiles for a minute: the native code is that in use."""
    build(root, wheels)
    [wheel] = wheels.glob("gids_loader-*.whl")
    core = Path(_core.__file__)
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        for file in (core, *core.parent.glob("kernels/**/*.*")):
            archive.write(file, f"gids/{file.relative_to(core.parent)}")


def link_installed(name, site, seen):
    """Link an installed distribution, and those that it requires, into another site-packages folder."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return
    seen.add(key)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        if not (site / top).exists():
            (site / top).symlink_to(found.locate_file(top))
    for requirement in found.requires or []:
        if "extra ==" not in requirement:
            link_installed(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], site, seen)


@pytest.mark.slow
def test_the_packed_check_runs_without_network_in_a_fresh_environment(tmp_path, monkeypatch):
    """The environment has torch and NumPy, neither pytest nor anything that builds gids."""
    monkeypatch.setattr(gpu_pack, "_build", build_without_compiling)
    monkeypatch.setenv("SKBUILD_WHEEL_CMAKE", "false")
    monkeypatch.setenv("SKBUILD_WHEEL_PY_API", "py3")
    archive, environment = tmp_path / "check.tar", tmp_path / "venv"
    assert gpu_check.main(["--pack", str(archive)]) == 0
    assert archive.stat().st_size < 10_000_000
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    seen: set[str] = set()
    for name in ("torch", "numpy", "pip"):
        link_installed(name, site, seen)
    python = environment / "bin/python"
    absent = ["pytest", "gids", "nanobind", "tqdm", "dgl"]
    probe = f"import importlib.util; print(*filter(importlib.util.find_spec, {absent}))"
    assert subprocess.run([python, "-P", "-c", probe], capture_output=True, text=True).stdout == "\n"
    unshare = ["unshare", "--map-root-user", "--net"]
    alone = shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True)
    command = [*(unshare if alone and alone.returncode == 0 else []), "bash"]
    command += [f"{tmp_path}/gids-gpu-check/tools/gpu_check.sh", "--out", f"{tmp_path}/out"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # a machine with a GPU would go on to its tests
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ | OFFLINE | hidden | {"PYTHON": str(python)}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.match(r"no GPU: .+", done.stdout.splitlines()[-1])
    found = json.loads((tmp_path / "out/gpu-check.json").read_text())
    steps = {step["name"]: step for step in found["steps"]}
    assert (steps["machine"]["result"], steps["build"]["result"]) == ("passed", "passed"), done.stdout
    assert re.match(r"no GPU: tests of \d\d files", steps["tests"]["note"]), done.stdout
    assert found["machine"]["commit"] == gpu_check.commit()
