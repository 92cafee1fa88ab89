#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: docs/gpu-check.md says what.
#   tools/gpu_check.sh [--part checks|figures|papers] [--out DIR] [--scratch DIR] [--quick] [--pack FILE.tar]
# PYTHON names the interpreter whose torch, CuPy and pytest are used (default: python3).
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
