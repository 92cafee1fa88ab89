#!/usr/bin/env bash
# An environment in which DGL's GraphBolt can be imported, with gids of this clone, and the tests that need it.
#   tools/graphbolt_env.sh DIRECTORY [--dgl SOURCE] [--bench [ARGUMENT…]]
# DIRECTORY gets env/ (5.3 GB: PyPI's torch 2.2.1 brings CUDA's libraries, and needs no GPU) and what is built.
# --dgl SOURCE: a checkout of DGL newer than 2.1.0, whose OnDiskNpyArray and CPUFeatureCache are built for the benchmark
# to compare with; needs liburing, robin-map and pcg-cpp, each of which is downloaded where it is missing and apt-get
# can. --bench: bench/rows.py graphbolt ARGUMENT… after the tests. PYTHON names a Python 3.11 (default: python3.11).
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
root=$(cd "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
where=$(cd "$1" && pwd)
shift
source=""
if [[ ${1:-} == --dgl ]]; then
  source=$(cd "$2" && pwd)
  shift 2
fi
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
  pandas pydantic pyyaml packaging 'tqdm>=4.60' 'nanobind-backend>=1.0' 'pytest>=8' 'pytest-timeout>=2.3'
rm -rf "$where/wheel"
pip wheel -q --no-deps "-Cbuild-dir=$where/build" -w "$where/wheel" "$root"
pip install -q --no-deps --force-reinstall "$where"/wheel/gids_loader-*.whl

# -P: not the gids of the current directory, which is not built.
(cd "$root" && "$python" -P -m pytest -q -p no:cacheprovider tests/graphbolt)

newest=()
if [[ -n $source ]]; then
  pip install -q --no-cache-dir nvidia-cuda-cccl-cu12 # <cuda/std/semaphore>, <cuda/std/atomic>
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  missing=() installed=() run_time=liburing.so.2
  [[ -e /usr/include/liburing.h ]] || missing+=(liburing-dev liburing2)
  [[ -e /usr/include/tsl/robin_map.h ]] || missing+=(robin-map-dev)
  [[ -e /usr/include/pcg_random.hpp ]] || missing+=(libpcg-cpp-dev)
  if [[ ${#missing[@]} -gt 0 ]]; then
    mkdir -p "$where/debs"
    (cd "$where/debs" && apt-get -qq download "${missing[@]}" && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
    installed=("-I$where/debs/usr/include")
    libraries=$(dirname "$(find "$where/debs" -name "$run_time")")
    [[ ! -e $libraries/$run_time ]] || installed+=("-L$libraries" "-Wl,-rpath,$libraries")
  fi
  mkdir -p "$where/newest"
  # What the operators do not use is left out: FeatureCache::IndexSelect would need the sources of sampling.
  "${CXX:-c++}" -O3 -std=c++20 -shared -fPIC -w -fvisibility=hidden -ffunction-sections -Wl,--gc-sections \
    -DHAVE_LIBRARY_LIBURING -D_GLIBCXX_USE_CXX11_ABI=0 "-I$source/graphbolt/include" "-I$source/graphbolt/src" \
    "-I$packages/torch/include" "-I$packages/torch/include/torch/csrc/api/include" \
    "-I$packages/nvidia/cuda_cccl/include" "${installed[@]}" "$root/bench/graphbolt_newest.cpp" \
    "$source"/graphbolt/src/{cnumpy,utils,cache_policy,partitioned_cache_policy,feature_cache}.cc \
    -o "$where/newest/graphbolt_newest.so" "-L$packages/torch/lib" -ltorch -ltorch_cpu -lc10 "-l:$run_time"
  cp "$source/python/dgl/graphbolt/impl/cpu_feature_cache.py" "$where/newest"
  newest=(--newest "$where/newest")
fi

if [[ ${1:-} == --bench ]]; then
  "$python" "$root/bench/rows.py" graphbolt "${newest[@]}" "${@:2}"
fi
