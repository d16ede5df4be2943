"""One program run by both, and compared after every step."""

import dataclasses
from typing import Any

import jax
import numpy as np

from tests.fuzzing import running
from tests.fuzzing.programs import DTYPES, Program
from tests.fuzzing.reference import Expected, unambiguous


def replay(seed: int) -> None:
    """Runs the program of a seed, and says on a failure what it was and how to see it again."""
    program, expected = unambiguous(seed)
    try:
        compare(program, expected)
    except Exception as error:
        lines = "\n".join(f"    {name} = {value!r}" for name, value in dataclasses.asdict(program).items())
        raise AssertionError(
            f"program {seed} fails; replay it with tests.fuzzing.comparing.replay({seed}):\n{lines}\n{error}"
        ) from error


def compare(program: Program, expected: list[Expected]) -> None:
    states = list(running.run(program))
    assert len(states) == len(expected) + 1
    for number, want in enumerate(expected):
        before, now = states[number], states[number + 1]
        where = f"after step {number + 1} of {program.steps}"
        if program.layout == "pmap":
            devices_are_alike(now, where)
            before, now = (jax.tree.map(lambda leaf: leaf[0], one) for one in (before, now))
        records_agree(now, want, where)
        values_agree(program, before, now, want, where)
        if not want.finite:
            same(before.params, now.params, f"the parameters {where}, which was skipped,")
            same(
                guard_of(before).inner_state, guard_of(now).inner_state, f"the inner state {where}, which was skipped,"
            )


def records_agree(now: running.Seen, want: Expected, where: str) -> None:
    """The scale, the counters and the flag, exactly; the norm and the ratio as far as fp32 goes."""
    for name, value in want.scale.items():
        equal(getattr(now.scale, name), value, f"{name} {where}")
    exact = ("skipped_in_a_row", "skipped_total", "applied_total")
    for name in exact:
        equal(now.metrics[name], getattr(want, name), f"{name} {where}")
    equal(now.metrics["grads_finite"], want.finite, f"grads_finite {where}")
    if now.loss is not None:
        close(now.loss, want.loss, want.loss_slack, f"the loss {where}")
    if want.finite:
        close(now.metrics["grad_norm"], want.norm, want.norm_slack, f"grad_norm {where}")
        if "clip_ratio" in now.metrics:
            close(now.metrics["clip_ratio"], want.ratio, 1e-5 * want.ratio, f"clip_ratio {where}")
    else:
        equal(now.metrics["grad_norm"], np.inf, f"grad_norm {where}")


def values_agree(program: Program, before: running.Seen, now: running.Seen, want: Expected, where: str) -> None:
    """Masters and parameters within the reference's slack, and the ones the rounded others, bit for bit."""
    for number, leaf in enumerate(program.leaves):
        param = now.params[number]
        assert param.dtype == leaf.dtype, f"leaf {number} is {param.dtype} {where}, not {leaf.dtype}"
        name = f"leaf {number} {where}"
        if now.masters is None:
            close(param, want.masters[number], want.slack[number], name)
            continue
        master = now.masters[number]
        close(master, want.masters[number], want.slack[number], f"the master of {name}")
        with np.errstate(over="ignore"):
            rounded = master.astype(leaf.dtype)
        if leaf.dtype == DTYPES["bf16"] and program.masters == "remainder":
            ties = (np.asarray(master).view(np.uint32) & 0xFFFF) == 0x8000  # go away from zero
            rounded = np.where(ties, param, rounded)
        # Through updates, a weight that shrinks 4,000 times over in a step may miss its rounded master.
        kept = abs(before.params[number].astype(np.float64)) < 4000 * abs(param.astype(np.float64))
        sure = np.ones_like(kept) if program.applies and program.composition == "recipe" else kept | (param == 0)
        same(np.where(sure, rounded, param), param, f"{name} against its rounded master:")


def devices_are_alike(now: running.Seen, where: str) -> None:
    tree = (now.params, now.state)
    same(jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), tree), tree, f"the devices {where}")


def guard_of(seen: running.Seen) -> Any:
    return next(node for node in running.nodes(seen.state) if type(node).__name__ in ("SkipIfNonfiniteState",))


def equal(value: Any, expected: Any, name: str) -> None:
    assert np.all(value == expected), f"{name} is {value}, not {expected}"


def close(value: Any, expected: Any, slack: Any, name: str) -> None:
    value = np.asarray(value).astype(np.float64)
    off = ~(abs(value - expected) <= slack)
    assert not off.any(), f"{name} is\n{value}, not\n{expected} within\n{slack}"


def same(one: Any, other: Any, name: str) -> None:
    """Bit for bit, dtypes included."""

    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, f"{name} differ in dtype: {a.dtype}, {b.dtype}"
        assert a.tobytes() == b.tobytes(), f"{name} differ:\n{a}\n{b}"

    jax.tree.map(check, one, other)
