"""How much longer `import optax_fp16` takes than `import optax`, side by side.

python benchmarks/import_time.py

Each import is the first thing that a new Python does, with the bytecode cached as after an installation, and the
garbage collector off: a full collection takes as long as this package, and falls on whatever is imported when its turn comes
(`--collect` leaves it on). The two take turns, and the fastest of each counts.
"""

import argparse
import os
import subprocess
import sys
import tempfile

PROGRAM = "import gc, time; gc.{collector}(); start = time.process_time(); import {module}; print(time.process_time() - start)"


def seconds(module: str, cache: str, collector: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(module=module, collector=collector)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


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
        seconds("optax_fp16", cache, collector)  # writes the bytecode
        pairs = [
            (seconds("optax", cache, collector), seconds("optax_fp16", cache, collector)) for _ in range(args.repeats)
        ]
    alone, ours = (1000 * min(column) for column in zip(*pairs, strict=True))
    print(
        f"import optax {alone:.0f} ms, import optax_fp16 {ours:.0f} ms: {ours - alone:.0f} ms more (limit {args.limit:g})"
    )
    return int(ours - alone > args.limit)


if __name__ == "__main__":
    sys.exit(main())
