"""Small runs of the pre-training example for tests: in this process, or in one that is killed."""

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.experimental.compilation_cache import compilation_cache

import pretrain_bert
from text import prose
from training.errors import exit_status

ROOT = Path(__file__).parent.parent
STEPS = 8
# The scale starts too high and grows again at once: skipped steps and rescales of both kinds are there to be resumed.
SMALL = (
    f"--steps {STEPS} --batch-size 8 --length 16 --vocab-size 500 --checkpoint-every 2 --keep 9 "
    "--init-scale 131072 --growth-interval 2"
).split()


@contextlib.contextmanager
def compiled_programs_in(folder):
    """Runs in this process put what they compile into `folder`, where `killed` processes find it too."""
    options = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def small_text(folder):
    """A file with the first paragraphs of the default text."""
    path = Path(folder) / "prose.txt"
    path.write_text("\n\n".join(prose.paragraphs(prose.python_reference(), prose.PROSE)[:120]))
    return path


def arguments(text, run_dir, *more):
    return [*SMALL, "--text", str(text), "--run-dir", str(run_dir), *map(str, more)]


def in_this_process(*argv):
    """(exit status, stdout, stderr) of the example."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = exit_status(pretrain_bert.main, list(argv))
    return status, out.getvalue(), err.getvalue()


def final_state(run_dir, step=STEPS):
    """Every array of the checkpoint of `step`, as bytes, by its path."""
    path = Path(run_dir) / "checkpoints" / f"step_{step:08d}" / "state"
    leaves = jax.tree_util.tree_leaves_with_path(ocp.PyTreeCheckpointer().restore(path.absolute()))
    return {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in leaves}


def metrics_without_times(run_dir):
    lines = (Path(run_dir) / "metrics.csv").read_text().splitlines()
    return [line.rsplit(",", 1)[0] for line in lines]


def killed(text, run_dir, cache, rng: random.Random):
    """Start or go on with the run in a process of its own, and kill it some moment after its first step.

    Returns the exit status, which is that of SIGKILL, or 0 if the run was faster; and whether a checkpoint was being
    written when it died.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    program = str(ROOT / "examples" / "pretrain_bert.py")
    command = [sys.executable, program, *arguments(text, run_dir, "--resume")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        steps = rng.randint(1, 3)
        for line in process.stdout:
            steps -= line.startswith("step ")
            if steps == 0:
                break
        time.sleep(rng.uniform(0, 0.3))  # a step and a checkpoint take about as long
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return process.returncode, any((Path(run_dir) / "checkpoints").glob("writing-*"))
