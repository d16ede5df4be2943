"""How much longer `import optax_fp16` takes than `import optax`.

python benchmarks/import_time.py

A new Python imports one after the other, so that the second shows what is left to do after the first: the difference between two
processes drowns in the noise of a second of importing JAX. The bytecode is cached as after an installation, and the garbage
collector off: a full collection takes as long as this package, and falls on whatever is imported when its turn comes
(`--collect` leaves it on). Processor time, the median of several.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

PROGRAM = """
import gc, time
gc.{collector}()
start = time.process_time()
import optax
between = time.process_time()
import optax_fp16
print(between - start, time.process_time() - between)
"""


def seconds(cache: str, collector: str) -> list[float]:
    """Of importing Optax, and then this package."""
    command = [sys.executable, "-c", PROGRAM.format(collector=collector)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return [float(number) for number in printed.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--limit", type=float, default=50.0, metavar="MS", help="exit with 1 if it takes more than this"
    )
    parser.add_argument("--collect", action="store_true", help="leave the garbage collector on")
    args = parser.parse_args()
    collector = "enable" if args.collect else "disable"
    with tempfile.TemporaryDirectory() as cache:
        seconds(cache, collector)  # writes the bytecode
        times = [seconds(cache, collector) for _ in range(args.repeats)]
    optax, ours = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    print(f"import optax {optax:.0f} ms, import optax_fp16 {ours:.0f} ms more (limit {args.limit:g})")
    return int(ours > args.limit)


if __name__ == "__main__":
    sys.exit(main())
