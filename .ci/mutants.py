"""Changes the package in small ways, one at a time, and sees whether the tests notice.

    python .ci/mutants.py [--modules loss_scale clipping ...] [--every N] [--tests tests/test_*.py ...]

First the tests run once, with a record of which test runs which lines. Then each mutant gets the tests that run its line, the
quickest first, in a process forked after the imports. It prints a line for each module and every survivor that
`.ci/mutants.md` doesn't explain, and then ends with status 1.
"""

import argparse
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
CACHE, RECORD = ROOT / "build/mutants/compiled", ROOT / "build/mutants/lines.json"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

from mutations import Mutant, mutants_of  # noqa: E402

MODULES = tuple(sorted(path.stem for path in (ROOT / "optax_fp16").glob("*.py") if path.stem != "__init__"))
TESTS = (
    "bad_arguments", "clipping", "contract", "devices", "doctests", "flax", "guard", "lasting_state", "loss_scale",
    "master_weights", "migrate", "optimizers", "plot", "reading", "recipe", "reduce", "report", "scaling", "skipping", "tree",
    "underflow", "zero", "zero_programs",
)  # fmt: skip
# Modules whose tests are in a file of another name.
HOME = {
    "_carry": "migrate", "_collectives": "zero", "_elementwise": "zero", "_inner": "skipping", "_layout": "zero",
    "_lowering": "reduce", "_messages": "bad_arguments", "_migrate_jax": "migrate", "_migrate_torch": "migrate",
    "_remainders": "master_weights", "_scalars": "reading", "_state_layout": "zero", "_transport": "zero",
    "_state_parts": "zero", "averaging": "devices", "placing": "zero",
}  # fmt: skip
LIMIT, ENOUGH = 60, 25  # seconds: of processor time for one mutant, and of tests for it
NEAR = 3  # lines


class Lines:
    """Runs the tests once under coverage, as a plugin of pytest: which tests run which lines, and how long each takes."""

    def __init__(self):
        import coverage

        self.coverage = coverage.Coverage(data_file=None, config_file=False, source_pkgs=["optax_fp16"])
        self.seconds: dict[str, float] = {}

    def pytest_runtest_setup(self, item):
        self.coverage.switch_context(item.nodeid)
        self.seconds[item.nodeid] = -time.process_time()

    def pytest_runtest_teardown(self, item):
        self.seconds[item.nodeid] += time.process_time()

    def run(self, tests: list[str]) -> None:
        import pytest

        self.coverage.start()
        status = pytest.main(
            ["-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not slow and not soak", *tests], plugins=[self]
        )
        self.coverage.stop()
        if status:
            sys.exit(f"the tests fail without a mutant (status {status}); mend them first")
        data = self.coverage.get_data()
        lines = {Path(file).stem: data.contexts_by_lineno(file) for file in data.measured_files()}
        RECORD.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


def forked(work, limit: float) -> int | None:
    """The exit status of `work` in a child process, or None if it took too long: by the processor's time, or ten times that."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            status = int(work())
        except BaseException:
            status = 99
        os._exit(status)
    end = time.monotonic() + 10 * limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Swapped:
    """A finder and loader that gives one module of the package another source."""

    def __init__(self, name: str, source: str):
        self.name, self.source = name, source

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        if name != self.name:
            return None
        return ModuleSpec(name, self, origin=str(ROOT / (name.replace(".", "/") + ".py")))

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = module.__spec__.origin
        exec(compile(self.source, module.__file__, "exec"), module.__dict__)


def tests_for(record: dict, module: str, line: int) -> list[str]:
    """The tests that run the line, those of its module and the quickest first, then the others of its module.

    As many as take ENOUGH seconds; of all tests, if the line runs on import.
    """
    lines = record["lines"].get(module, {})
    # A statement of several lines is recorded at some of them only.
    near = range(line - NEAR, line + NEAR + 1)
    found = {test for number in near for test in lines.get(str(number), []) if test}
    seconds, chosen, total = record["seconds"], [], 0.0
    own = f"tests/test_{HOME.get(module, module.lstrip('_'))}.py"
    # What JAX has traced for one test isn't run again for another of the same shapes, which would fail as well.
    known = found | {test for test in seconds if test.startswith(own)} if found else set(seconds)

    def rank(test: str) -> tuple[bool, bool, float]:
        return test not in found, not test.startswith(own), seconds.get(test, 0.0)

    for test in sorted(known, key=rank):
        total += seconds.get(test, 0.0)
        if chosen and total > ENOUGH:
            break
        chosen.append(test)
    return chosen


def survives(module: str, mutant: Mutant, record: dict) -> bool:
    tests = tests_for(record, module, mutant.line)

    def work() -> int:
        import pytest

        sys.meta_path.insert(0, Swapped(f"optax_fp16.{module}", mutant.source))
        # Asserts as Python has them: pytest would rewrite every test file for its words, which nobody reads here.
        return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--assert=plain", *tests])

    return forked(work, LIMIT) == 0


def explained() -> dict[tuple[str, str, str, str], str]:
    """(module, function, before, after) of every survivor in the list, with its reason."""
    text = Path(__file__).with_suffix(".md").read_text()
    pattern = r"^- `([^`]+)` `([^`]+)`: `([^`]+)` → `([^`]+)`: (.+)$"
    return {tuple(match[:4]): match[4] for match in re.findall(pattern, text, re.MULTILINE)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modules", nargs="+", default=MODULES, metavar="MODULE", help="of optax_fp16, without .py")
    parser.add_argument("--tests", nargs="+", default=[f"tests/test_{name}.py" for name in TESTS], metavar="FILE")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th mutant only")
    parser.add_argument("--again", action="store_true", help="use the record of lines of the last run")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    import_all()
    known_lines = arguments.again and RECORD.exists()
    # In a child, so that this process never starts JAX's threads, which a fork would lose.
    if not known_lines and forked(lambda: Lines().run(arguments.tests) or 0, 3600) != 0:
        print("the tests fail without a mutant: run them and mend them first", file=sys.stderr)
        return 2
    record, known, unexplained, all_count, all_left = json.loads(RECORD.read_text()), explained(), [], 0, 0
    for module in arguments.modules:
        start, source = time.monotonic(), (ROOT / f"optax_fp16/{module}.py").read_text()
        mutants = list(mutants_of(source))[:: arguments.every]
        if not survives(module, mutants[0]._replace(source=source), record):
            print(f"{module} fails its tests without a mutant: run them, and this without --again", file=sys.stderr)
            return 2
        left, new = [], []
        for mutant in mutants:
            if not survives(module, mutant, record):
                continue
            left.append(mutant)
            if (module, *mutant[1:4]) not in known:
                new.append(mutant)
                print(
                    f"- `{module}` `{mutant.function}`: `{mutant.before}` → `{mutant.after}`: line {mutant.line}",
                    flush=True,
                )
        took = time.monotonic() - start
        print(
            f"{module:16} {len(mutants):4} mutants, {len(left):3} survive, {len(new):3} unexplained, {took:.0f} s",
            flush=True,
        )
        unexplained += new
        all_count, all_left = all_count + len(mutants), all_left + len(left)
    print(f"{'all':16} {all_count:4} mutants, {all_left:3} survive, {len(unexplained):3} unexplained")
    return 1 if unexplained else 0


def import_all() -> None:
    """What the tests import, but for the package itself and for what pytest wants to import first."""
    import warnings

    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    warnings.filterwarnings("ignore", message=".*fork.*")
    import equinox  # noqa: F401
    import flax.nnx
    import flax.training.train_state  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import jmp  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import pytest  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
