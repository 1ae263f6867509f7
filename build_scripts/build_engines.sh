#!/bin/bash
# Engines through TensorRT-LLM's trtllm-build, for each tensor-parallel setting:
#
#   GRANIKV_PLUGIN=LIBRARY build_scripts/build_engines.sh CHECKPOINT OUT TP... [-- OPTIONS]
#
# CHECKPOINT: Hugging Face folder or GGUF file. OPTIONS go to convert_checkpoint.py (its --help).
# Writes OUT/tpN/checkpoint and OUT/tpN/engines; the latter is an engine_dir of `granikv serve`.
# PYTHON: interpreter. COMPUTE_CAPABILITY: of the engines, like 9.0; this machine's GPU if not set.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}

fail() {
  echo "build_engines: $*" >&2
  exit 2
}

[ $# -ge 3 ] || fail "expected CHECKPOINT OUT TP... [-- OPTIONS], got $# arguments"
CHECKPOINT=$1 OUT=$2
shift 2
SETTINGS=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  [[ $1 =~ ^[1-9][0-9]*$ ]] || fail "TP: expected a number of ranks, got '$1'"
  SETTINGS+=("$1")
  shift
done
[ "${#SETTINGS[@]}" -gt 0 ] || fail "TP: expected at least one number of ranks, got none"
[ $# -eq 0 ] || shift # --
[ -e "$CHECKPOINT" ] || fail "CHECKPOINT: expected a Hugging Face folder or a GGUF file, got $CHECKPOINT"
command -v trtllm-build > /dev/null || fail "trtllm-build: expected TensorRT-LLM 1.2.x on PATH," \
  "got none; run this in the project's container, or build engines with \`granikv build\`"
[ -f "${GRANIKV_PLUGIN:-}" ] || fail "GRANIKV_PLUGIN: expected GraniKV's plugin library, got" \
  "'${GRANIKV_PLUGIN:-}'; build it with build_scripts/build_plugin.py"
[[ ${COMPUTE_CAPABILITY:-9.0} =~ ^[1-9][0-9]*\.[0-9]$ ]] || fail "COMPUTE_CAPABILITY: expected" \
  "one like 9.0, got '$COMPUTE_CAPABILITY'"
GRANIKV_PLUGIN=$(realpath "$GRANIKV_PLUGIN")
export GRANIKV_PLUGIN PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

for tp in "${SETTINGS[@]}"; do
  checkpoint=$OUT/tp$tp/checkpoint engines=$OUT/tp$tp/engines
  limits=$("$PYTHON" "$ROOT/build_scripts/convert_checkpoint.py" \
    --checkpoint "$CHECKPOINT" --tp "$tp" --out "$checkpoint" "$@")
  mkdir -p "$engines"
  rm -f "$engines/manifest.json" # it would describe other engines
  # one rank after another: with more workers, children would have to import the class's file.
  # $limits: options that the checkpoint was made for
  # shellcheck disable=SC2086
  trtllm-build --checkpoint_dir "$checkpoint" --output_dir "$engines" \
    --model_cls_file "$ROOT/trtllm_plugin/trtllm_model.py" --model_cls_name GraniKVForCausalLM \
    $limits --max_beam_width 1 --gemm_plugin disable --workers 1 \
    --output_timing_cache "$engines/model.cache"
  "$PYTHON" -m granikv.engines.trtllm_manifest "$checkpoint" "$engines" "$GRANIKV_PLUGIN" \
    ${COMPUTE_CAPABILITY:-}
  echo "tp $tp: $engines"
done
