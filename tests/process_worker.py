"""One of several processes that train a little model together: python process_worker.py FOLDER [--die] [--resume] ..."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
from parallel.checkpoints import Checkpoints
from parallel.layout import DATA, Layout, mesh_of
from parallel.program import together
from parallel.step import Spread, init_state, put

PARAMS = {"w": np.ones((5, 3), np.float32), "b": np.zeros(3, np.float32), "scalar": np.zeros((), np.float32)}
SPECS = {name: P() for name in PARAMS}


def plan_for(layout):
    mesh = mesh_of(layout)
    scale = fp16.dynamic_loss_scale(8.0)
    tx = fp16.distributed(fp16.mixed_precision(optax.adam(0.1), max_norm=1.0, loss_scale=scale), DATA)
    return Spread(None, mesh, 1, tx, True, SPECS, tx.state_specs(PARAMS, mesh))


def step_of(plan):
    def step(params, state, numbers):
        grads = jax.tree.map(lambda leaf: leaf * 0 + numbers[0], jax.lax.pcast(params, DATA, to="varying"))
        mean = fp16.pmean_gradients(grads, DATA)
        params, state = fp16.apply_gradients(plan.tx, grads, state, params)
        return params, state, {**fp16.metrics_of(state), "mean": mean["w"].max()}

    places = (plan.param_specs, plan.state_specs)
    return jax.jit(jax.shard_map(step, mesh=plan.mesh, in_specs=(*places, P(DATA)), out_specs=(*places, P())))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", action="store_true", help="the last process kills itself after step 2, which is saved")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--coordinator")
    parser.add_argument("--process-id", type=int)
    return together(parser.parse_args(), train)


def train(args):
    plan = plan_for(Layout(args.processes, 1, 1))
    checkpoints = Checkpoints(args.folder / "checkpoints", {})
    params = put(PARAMS, plan.mesh, SPECS)
    first = checkpoints.latest() or 0
    state = init_state(plan, params)
    if args.resume:
        params, state = checkpoints.restore(first, plan, params)
    step, seen = step_of(plan), []
    for number in range(first + 1, 5):
        if args.die and number == 3 and args.process_id == args.processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # Every process has other gradients, and in step 4 the last one's are Inf.
        mine = [8.0 * (index + 1) for index in range(args.processes)]
        if number == 4:
            mine[-1] = np.inf
        params, state, metrics = step(params, state, put(np.float32(mine), plan.mesh, P(DATA)))
        seen.append({name: float(value) for name, value in metrics.items()})
        if number == 2:
            checkpoints.save(number, plan, params, state)
    checkpoints.close()
    result = {"first": first + 1, "seen": seen, "w": np.asarray(params["w"]).tolist()}
    (args.folder / f"result-{args.process_id}.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
