#!/usr/bin/env bash
# Check drl on a GPU machine that has PyTorch and transformers but no network: install the wheels of
# tools/gpu_bundle.sh, run tests/gpu, replay the recordings of the real server on that machine's processor,
# run one training run at real size, print a table of what was found. Under nine minutes. tools/gpu_bench.sh
# is the other half: benchmarks/, each by itself.
# Without a GPU every test is skipped; with DRL_GPU_TEST_DEVICE=cpu they run on the CPU, with a small model.
#
# usage: tools/gpu_check.sh [BUNDLE]      BUNDLE is .gpu unless named
#   OUT              folder for the figures (gpu_check.json) and the logs (a temporary one)
#   PYTHON           interpreter (python3)
#   PARTS            what to run ("recordings tests bench")
#   WORKERS          processes that share the tests (6); with 1 they run one after the other
#   TESTS_S BENCH_S RECORDINGS_S  most seconds for the tests (270), for the run at real size (170), for
#                    the recordings, twice (40)
#   DRL_GPU_BENCH    more settings for the run at real size: "sampling.guidance_scale=4.5 train.micro_batch_size=16"
set -uo pipefail
cd "$(dirname "$0")/.."
bundle=${1:-.gpu}
source tools/gpu_install.sh "$bundle"
export DRL_GPU_FACTS=$out/gpu_check.json
rm -f "$DRL_GPU_FACTS"
# compiled kernels are found again by the processes that follow
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/compiled}

# usage: check SECONDS NAME ARGUMENT...; prints one line a failure, the rest goes to NAME.log
check() {
  local log=$out/$2.log
  timeout -k 10 "$1" "$python" -m pytest -q -p no:cacheprovider --tb=short --basetemp="$work/pytest-$2" \
    "${@:3}" >"$log" 2>&1
  local code=$?
  grep -E '^(FAILED|ERROR|SKIPPED)|(passed|failed|skipped|error).* in |^[0-9.]+s (call|setup)|^E  ' "$log" |
    cut -c1-300 | tail -40
  [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || say "$2: stopped after $1 s"
  rm -rf "$work/pytest-$2"
  return "$code"
}

# Everything on the processor, with one thread: that is what the recordings are compared with.
recordings() {
  if [ ! -d "$bundle/golden" ]; then
    say "recordings: none in $bundle, left out"
    return 0
  fi
  lscpu | grep -E '^(Model name|Flags)' >"$out/processor.txt"
  grep '^Model name' "$out/processor.txt"
  local golden
  golden=$(cd "$bundle/golden" && pwd)
  export DRL_GOLDEN=$golden OMP_NUM_THREADS=1
  timeout -k 10 "${RECORDINGS_S:-40}" "$python" tools/recording_differences.py "$out/recordings.json"
  check "${RECORDINGS_S:-40}" recordings tests/test_sglang_recordings.py
  local code=$?
  unset DRL_GOLDEN OMP_NUM_THREADS
  return "$code"
}

failed=0
for part in ${PARTS:-recordings tests bench}; do
  say "$part"
  case $part in
    recordings) recordings || failed=1 ;;
    tests) check "${TESTS_S:-270}" tests -m "gpu and not slow" -n "${WORKERS:-6}" tests/gpu --durations=6 || failed=1 ;;
    bench) check "${BENCH_S:-170}" bench -m gpu tests/gpu/test_sd3_pipeline.py::test_seconds_of_a_decode_at_real_size \
      tests/gpu/bench_real_size.py || failed=1 ;;
    *) say "PARTS: $part is none of recordings, tests, bench"; failed=1 ;;
  esac
done
say "done"
"$python" tests/gpu/table.py "$DRL_GPU_FACTS" || failed=1
[ "$out" = "$work" ] || rm -rf "$work"
exit "$failed"
