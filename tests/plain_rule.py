"""The loss scale's rule in plain Python: exact fractions, no JAX."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass
class PlainRule:
    """A state machine: `step(finite)` moves it by one training step. `tolerance` is a decimal in words, so that it is exact."""

    scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    tolerance: str = "0"
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self):
        self.streak = self.overflows = self.since = self.at_floor = 0
        self.forgiven = self.hysteresis

    def step(self, finite: bool) -> None:
        self.since += 1
        if finite:
            self.at_floor = 0
            self.streak += 1
            if self.streak == self.growth_interval:
                self.streak = self.since = 0
                self.forgiven = self.hysteresis
                self.move(self.growth_factor)
            return
        self.at_floor = self.at_floor + 1 if self.scale == self.min_scale else 0
        self.streak = 0
        self.overflows += 1
        self.forgiven = max(self.forgiven - 1, 0)
        if self.forgiven == 0 and Fraction(self.overflows, self.since) >= Fraction(self.tolerance):
            self.overflows = self.since = 0
            self.move(self.backoff_factor)

    def move(self, factor: float) -> None:
        low, high = np.float32(self.min_scale), np.float32(self.max_scale)
        with np.errstate(over="ignore"):
            self.scale = float(min(max(np.float32(self.scale) * np.float32(factor), low), high))

    def knobs(self) -> dict[str, float]:
        """The same rule as arguments of `dynamic_loss_scale`."""
        names = ("growth_interval", "growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale")
        return {name: getattr(self, name) for name in names} | {"tolerance": float(self.tolerance)}

    def fields(self) -> dict[str, float]:
        """The fields of `DynamicLossScaleState`."""
        return {
            "loss_scale": self.scale,
            "finite_in_a_row": self.streak,
            "overflows_counted": self.overflows,
            "steps_since_rescale": self.since,
            "hysteresis_left": self.forgiven,
            "overflows_at_floor": self.at_floor,
        }
