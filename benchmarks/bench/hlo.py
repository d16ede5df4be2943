"""Reading XLA's optimized programs: what their entry computation launches, moves and sends."""

import collections
import re
from typing import Any

import jax
from jaxlib import _jax  # private, but the only way to XLA's cost analysis of a program for a device that isn't here

_FREE = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.\-]+ = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][a-z\-]*)\(")
_COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_KERNEL_TIME = re.compile(r'"reification_cost":\[\{[^}]*?"exec_time_us":([\d.e+-]+)')


def entry_lines(text: str) -> list[str]:
    """The instructions of the entry computation."""
    _, _, entry = text.partition("\nENTRY ")
    body, _, _ = entry.partition("\n}")
    return body.splitlines()[1:]


def _after_the_shape(line: str) -> str:
    """An instruction without the shape of its result, which may be a tuple with commas and brackets of its own."""
    if not line.startswith("("):
        return line
    depth = 0
    for index, character in enumerate(line):
        depth += (character == "(") - (character == ")")
        if not depth:
            return " " + line[index + 1 :]
    return line


def entry_operations(text: str) -> collections.Counter[str]:
    """How often each operation occurs in the entry computation."""
    found: collections.Counter[str] = collections.Counter()
    for line in entry_lines(text):
        instruction = _INSTRUCTION.match(line)
        opcode = _OPCODE.search(_after_the_shape(instruction.group(1).split(", metadata=")[0])) if instruction else None
        if opcode:
            found[opcode.group(1)] += 1
    return found


def launches_in(operations: collections.Counter[str]) -> int:
    """How many kernels, copies and collectives the entry computation starts.

    Raises:
      ValueError: for a loop or a branch on the device, whose launches can't be counted from outside.
    """
    if operations["while"] or operations["conditional"]:
        raise ValueError("the program has a loop or a branch, so its launches can't be counted")
    return sum(number for name, number in operations.items() if name not in _FREE and not name.endswith("-done"))


def collectives_in(text: str) -> dict[str, int]:
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in _COLLECTIVES}
    return {name: number for name, number in counts.items() if number}


def cost_of(program: Any) -> int:
    """Bytes that the optimized program reads and writes: XLA's cost analysis, run by the CPU's client."""
    client = jax.devices("cpu")[0].client
    modules = program.runtime_executable().hlo_modules()
    return int(sum(_jax.hlo_module_cost_analysis(client, module)["bytes accessed"] for module in modules))


def kernel_time(text: str) -> float | None:
    """Microseconds of all kernels by XLA's cost model, without launch overhead; None when it gave no estimate."""
    times = [float(time) for line in entry_lines(text) for time in _KERNEL_TIME.findall(line)]
    return sum(times) if times else None
