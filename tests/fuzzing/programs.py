"""Random training programs: what they are made of, and how a seed becomes one."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.plain_rule import PlainRule

DEVICES = 4
# Of one program for each device, the compilation costs the most, so one device is the rule.
LAYOUTS = {
    "jit": 0.4, "scan": 0.15, "eager": 0.1, "sharded jit": 0.08, "pmap": 0.07, "typed": 0.07, "untyped": 0.06, "distributed": 0.07
}  # fmt: skip
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Leading dimensions that four devices can share among the first; few shapes, so that eager programs find theirs compiled.
SHARED_SHAPES, OTHER_SHAPES = ((4,), (8, 3)), ((), (1,), (3, 2), (0,))
FAULTS = {
    "inf": np.inf, "-inf": -np.inf, "nan": np.nan, "fp16 max": 65504.0, "fp16 subnormal": 2.0**-24, "beyond fp16": 1e5,
    "beyond fp32's root": 1e20, "beneath fp32's root": 1e-30, "largest": 3e38,
}  # fmt: skip
INNERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "bert_adam", "lion")


@dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: np.dtype  # of the parameter
    grad_dtype: np.dtype
    sharded: bool  # over its first dimension, in the layouts that shard


@dataclass(frozen=True)
class Fault:
    step: int
    leaf: int
    device: int  # whose gradient it is in, where each device computes its own
    entry: int
    value: float


@dataclass(frozen=True)
class Program:
    """One training program, whole: what `running.run` does with JAX and `reference.Reference` with numpy in float64."""

    seed: int
    layout: str
    tree: str  # how the leaves hang together
    leaves: tuple[Leaf, ...]
    composition: str  # "links", "nested" or "recipe"
    masters: str  # "none", "whole" or "remainder"
    max_norm: float | None
    rule: PlainRule | None  # None: a static scale
    static_scale: float
    inner: str
    learning_rate: float
    decay_over: int | None  # the steps over which a linear schedule brings the rate down to a tenth
    weight_decay: float
    accumulate: int  # optax.MultiSteps around the optimizer, from 2 on
    applies: bool  # apply_gradients, or update and optax.apply_updates
    from_loss: bool  # gradients by fp16.value_and_grad of a loss; else cast and scaled by hand
    steps: int
    faults: tuple[Fault, ...]

    @property
    def devices(self) -> int:
        """How many devices compute gradients of their own, which are averaged."""
        return DEVICES if self.layout in ("pmap", "distributed") else 1

    def faults_of(self, leaf: int) -> tuple[np.ndarray, np.ndarray]:
        """(where, what) for a leaf: bool and f32, both [devices, steps, ...]."""
        shape = (self.devices, self.steps, *self.leaves[leaf].shape)
        where, what = np.zeros(shape, bool), np.zeros(shape, np.float32)
        for fault in self.faults:
            if fault.leaf == leaf:
                where[fault.device, fault.step].flat[fault.entry] = True
                what[fault.device, fault.step].flat[fault.entry] = fault.value
        return where, what

    def data(self) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
        """(parameters, true gradients), the latter f32[devices, steps, ...] for each leaf.

        A gradient is a whole number of at most 15 in magnitude times a power of two, so that a mean over devices is exact.
        """
        rng = np.random.default_rng([self.seed, 1])
        params = [np.asarray(rng.normal(0, 1, leaf.shape)).astype(leaf.dtype) for leaf in self.leaves]
        grads = []
        for leaf in self.leaves:
            size = (self.devices, self.steps, *leaf.shape)
            unit = 2.0 ** rng.integers(-14, 0)
            grads.append((rng.integers(-15, 16, size) * unit).astype(np.float32))
        return params, grads


def random_program(seed: int, attempt: int = 0) -> Program:
    """The program of a seed; attempts differ, for when one turns out to hang on a rounding (`reference.Ambiguous`)."""
    rng = np.random.default_rng([seed, attempt])
    layout = str(rng.choice(list(LAYOUTS), p=list(LAYOUTS.values())))
    leaves = _random_leaves(rng)
    steps = int(rng.integers(3, 8))
    dynamic = rng.random() < 0.75
    # By hand, JAX would sum the gradients of replicated leaves over the devices, as typed axes ask for.
    from_loss = layout not in ("typed", "untyped", "distributed") and bool(rng.random() < 0.5)
    if from_loss:  # then a gradient has its parameter's dtype
        leaves = tuple(Leaf(leaf.shape, leaf.dtype, leaf.dtype, leaf.sharded) for leaf in leaves)
    inner = str(rng.choice(INNERS))
    return Program(
        seed=seed,
        layout=layout,
        tree=str(rng.choice(("dict", "list", "nested", "one" if len(leaves) == 1 else "tuple"))),
        leaves=leaves,
        composition=str(rng.choice(("links", "nested", "recipe"))),
        masters=str(rng.choice(("none", "whole", "remainder"), p=(0.45, 0.4, 0.15))),
        max_norm=None if rng.random() < 0.35 else float(10.0 ** rng.uniform(-2, 1)),
        rule=_random_rule(rng) if dynamic else None,
        static_scale=float(rng.choice((1.0, 8.0, 1000.0, 2.0**12))),
        inner=inner,
        learning_rate=float(10.0 ** rng.uniform(-4, -1)),
        decay_over=int(rng.integers(1, 6)) if rng.random() < 0.3 else None,
        weight_decay=float(rng.choice((0.0, 0.01, 0.3))),
        accumulate=2 if rng.random() < 0.12 else 1,
        applies=bool(rng.random() < 0.5),
        from_loss=from_loss,
        steps=steps,
        faults=_random_faults(rng, leaves, steps, DEVICES if layout in ("pmap", "distributed") else 1),
    )


def _random_leaves(rng: np.random.Generator) -> tuple[Leaf, ...]:
    dtypes = list(DTYPES.values())
    leaves = []
    for index in range(int(rng.integers(1, 4))):
        shapes = SHARED_SHAPES if index == 0 else SHARED_SHAPES + OTHER_SHAPES
        shape = shapes[rng.integers(len(shapes))]
        dtype, grad_dtype = (dtypes[rng.integers(3)] for _ in range(2))
        sharded = shape in SHARED_SHAPES and bool(index == 0 or rng.random() < 0.5)
        leaves.append(Leaf(shape, dtype, grad_dtype, sharded))
    return tuple(leaves)


def _random_rule(rng: np.random.Generator) -> PlainRule:
    growth, backoff = ((2.0, 0.5), (4.0, 0.25), (1.5, 0.3))[rng.choice(3, p=(0.7, 0.15, 0.15))]
    low = float(2.0 ** rng.integers(-5, 8))
    start = low * float(2.0 ** rng.integers(0, 12))
    return PlainRule(
        scale=start,
        growth_interval=int(rng.integers(1, 5)),
        growth_factor=growth,
        backoff_factor=backoff,
        tolerance=str(rng.choice(("0", "0", "0.01", "0.25", "0.5", "1"))),
        hysteresis=int(rng.integers(1, 4)),
        min_scale=low,
        max_scale=start * float(2.0 ** rng.integers(0, 6)),
    )


def _random_faults(rng: np.random.Generator, leaves: tuple[Leaf, ...], steps: int, devices: int) -> tuple[Fault, ...]:
    full = [index for index, leaf in enumerate(leaves) if np.prod(leaf.shape)]
    faults = []
    for step in range(steps):
        while rng.random() < 0.3:
            leaf = int(rng.choice(full))
            value = FAULTS[str(rng.choice(list(FAULTS)))]
            entry = int(rng.integers(np.prod(leaves[leaf].shape)))
            faults.append(Fault(step, leaf, int(rng.integers(devices)), entry, value))
    return tuple(faults)


def hung_together(program: Program, leaves: list[Any]) -> Any:
    """The leaves as the program's tree."""
    if program.tree == "one":
        return leaves[0]
    if program.tree == "list":
        return list(leaves)
    if program.tree == "tuple":
        return tuple(leaves)
    if program.tree == "nested":
        return {"first": {"w": leaves[0]}, "nothing": None, "rest": [*leaves[1:], ()]}
    return {f"leaf_{index}": leaf for index, leaf in enumerate(leaves)}
