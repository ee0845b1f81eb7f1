#!/usr/bin/env bash
# Check drl on a GPU machine that has PyTorch and transformers but no network: install the wheels of
# tools/gpu_bundle.sh, run tests/gpu, run one training run at real size, print a table of what was found.
# Without a GPU every test is skipped; with DRL_GPU_TEST_DEVICE=cpu they run on the CPU, with a small model.
#
# usage: tools/gpu_check.sh [BUNDLE]      BUNDLE is .gpu unless named
#   OUT              folder for the figures (gpu_check.json) and the logs (a temporary one)
#   PYTHON           interpreter (python3)
#   PARTS            what to run ("tests bench")
#   TESTS_S BENCH_S  most seconds for the tests (240) and for the run at real size (240)
#   DRL_GPU_BENCH    more settings for the run at real size: "sampling.guidance_scale=4.5 train.micro_batch_size=16"
set -uo pipefail
cd "$(dirname "$0")/.."
bundle=${1:-.gpu}
python=${PYTHON:-python3}
work=$(mktemp -d)
out=${OUT:-$work}
mkdir -p "$out"

say() { echo "[$SECONDS s] $*"; }

"$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check \
  --root-user-action=ignore --target "$work/site" "$bundle"/wheels/*.whl || exit 1
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=passive
export DRL_GPU_FACTS=$out/gpu_check.json
rm -f "$DRL_GPU_FACTS"
say "installed $(ls "$bundle"/wheels/*.whl | wc -l) wheels"

# usage: check SECONDS NAME ARGUMENT...; prints one line a failure, the rest goes to NAME.log
check() {
  local log=$out/$2.log
  timeout -k 10 "$1" "$python" -m pytest -q -m gpu -p no:cacheprovider --tb=short --basetemp="$work/pytest-$2" \
    "${@:3}" >"$log" 2>&1
  local code=$?
  grep -E '^(FAILED|ERROR|SKIPPED)|(passed|failed|skipped|error).* in |^[0-9.]+s (call|setup)|^E  ' "$log" |
    cut -c1-300 | tail -40
  [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || say "$2: stopped after $1 s"
  rm -rf "$work/pytest-$2"
  return "$code"
}

failed=0
for part in ${PARTS:-tests bench}; do
  say "$part"
  case $part in
    tests) check "${TESTS_S:-240}" tests tests/gpu --durations=6 || failed=1 ;;
    bench) check "${BENCH_S:-240}" bench tests/gpu/bench_real_size.py || failed=1 ;;
    *) say "PARTS: $part is neither tests nor bench"; failed=1 ;;
  esac
done
say "done"
"$python" tests/gpu/table.py "$DRL_GPU_FACTS" || failed=1
[ "$out" = "$work" ] || rm -rf "$work"
exit "$failed"
