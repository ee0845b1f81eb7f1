#!/usr/bin/env bash
# Run benchmarks/ on a GPU machine that has PyTorch and transformers but no network: install the wheels of
# tools/gpu_bundle.sh, run each benchmark at real size, print its table; figures and profiles go to OUT.
# Without a GPU the same runs on the CPU with a small model, in about two minutes.
#
# usage: tools/gpu_bench.sh [BUNDLE]      BUNDLE is .gpu unless named
#   OUT        folder for the figures (NAME.json), the profile and the log (a temporary one)
#   PYTHON     interpreter (python3)
#   PARTS      what to run ("rollout training_loop sync one_gpu"); also fsdp_step lora_forward adapter_load
#              checkpoint_save
#   ARGUMENTS  more arguments for every benchmark: "--repeats 5"; NAME_ARGUMENTS for one:
#              ONE_GPU_ARGUMENTS="--cases 24gb", ONE_GPU_ARGUMENTS="--cases align --limit 120"
#   TOTAL_S    most seconds for all (530); a part that comes when they are spent is stopped
#   NAME_S     most seconds for one: ROLLOUT_S (200), TRAINING_LOOP_S (350), SYNC_S (90), ONE_GPU_S (520),
#              FSDP_STEP_S (170), LORA_FORWARD_S (130), ADAPTER_LOAD_S (40), CHECKPOINT_SAVE_S (320)
set -uo pipefail
cd "$(dirname "$0")/.."
source tools/gpu_install.sh "${1:-.gpu}"
# compiled kernels are found again by the processes that follow
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/compiled} DRL_RATES=$out/rates.json
log=$out/gpu_bench.log
: >"$log"
: "${ROLLOUT_S:=200}" "${TRAINING_LOOP_S:=350}" "${SYNC_S:=90}" "${ONE_GPU_S:=520}"
: "${FSDP_STEP_S:=170}" "${LORA_FORWARD_S:=130}" "${ADAPTER_LOAD_S:=40}" "${CHECKPOINT_SAVE_S:=320}"
: "${TOTAL_S:=530}"

failed=0
for part in ${PARTS:-rollout training_loop sync one_gpu}; do
  if [ ! -f "benchmarks/$part.py" ]; then
    say "PARTS: there is no benchmarks/$part.py"
    failed=1
    continue
  fi
  limit=$(tr '[:lower:]' '[:upper:]' <<<"$part")_S
  own=${limit%_S}_ARGUMENTS
  left=$((TOTAL_S - SECONDS)) most=${!limit:-120}
  [ "$left" -gt "$most" ] || most=$((left > 1 ? left : 1))
  echo "== $part" >>"$log"
  # shellcheck disable=SC2086
  timeout -k 10 "$most" "$python" "benchmarks/$part.py" --out "$out" ${ARGUMENTS:-} ${!own:-} 2>>"$log" |
    tee "$work/$part.txt"
  code=${PIPESTATUS[0]}
  cat "$work/$part.txt" >>"$log"
  say "$part: exit code $code"
  [ "$code" -eq 0 ] || { failed=1; grep -v '^USDT' "$log" | tail -15; }
done
[ "$out" = "$work" ] || rm -rf "$work"
exit "$failed"
