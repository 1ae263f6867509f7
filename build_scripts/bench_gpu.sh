#!/bin/bash
# Latency, serving and the parts of the decode gain on one GPU, each a command of its own:
#   build_scripts/bench_gpu.sh OUT [NAME ...]
# OUT is the folder of the result files, NAME one of those below (all but vLLM's if absent).
# PYTHON (default .venv/bin/python) is the interpreter. The vllm ones need vLLM for it.
set -eu
cd "$(dirname "$0")/.."
OUT=${1:?usage: build_scripts/bench_gpu.sh OUT [NAME ...]}
shift
mkdir -p "$OUT"

run() { # NAME, the benchmark and its options
    local name=$1
    shift
    printf '\n==== %s (%ss)\n' "$name" "$SECONDS"
    "${PYTHON:-.venv/bin/python}" -m granikv.cli bench "$@" --random-weights llama-3.1-8b \
        --set max_num_batched_tokens=8192 --json "$OUT/$name.json"
}

SHARED=(--set capacity_tokens=240000)
PARTS=(--steps 32 --rounds 2 --contender flat-extents --contender no-dispatcher --plot
    --set capacity_tokens=150000) # four engines side by side
AGENTS=(--arrivals "$OUT/arrivals.json" --num-requests 256 --suffix-len 128 --output-len 128
    --prefix-len 2048 --prefix-len 4096 --prefix-len 6144 --prefix-len 8192
    --prefix-len 12288 --prefix-len 16384 --prefix-len 20480 --prefix-len 24576)

measure() {
    case $1 in
        ttft) run ttft latency --case ttft "${SHARED[@]}" ;;
        itl) run itl latency --case itl --chunk 512 --chunk 1024 --chunk 2048 "${SHARED[@]}" ;;
        streams) run streams latency --case streams --repeats 2 "${SHARED[@]}" ;;
        idle) run idle latency --case idle "${SHARED[@]}" ;;
        parts) run parts decode --case shared-16384 "${PARTS[@]}" ;;
        parts-groups)
            run parts-groups decode --case eight-groups-2048-24576 --case shared-512 "${PARTS[@]}" ;;
        poisson) run poisson poisson --contender uniform-paging "${AGENTS[@]}" "${SHARED[@]}" ;;
        vllm-*) # vllm-default or vllm-cascade
            run "$1" decode --batch 64 --prefix-len 16384 --suffix-len 128 --steps 32 --rounds 2 \
                --contender "$1" "${SHARED[@]}" ;;
        poisson-vllm)
            run poisson-vllm poisson --load 0.8 --contender vllm-default "${AGENTS[@]}" "${SHARED[@]}" ;;
        *)
            echo "bench_gpu.sh: no measurement $1" >&2
            exit 2 ;;
    esac
}

for name in "${@:-ttft itl streams idle parts parts-groups poisson}"; do
    for each in $name; do measure "$each"; done
done
