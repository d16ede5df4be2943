"""The whole step in numpy and float64: what a training program has to give, after each of its steps."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fuzzing.optimizers import Ambiguous, NumpyOptimizer
from tests.fuzzing.programs import DTYPES, Program, random_program

FP32_MAX = float(np.finfo(np.float32).max)


@dataclass
class Expected:
    """After one step. Values are float64; `slack` is by how much fp32 may differ from them, entry by entry."""

    finite: bool
    scale: dict[str, float]  # the fields of the loss scale's state
    norm: float  # of the unscaled gradients
    norm_slack: float
    ratio: float
    skipped_in_a_row: int
    skipped_total: int
    applied_total: int
    loss: float | None
    loss_slack: float
    masters: list[np.ndarray]  # what the optimizer sees: fp32 masters, or the parameters themselves
    slack: list[np.ndarray]


class Reference:
    """Runs a program, step by step."""

    def __init__(self, program: Program):
        self.program = program
        self.params, self.grads = program.data()
        self.faults = [program.faults_of(leaf) for leaf in range(len(program.leaves))]
        self.values = [param.astype(np.float64) for param in self.params]
        self.slack = [np.zeros(leaf.shape) for leaf in program.leaves]
        self.highest = [abs(value) for value in self.values]
        self.optimizers = [NumpyOptimizer(program, leaf.shape) for leaf in program.leaves]
        self.rule = copy.copy(program.rule)
        self.skipped_in_a_row = self.skipped_total = self.applied_total = 0

    @property
    def scale(self) -> float:
        return self.rule.scale if self.rule else self.program.static_scale

    def run(self) -> list[Expected]:
        with np.errstate(all="ignore"):
            return [self.step(number) for number in range(self.program.steps)]

    def step(self, number: int) -> Expected:
        loss, loss_slack = self.loss(number)
        came = [self.mean_gradient(leaf, number) for leaf in range(len(self.params))]
        norm = self.norm(came, np.float32(self.scale))
        finite = bool(np.isfinite(norm))
        ratio, clipped = self.clipped(norm, finite, came)
        if finite:
            self.update(clipped)
        self.count(finite)
        return Expected(
            finite=finite,
            scale=self.rule.fields() if self.rule else {"loss_scale": self.scale},
            norm=norm if finite else np.inf,
            norm_slack=1e-5 * norm + 1e-17,  # squares below 1e-38 vanish in fp32
            ratio=ratio,
            **{name: getattr(self, name) for name in ("skipped_in_a_row", "skipped_total", "applied_total")},
            loss=loss,
            loss_slack=loss_slack,
            masters=[value.copy() for value in self.values],
            slack=[slack.copy() for slack in self.slack],
        )

    def loss(self, number: int) -> tuple[float | None, float]:
        """The sum of parameters times true gradients, on the first device."""
        if not self.program.from_loss:
            return None, 0.0
        terms = [self.rounded(leaf) * grads[0, number].astype(np.float64) for leaf, grads in enumerate(self.grads)]
        slack = sum(
            float((abs(grads[0, number]) * self.param_slack(leaf)).sum()) for leaf, grads in enumerate(self.grads)
        )
        return float(sum(term.sum() for term in terms)), slack + 1e-5 * float(sum(abs(term).sum() for term in terms))

    def mean_gradient(self, leaf: int, number: int) -> np.ndarray:
        """What the transformations are given: scaled, cast, broken, and averaged over the devices."""
        where, what = self.faults[leaf]
        dtype = self.program.leaves[leaf].grad_dtype
        each = []
        for device in range(self.program.devices):
            grad = (self.grads[leaf][device, number] * np.float32(self.scale)).astype(dtype)
            each.append(np.where(where[device, number], what[device, number].astype(dtype), grad))
        if self.program.layout == "distributed":  # the mean stays in fp32
            return np.sum([grad.astype(np.float32) / np.float32(len(each)) for grad in each], axis=0, dtype=np.float32)
        if len(each) == 1:
            return each[0]
        total = np.sum([grad.astype(np.float32) for grad in each], axis=0, dtype=np.float32)
        return (total / np.float32(len(each))).astype(dtype)

    def norm(self, came: list[np.ndarray], scale: np.float32) -> float:
        if self.program.composition == "recipe":  # of the gradients as they came, once
            return float(np.float32(norm_of(came)) / scale)
        return norm_of([grad.astype(np.float32) / scale for grad in came])

    def clipped(self, norm: float, finite: bool, came: list[np.ndarray]) -> tuple[float, Any]:
        """What clipping divides by, and the gradients that the optimizer sees."""
        limit = self.program.max_norm
        ratio = max(1.0, norm / limit) if limit is not None and finite else 1.0 if finite else np.inf
        return ratio, [grad.astype(np.float64) / self.scale / ratio for grad in came]

    def update(self, grads: list[np.ndarray]) -> None:
        for leaf, grad in enumerate(grads):
            step, magnitude = self.optimizers[leaf].step(grad, self.values[leaf])
            new = self.values[leaf] + step
            self.highest[leaf] = np.maximum(self.highest[leaf], abs(new))
            self.slack[leaf] = self.slack[leaf] + 3e-4 * magnitude + 3e-7 * self.highest[leaf]
            dtype = self.program.leaves[leaf].dtype
            if self.is_half(leaf) and (self.highest[leaf] > 3e4).any():
                raise Ambiguous("a parameter near the end of fp16")
            if self.is_half(leaf) and self.program.masters == "none":
                # A rounding may go the other way than in fp32, once or twice in a few steps.
                self.slack[leaf] = np.maximum(self.slack[leaf], 2 * half_ulp(dtype) * self.highest[leaf])
                new = new.astype(np.float32).astype(dtype).astype(np.float64)
            self.values[leaf] = new

    def is_half(self, leaf: int) -> bool:
        return self.program.leaves[leaf].dtype != DTYPES["fp32"]

    def rounded(self, leaf: int) -> np.ndarray:
        """The parameter itself: its master in its own dtype."""
        dtype = self.program.leaves[leaf].dtype
        return self.values[leaf].astype(np.float32).astype(dtype).astype(np.float64)

    def param_slack(self, leaf: int) -> np.ndarray:
        rounding = 2 * half_ulp(self.program.leaves[leaf].dtype) * self.highest[leaf] if self.is_half(leaf) else 0.0
        return self.slack[leaf] + rounding

    def count(self, finite: bool) -> None:
        if self.rule:
            self.rule.step(finite)
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        self.skipped_total += not finite
        self.applied_total += finite


def norm_of(grads: list[np.ndarray]) -> float:
    """Inf, if a sum of squares in fp32 would be Inf or NaN."""
    total = sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads)
    if abs(total / FP32_MAX - 1) < 1e-3:
        raise Ambiguous("a norm at the end of fp32")
    return float(np.sqrt(total)) if total <= FP32_MAX else np.inf


def half_ulp(dtype: np.dtype) -> float:
    """The distance from 1 to the next number of a half-precision dtype."""
    return 2.0**-10 if dtype == DTYPES["fp16"] else 2.0**-7


def unambiguous(seed: int) -> tuple[Program, list[Expected]]:
    """The seed's program, and what it has to give."""
    for attempt in range(50):
        program = random_program(seed, attempt)
        try:
            return program, Reference(program).run()
        except Ambiguous:
            continue
    raise RuntimeError(f"seed {seed}: fifty programs in a row hang on a rounding")
