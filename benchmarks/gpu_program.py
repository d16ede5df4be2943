#!/usr/bin/env python3
"""What an NVIDIA GPU would run: launches, bytes and collectives of our optimizer steps and the peers', counted in programs
that XLA compiles for it on a machine without one.

    pip install --no-deps jax-cuda12-pjrt==<the version of jaxlib>
    python benchmarks/gpu_program.py                      # the whole table
    python benchmarks/gpu_program.py --check --quick      # fail if a count is past its limit

No time is measured; a column shows XLA's own estimate where it gives one (it does for an H100).
"""

import argparse
import os
import sys

# CUDA must not be named here: with the compiler alone its plugin would look for a driver.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from bench.compiled import SPECS, Counts, Unavailable, count, gpu_mesh
from bench.gpu_cases import CASES, Case
from bench.shapes import entries_of
from bench.tables import markdown

HEADER = ("program", "arrays", "GPUs", "launches", "bytes/param", "temp MB", "collectives", "XLA's µs", "compile s")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a count is past its limit")
    parser.add_argument("--quick", action="store_true", help="only the few small programs that the test compiles")
    parser.add_argument(
        "--spec", default="h100", metavar="GPU", help=f"{', '.join(SPECS)}, or a file (GpuTargetConfigProto)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=4,
        metavar="N",
        help="GPUs of the programs for several (default: 4, as the limits)",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only programs with TEXT in their names")
    options = parser.parse_args(argv)
    if options.devices < 2:
        parser.error(f"--devices must be 2 or more, not {options.devices}")
    if options.spec not in SPECS and not os.path.isfile(options.spec):
        parser.error(f"--spec must be {', '.join(SPECS)} or a file that exists, not {options.spec}")
    return options


def wanted(case: Case, options: argparse.Namespace) -> bool:
    checked = case.limits is not None or not options.check
    return checked and (case.quick or not options.quick) and options.only in case.name


def measured(case: Case, options: argparse.Namespace) -> Counts:
    devices = options.devices if case.devices > 1 else 1
    program = case.build(gpu_mesh(options.spec, devices), case.shapes)
    # XLA's cost model knows the H100, and stops the compilation for an A100.
    return count(program.function, *program.args, donate=program.donate, times=options.spec == "h100")


def row(case: Case, counts: Counts, devices: int) -> tuple[str, ...]:
    return (
        case.name,
        str(len(case.shapes)),
        str(devices),
        str(counts.launches),
        f"{counts.bytes / entries_of(case.shapes):.2f}",
        f"{counts.temporary / 1e6:.2f}",
        ", ".join(f"{number} {name}" for name, number in counts.collectives.items()) or "none",
        f"{counts.microseconds:.0f}" if counts.microseconds else "",
        f"{counts.seconds:.1f}",
    )


def excesses(case: Case, counts: Counts) -> list[str]:
    """What is past the case's limits, in words."""
    limits = case.limits
    if limits is None:
        return []
    pairs = [
        ("launches", counts.launches, limits.launches),
        ("bytes per parameter", counts.bytes / entries_of(case.shapes), limits.bytes_per_entry),
        ("temporary bytes", counts.temporary, limits.temporary),
    ]
    past = [f"{case.name}: {value:.6g} {what}, at most {limit}" for what, value, limit in pairs if value > limit]
    gathered = {name: number for name, number in counts.collectives.items() if name not in limits.collectives}
    return [*past, *(f"{case.name}: {number} {name}, none allowed" for name, number in gathered.items())]


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    rows, failures = [], []
    for case in (case for case in CASES if wanted(case, options)):
        try:
            counts = measured(case, options)
        except Unavailable as error:
            print(f"gpu_program.py: {error}", file=sys.stderr)
            return 2
        print(f"{case.name}: {counts.launches} launches", file=sys.stderr, flush=True)
        rows.append(row(case, counts, options.devices if case.devices > 1 else 1))
        failures += excesses(case, counts) if options.check else []
    print(markdown(HEADER, rows))
    for failure in failures:
        print(f"past its limit: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
