"""The inner optimizers in numpy and float64, leaf by leaf, straight from their papers."""

from typing import Any

import numpy as np

from tests.fuzzing.programs import Program

B1, B2, MOMENTUM = 0.9, 0.999, 0.9
LION_B1, LION_B2 = 0.9, 0.99
ADAM_EPS, BERT_EPS = 1e-8, 1e-6


class Ambiguous(Exception):
    """What a program should give hangs on a rounding, so that nothing can be said of it."""


class NumpyOptimizer:
    """State of one leaf. `step` gives the update, and the sum of the magnitudes of what it was made of.

    In fp32 the terms of a moment may cancel; an error is a share of their magnitudes and not of what is left of them.
    """

    def __init__(self, program: Program, shape: tuple[int, ...]):
        self.program = program
        self.count = self.seen = 0
        self.first, self.second, self.magnitude, self.mean, self.mean_terms = (np.zeros(shape) for _ in range(5))

    def step(self, grad: np.ndarray, param: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One micro-batch: nothing, until as many have come as are accumulated."""
        self.seen += 1
        self.mean = self.mean + (grad - self.mean) / self.seen
        self.mean_terms = self.mean_terms + (abs(grad) - self.mean_terms) / self.seen
        if self.seen < self.program.accumulate:
            return np.zeros_like(grad), np.zeros_like(grad)
        mean, terms = self.mean, self.mean_terms
        self.seen, self.mean, self.mean_terms = 0, np.zeros_like(grad), np.zeros_like(grad)
        rate = self.rate()
        self.count += 1
        direction, magnitude = getattr(self, self.program.inner)(mean, terms)
        if self.program.inner in ("adamw", "bert_adam", "lion"):
            decay = self.program.weight_decay * param
            direction, magnitude = direction + decay, magnitude + abs(decay)
        return -rate * direction, rate * magnitude

    def rate(self) -> float:
        rate, over = self.program.learning_rate, self.program.decay_over
        return rate if over is None else rate * (1 - 0.9 * min(self.count / over, 1.0))

    def sgd(self, grad: np.ndarray, terms: np.ndarray) -> Any:
        return grad, terms

    def momentum(self, grad: np.ndarray, terms: np.ndarray) -> Any:
        self.first = grad + MOMENTUM * self.first
        self.magnitude = terms + MOMENTUM * self.magnitude
        return self.first, self.magnitude

    def nesterov(self, grad: np.ndarray, terms: np.ndarray) -> Any:
        self.momentum(grad, terms)
        return grad + MOMENTUM * self.first, terms + MOMENTUM * self.magnitude

    def moments(self, grad: np.ndarray, terms: np.ndarray) -> None:
        self.first = B1 * self.first + (1 - B1) * grad
        self.magnitude = B1 * self.magnitude + (1 - B1) * terms
        self.second = B2 * self.second + (1 - B2) * grad**2

    def adam(self, grad: np.ndarray, terms: np.ndarray) -> Any:
        self.moments(grad, terms)
        first, second = 1 - B1**self.count, 1 - B2**self.count
        below = np.sqrt(self.second / second) + ADAM_EPS
        return self.first / first / below, self.magnitude / first / below

    adamw = adam

    def bert_adam(self, grad: np.ndarray, terms: np.ndarray) -> Any:
        self.moments(grad, terms)
        below = np.sqrt(self.second) + BERT_EPS
        return self.first / below, self.magnitude / below

    def lion(self, grad: np.ndarray, terms: np.ndarray) -> Any:
        mixed = LION_B1 * self.first + (1 - LION_B1) * grad
        size = LION_B1 * self.magnitude + (1 - LION_B1) * terms
        if ((abs(mixed) < 1e-4 * size) | ((size > 0) & (size < 1e-35))).any():
            raise Ambiguous("a sign")
        self.first = LION_B2 * self.first + (1 - LION_B2) * grad
        self.magnitude = LION_B2 * self.magnitude + (1 - LION_B2) * terms
        return np.sign(mixed), np.abs(np.sign(mixed))
