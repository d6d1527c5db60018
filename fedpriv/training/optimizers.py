"""Server optimisers: pairs of pure functions over named float32 tensors.

The released average Δ of the users' updates takes the place of the negative gradient
(Reddi et al. 2021, "Adaptive Federated Optimization", algorithm 2). Everything here sees
released quantities only.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """m ← β₁·m + (1 − β₁)·Δ;  v ← β₂·v + (1 − β₂)·Δ²;  x ← x + η·m / (√v + τ).

    No bias correction, and v starts at τ², as in Reddi et al. 2021; so in the two below.

    Attributes:
        learning_rate: η ≥ 0.
        beta1: decay of m in [0, 1).
        beta2: decay of v in [0, 1).
        tau: degree of adaptivity τ > 0.
    """

    learning_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self)
        _check("beta2", self.beta2, below=1.0)

    def init(self, parameters: Parameters) -> OptimizerState:
        """No velocity, m = 0, and v = τ²."""
        return OptimizerState(_filled(parameters, 0.0), _filled(parameters, self.tau**2))

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """One adaptive step."""
        second = {
            name: self.beta2 * v + (1.0 - self.beta2) * average[name] ** 2
            for name, v in state.second.items()
        }
        return _adaptive_step(self, average, state, second, parameters)


@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """FedAdam with v ← v + Δ²."""

    learning_rate: float = 0.1
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self)

    def init(self, parameters: Parameters) -> OptimizerState:
        """No velocity, m = 0, and v = τ²."""
        return OptimizerState(_filled(parameters, 0.0), _filled(parameters, self.tau**2))

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """One adaptive step."""
        second = {name: v + average[name] ** 2 for name, v in state.second.items()}
        return _adaptive_step(self, average, state, second, parameters)


@dataclass(frozen=True)
class FedYogi(ServerOptimizer):
    """FedAdam with v ← v − (1 − β₂)·Δ²·sign(v − Δ²)."""

    learning_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self)
        _check("beta2", self.beta2, below=1.0)

    def init(self, parameters: Parameters) -> OptimizerState:
        """No velocity, m = 0, and v = τ²."""
        return OptimizerState(_filled(parameters, 0.0), _filled(parameters, self.tau**2))

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        """One adaptive step."""
        squares = {name: average[name] ** 2 for name in state.second}
        second = {
            name: v - (1.0 - self.beta2) * squares[name] * np.sign(v - squares[name])
            for name, v in state.second.items()
        }
        return _adaptive_step(self, average, state, second, parameters)


SERVER_OPTIMIZERS: Mapping[str, type[ServerOptimizer]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedadagrad": FedAdagrad,
    "fedyogi": FedYogi,
}
"""The values of server.optimizer in a configuration."""

Array = npt.NDArray[np.float64]


def _adaptive_step(
    optimizer: FedAdam | FedAdagrad | FedYogi,
    average: Average,
    state: OptimizerState,
    second: Moments,
    parameters: Parameters,
) -> tuple[Parameters, OptimizerState]:
    beta, tau = optimizer.beta1, optimizer.tau
    first = {name: beta * m + (1.0 - beta) * average[name] for name, m in state.first.items()}
    direction = {name: first[name] / (np.sqrt(second[name]) + tau) for name in first}
    after = OptimizerState(first, second)
    return _stepped(parameters, direction, optimizer.learning_rate), after


def _check_adaptive(optimizer: FedAdam | FedAdagrad | FedYogi) -> None:
    _check("learning_rate", optimizer.learning_rate)
    _check("beta1", optimizer.beta1, below=1.0)
    _check("tau", optimizer.tau)
    if optimizer.tau == 0.0:
        raise InvalidValueError("tau is 0; it must be positive")


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
