#!/usr/bin/env bash
# An environment in which DGL's GraphBolt can be imported, with gids of this clone, and the tests that need it.
#   tools/graphbolt_env.sh DIRECTORY [--bench [ARGUMENT…]]
# DIRECTORY gets env/ (5.3 GB: PyPI's torch 2.2.1 brings CUDA's libraries, and needs no GPU) and what is built.
# --bench: bench/rows.py graphbolt ARGUMENT… after the tests. PYTHON names a Python 3.11 (default: python3.11).
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
root=$(cd "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
where=$(cd "$1" && pwd)
shift
if [[ $# -gt 0 && $1 != --bench ]]; then
  echo "$0: unknown argument $1" >&2
  exit 2
fi

[[ -d $where/env ]] || "${PYTHON:-python3.11}" -m venv "$where/env"
python=$where/env/bin/python
export TMPDIR=$where/tmp DGLBACKEND=pytorch
mkdir -p "$TMPDIR"
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
# The last versions that DGL 2.1.0 and its GraphBolt, built for torch 2.0.0 to 2.2.1, work with.
pip install -q --no-cache-dir torch==2.2.1 dgl==2.1.0 'torchdata<0.8' 'numpy<2' 'setuptools<70' \
  pandas pydantic pyyaml packaging 'tqdm>=4.60' 'nanobind-backend>=1.0' 'pytest>=8.2' 'pytest-timeout>=2.3' \
  'pytest-xdist>=3.8'
rm -rf "$where/wheel"
pip wheel -q --no-deps "--config-settings=build-dir=$where/build" -w "$where/wheel" "$root"
pip install -q --no-deps --force-reinstall "$where"/wheel/gids_loader-*.whl

# -P: not the gids of the current directory, which is not built.
(cd "$root" && "$python" -P -m pytest -q -p no:cacheprovider tests/graphbolt)

if [[ ${1:-} == --bench ]]; then
  "$python" "$root/bench/rows.py" graphbolt "${@:2}"
fi
