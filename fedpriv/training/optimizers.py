"""Server optimisers: pairs of pure functions over named float32 tensors.

The released average Δ of the users' updates takes the place of the negative gradient
(Reddi et al. 2021, "Adaptive Federated Optimization", algorithm 2). Everything here sees
released quantities only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError

Parameters = Mapping[str, npt.NDArray[np.float32]]
Average = Mapping[str, npt.NDArray[np.float64]]
Moments = Mapping[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class OptimizerState:
    """First moment m and second moment v by tensor; empty where an optimiser keeps none."""

    first: Moments
    second: Moments


class ServerOptimizer(ABC):
    """Turns the released average into the next model."""

    @abstractmethod
    def init(self, parameters: Parameters) -> OptimizerState:
        """State before the first round."""

    @abstractmethod
    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """Next parameters and next state; the arguments are left as they are."""


@dataclass(frozen=True)
class FedAvg(ServerOptimizer):
    """x ← x + η·Δ (McMahan et al. 2017 for η = 1)."""

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)

    def init(self, parameters: Parameters) -> OptimizerState:
        """No moments."""
        del parameters
        return OptimizerState({}, {})

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """One step along the average."""
        return _stepped(parameters, average, self.learning_rate), state


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """m ← β·m + Δ;  x ← x + η·m (Hsu et al. 2019)."""

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)
        _check("momentum", self.momentum, below=1.0)

    def init(self, parameters: Parameters) -> OptimizerState:
        """No velocity: m = 0."""
        return OptimizerState(_filled(parameters, 0.0), {})

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """One step along the velocity."""
        velocity = {name: self.momentum * m + average[name] for name, m in state.first.items()}
        return _stepped(parameters, velocity, self.learning_rate), OptimizerState(velocity, {})


class SecondMoment(StrEnum):
    """How an adaptive optimiser follows the squared average."""

    ADAGRAD = "fedadagrad"
    """v ← v + Δ²"""
    ADAM = "fedadam"
    """v ← β₂·v + (1 − β₂)·Δ²"""
    YOGI = "fedyogi"
    """v ← v − (1 − β₂)·Δ²·sign(v − Δ²)"""


@dataclass(frozen=True)
class FedAdaptive(ServerOptimizer):
    """m ← β₁·m + (1 − β₁)·Δ;  v by its rule;  x ← x + η·m / (√v + τ).

    No bias correction, and v starts at τ², as in Reddi et al. 2021.

    Attributes:
        rule: FedAdagrad, FedAdam or FedYogi.
        learning_rate: η ≥ 0.
        beta1: decay of m in [0, 1).
        beta2: decay of v in [0, 1); FedAdagrad has no use for it.
        tau: degree of adaptivity τ > 0.
    """

    rule: SecondMoment
    learning_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)
        _check("beta1", self.beta1, below=1.0)
        _check("beta2", self.beta2, below=1.0)
        _check("tau", self.tau)
        if self.tau == 0.0:
            raise InvalidValueError("tau is 0; it must be positive")

    def init(self, parameters: Parameters) -> OptimizerState:
        """No velocity, m = 0, and v = τ²."""
        return OptimizerState(_filled(parameters, 0.0), _filled(parameters, self.tau**2))

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """One adaptive step."""
        follow = _RULES[self.rule]
        first = {
            name: self.beta1 * m + (1.0 - self.beta1) * average[name]
            for name, m in state.first.items()
        }
        second = {
            name: follow(v, average[name] ** 2, self.beta2) for name, v in state.second.items()
        }
        direction = {name: first[name] / (np.sqrt(second[name]) + self.tau) for name in first}
        return _stepped(parameters, direction, self.learning_rate), OptimizerState(first, second)


Array = npt.NDArray[np.float64]
_RULES: Mapping[SecondMoment, Callable[[Array, Array, float], Array]] = {
    SecondMoment.ADAGRAD: lambda v, square, _: v + square,
    SecondMoment.ADAM: lambda v, square, beta: beta * v + (1.0 - beta) * square,
    SecondMoment.YOGI: lambda v, square, beta: v - (1.0 - beta) * square * np.sign(v - square),
}


def _filled(parameters: Parameters, value: float) -> Moments:
    return {name: np.full(p.shape, value) for name, p in parameters.items()}


def _stepped(parameters: Parameters, direction: Average, learning_rate: float) -> Parameters:
    """Parameters after a step, saturated to what float32 holds so that a model stays finite."""
    return {name: _moved(p, direction[name], learning_rate) for name, p in parameters.items()}


def _moved(
    parameter: npt.NDArray[np.float32], direction: Array, learning_rate: float
) -> npt.NDArray[np.float32]:
    limit = np.finfo(np.float32).max
    # In one array: fresh memory costs more than the arithmetic.
    moved = np.multiply(direction, learning_rate, out=np.empty_like(direction))
    moved += parameter
    return np.clip(moved, -limit, limit, out=moved).astype(np.float32)


def _check(name: str, value: float, below: float = float("inf")) -> None:
    if not 0.0 <= value < below:
        raise InvalidValueError(f"{name} is {value}; it must be in [0, {below})")
