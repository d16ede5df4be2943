#!/bin/sh
# Everything that a machine with a GPU can tell, in 8 minutes: BERT-base steps in fp32, bf16, fp16 O1 and O2 with a profile of
# each, the norm and the optimizer steps timed, and how they grow. Needs the package with its examples, flax, jmp and matplotlib
# in PYTHON. What the programs launch and move is counted without a GPU, by gpu_program.py.
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
    growth="--quick --rounds 1 --only apply"
    bert="--size tiny --batch 2 --length 16 --rounds 1"
else
    if ! "$python" -c 'import jax; raise SystemExit(jax.default_backend() != "gpu")' 2> "$out/start.log"; then
        echo "gpu.sh: JAX finds no GPU here; install jax[cuda12], or set QUICK=1 to try the script on a CPU" >&2
        exit 2
    fi
    nvidia-smi > "$out/gpu.txt" 2>&1 || true
    step="--rounds 30"
    growth="--rounds 10 --only apply"
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

# The limits add up to 8 minutes; a first step on a GPU compiles for most of its own.
measure bert 150 benchmarks/bert_step.py $bert --profile "$out/profile"
measure norm 30 benchmarks/optimizer_step.py --norm $step
measure step-fp32 80 benchmarks/optimizer_step.py $step
measure step-fp16 80 benchmarks/optimizer_step.py $step --grads float16
measure parameters 60 benchmarks/optimizer_step.py --growth parameters $growth --png "$out/parameters.png"
measure arrays 80 benchmarks/optimizer_step.py --growth arrays --counts 10 100 1000 $growth --png "$out/arrays.png"
