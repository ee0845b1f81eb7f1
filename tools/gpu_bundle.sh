#!/usr/bin/env bash
# Collect what a GPU machine without a network needs beside PyTorch and transformers: wheels of every
# member of the workspace as it is now, and of the third-party packages below, in the versions of this
# environment; and the recordings of the real server that tests/test_sglang_recordings.py reads, where
# DRL_GOLDEN or ../shared/golden has them. tools/gpu_check.sh and tools/gpu_bench.sh use them there.
#
# usage: tools/gpu_bundle.sh [OUT] [PACKAGE...]      OUT is .gpu unless named; PACKAGE: more of this environment
#   PYTHON          interpreter whose environment is copied (.venv/bin/python)
#   PYTHON_VERSION  Python of the GPU machine (3.12)
#   LIMIT_MIB       largest size of the bundle (58)
#   DRL_GOLDEN      folder of the recordings (../shared/golden)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.gpu}
shift || true
python=${PYTHON:-.venv/bin/python}
target=${PYTHON_VERSION:-3.12}
packages=(diffusers pydantic pydantic-core annotated-types typing-inspection tomli-w rapidfuzz pytest-xdist execnet "$@")

rm -rf "$out/wheels" "$out/golden"
mkdir -p "$out/wheels"

members=(./core ./cli ./plugins/*/*/)
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$out/wheels" "${members[@]%/}"

pins=()
for package in "${packages[@]}"; do
  pins+=("$package==$("$python" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$package")")
done
platforms=()
for glibc in 17 24 26 27 28 31 34 35; do  # pip matches these names exactly, so an older one is not implied
  platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
  --python-version "$target" "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
  --dest "$out/wheels" "${pins[@]}"

recordings=${DRL_GOLDEN:-../shared/golden}/sglang
if [ -d "$recordings" ]; then
  mkdir -p "$out/golden/sglang"
  for folder in tiny-sd3 0.5.17-fp32 0.5.23-fp32; do
    cp -r --no-preserve=mode "$recordings/$folder" "$out/golden/sglang/"
  done
else
  echo "no recordings at $recordings: left out"
fi

size=$(du -sm "$out" | cut -f1)
ls -l "$out/wheels" | awk 'NR > 1 {printf "%9d  %s\n", $5, $9}'
echo "$out: $size MiB, $(ls "$out/wheels" | wc -l) wheels"
if [ "$size" -gt "${LIMIT_MIB:-58}" ]; then
  echo "$out is larger than ${LIMIT_MIB:-58} MiB" >&2
  exit 1
fi
