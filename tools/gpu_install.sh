# Sourced by gpu_check.sh and gpu_bench.sh: install the wheels of the bundle "$1" beside the interpreter,
# set what every process there needs. Leaves: python, work (temporary folder), out, say.
python=${PYTHON:-python3}
work=$(mktemp -d)
out=${OUT:-$work}
mkdir -p "$out"

say() { echo "[$SECONDS s] $*"; }

"$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check \
  --root-user-action=ignore --target "$work/site" "$1"/wheels/*.whl || exit 1
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=passive
say "installed $(ls "$1"/wheels/*.whl | wc -l) wheels"
