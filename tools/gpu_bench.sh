#!/usr/bin/env bash
# Run benchmarks/ on a GPU machine that has PyTorch and transformers but no network: install the wheels of
# tools/gpu_bundle.sh, run each benchmark at real size, print its table; figures and profiles go to OUT.
# Without a GPU the same runs on the CPU with a small model, in about two minutes.
#
# usage: tools/gpu_bench.sh [BUNDLE]      BUNDLE is .gpu unless named
#   OUT        folder for the figures (NAME.json), the profile and the log (a temporary one)
#   PYTHON     interpreter (python3)
#   PARTS      what to run ("fsdp_step lora_forward adapter_load checkpoint_save")
#   ARGUMENTS  more arguments for every benchmark: "--repeats 5"
#   TOTAL_S    most seconds for all (530); a part that comes when they are spent is stopped
#   NAME_S     most seconds for one: FSDP_STEP_S (170), LORA_FORWARD_S (130), ADAPTER_LOAD_S (40),
#              CHECKPOINT_SAVE_S (320)
set -uo pipefail
cd "$(dirname "$0")/.."
source tools/gpu_install.sh "${1:-.gpu}"
log=$out/gpu_bench.log
: >"$log"
: "${FSDP_STEP_S:=170}" "${LORA_FORWARD_S:=130}" "${ADAPTER_LOAD_S:=40}" "${CHECKPOINT_SAVE_S:=320}"
: "${TOTAL_S:=530}"

failed=0
for part in ${PARTS:-fsdp_step lora_forward adapter_load checkpoint_save}; do
  if [ ! -f "benchmarks/$part.py" ]; then
    say "PARTS: there is no benchmarks/$part.py"
    failed=1
    continue
  fi
  limit=$(tr '[:lower:]' '[:upper:]' <<<"$part")_S
  left=$((TOTAL_S - SECONDS)) most=${!limit:-120}
  [ "$left" -gt "$most" ] || most=$((left > 1 ? left : 1))
  echo "== $part" >>"$log"
  # shellcheck disable=SC2086
  timeout -k 10 "$most" "$python" "benchmarks/$part.py" --out "$out" ${ARGUMENTS:-} 2>>"$log" |
    tee "$work/$part.txt"
  code=${PIPESTATUS[0]}
  cat "$work/$part.txt" >>"$log"
  say "$part: exit code $code"
  [ "$code" -eq 0 ] || { failed=1; grep -v '^USDT' "$log" | tail -15; }
done
[ "$out" = "$work" ] || rm -rf "$work"
exit "$failed"
