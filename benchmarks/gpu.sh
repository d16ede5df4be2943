#!/bin/sh
# Everything that a machine with a GPU can tell, in 8 minutes: optimizer steps timed, BERT-base steps in four precisions, a
# profile, and the counts of the programs that ran. Needs the package with its examples, flax, jmp and matplotlib in PYTHON.
#
#     benchmarks/gpu.sh [FOLDER]          results into FOLDER (default: runs/gpu)
#     QUICK=1 benchmarks/gpu.sh [FOLDER]  the same with tiny sizes, on any machine: to try the script
set -eu
cd "$(dirname "$0")/.."
out=${1:-runs/gpu}
python=${PYTHON:-python3}
export PYTHONPATH=".:examples${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"

if [ -n "${QUICK:-}" ]; then
    step="--quick --rounds 1"
    growth="--quick --rounds 1"
    bert="--size tiny --batch 2 --length 16 --rounds 1"
else
    if ! "$python" -c 'import jax; raise SystemExit(jax.default_backend() != "gpu")' 2> "$out/start.log"; then
        echo "gpu.sh: JAX finds no GPU here; install jax[cuda12], or set QUICK=1 to try the script on a CPU" >&2
        exit 2
    fi
    nvidia-smi > "$out/gpu.txt" 2>&1 || true
    step="--rounds 30"
    growth="--rounds 10"
    bert="--rounds 20"
fi

# measure NAME SECONDS COMMAND...: prints the command's table and keeps it; one that overruns doesn't stop the rest.
measure() {
    name=$1 seconds=$2
    shift 2
    echo "== $name: $*"
    timeout "$seconds" "$python" "$@" > "$out/$name.md" 2> "$out/$name.log" || echo "gpu.sh: $name stopped with status $?" >&2
    cat "$out/$name.md"
}

measure bert 150 benchmarks/bert_step.py $bert --profile "$out/profile"
measure step-fp32 90 benchmarks/optimizer_step.py $step
measure step-fp16 90 benchmarks/optimizer_step.py $step --grads float16
measure growth 150 benchmarks/optimizer_step.py --growth $growth --png "$out/growth.png"
