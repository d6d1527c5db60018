"""Server optimisers: pairs of pure functions on named float32 tensors.

The released average Δ of the users' updates takes the place of the negative gradient
(Reddi et al. 2021, "Adaptive Federated Optimization", algorithm 2). Everything here sees
only released numbers. A learning rate, here and in local training, is a number, or a
`RateSchedule`, which depends only on the public round number.

If Δ is minus an average of clipped gradients, FedAvg is NoisySGD (Abadi et al. 2016, algorithm 1)
and FedAdam is NoisyAdam (Bu et al. 2020, algorithm 2), with m₀ = 0, u₀ = τ² and ξ = τ. The papers
divide a sum by the size of the lot that was drawn; we divide it by the expected size, which is
public.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import check_range, hold_plain_numbers, require

Array = npt.NDArray[np.float64]
Parameters = Mapping[str, npt.NDArray[np.float32]]
Average = Mapping[str, Array]
Moments = Mapping[str, Array]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class OptimizerState:
    """The first moment m and second moment v, by tensor; empty if the optimiser keeps none."""

    first: Moments
    second: Moments


Step = tuple[Parameters, OptimizerState]


class RateSchedule(ABC):
    """A learning rate that changes from round to round."""

    @abstractmethod
    def at(self, number: int) -> float:
        """Return the rate ≥ 0 in a round, from 1; it depends only on that public number."""


class _Schedule(RateSchedule):
    """A schedule whose fields are numbers, which are checked."""

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class PolynomialDecay(_Schedule):
    """A rate that falls from `start` in round 1 to `end` after `rounds` rounds, then stays there.

    It is linear if `power` is 1: in round t ≤ rounds + 1 the rate is
    end + (start − end)·(1 − (t − 1)/rounds)^power.

    >>> [PolynomialDecay(1.0, 0.5, rounds=2).at(number) for number in (1, 2, 3, 4)]
    [1.0, 0.75, 0.5, 0.5]
    """

    start: float
    end: float
    rounds: int
    power: float = 1.0

    def at(self, number: int) -> float:
        """Return the rate in a round, from 1."""
        remaining = max(0.0, 1.0 - (number - 1) / self.rounds)
        return float(self.end + (self.start - self.end) * remaining**self.power)


@dataclass(frozen=True)
class CosineDecay(_Schedule):
    """A rate that goes from `start` to `end` in `rounds` rounds along a cosine, then stays there.

    In round t ≤ rounds + 1 it is end + (start − end)·(1 + cos(π·(t − 1)/rounds))/2
    (Loshchilov & Hutter 2017, without restarts).

    >>> [round(CosineDecay(1.0, 0.0, rounds=2).at(number), 9) for number in (1, 2, 3, 4)]
    [1.0, 0.5, 0.0, 0.0]
    """

    start: float
    end: float
    rounds: int

    def at(self, number: int) -> float:
        """Return the rate in a round, from 1."""
        angle = math.pi * min(1.0, (number - 1) / self.rounds)
        return float(self.end + (self.start - self.end) * (1.0 + math.cos(angle)) / 2.0)


@dataclass(frozen=True)
class ExponentialDecay(_Schedule):
    """The rate start·factor^((t − 1)/rounds): it shrinks by `factor` every `rounds` rounds."""

    start: float
    factor: float
    rounds: int = 1

    def at(self, number: int) -> float:
        """Return the rate in a round, from 1."""
        return float(self.start * self.factor ** ((number - 1) / self.rounds))


@dataclass(frozen=True)
class StepDecay(_Schedule):
    """The rate start·factor^⌊(t − 1)/rounds⌋: it is constant for `rounds` rounds at a time."""

    start: float
    factor: float
    rounds: int

    def at(self, number: int) -> float:
        """Return the rate in a round, from 1."""
        return float(self.start * self.factor ** ((number - 1) // self.rounds))


@dataclass(frozen=True)
class PowerDecay(_Schedule):
    """The rate start/t^power in round t (Robbins & Monro 1951)."""

    start: float
    power: float = 0.5

    def at(self, number: int) -> float:
        """Return the rate in a round, from 1."""
        return float(self.start / number**self.power)


def schedules_of(settings: object) -> dict[str, RateSchedule]:
    """Return the schedules among the fields of an optimiser or of local training, by name."""
    return {
        name: value for name, value in vars(settings).items() if isinstance(value, RateSchedule)
    }


def at_round(settings: Settings, number: int) -> Settings:
    """Return settings for a round, from 1, with each schedule replaced by its rate."""
    rates = {name: schedule.at(number) for name, schedule in schedules_of(settings).items()}
    return cast(Settings, replace(cast(Any, settings), **rates)) if rates else settings


SCHEDULES: Mapping[str, type[RateSchedule]] = {  # values of learning_rate.schedule
    "polynomial": PolynomialDecay,
    "cosine": CosineDecay,
    "exponential": ExponentialDecay,
    "step": StepDecay,
    "power": PowerDecay,
}
Rate = float | RateSchedule


def rate_of(learning_rate: Rate) -> float:
    """Return a learning rate as a number; InvalidValueError if it is still a schedule."""
    if isinstance(learning_rate, RateSchedule):
        setting = f"learning_rate is {learning_rate}"
        raise InvalidValueError(f"{setting}; a step needs a number: call `at` with a round")
    return learning_rate


_RANGES = {"rounds": "whole", "factor": "(0, 1]", "tau": "(0, inf)"}
_RANGES |= dict.fromkeys(("momentum", "beta1", "beta2"), "[0, 1)")


def _check_numbers(value: "RateSchedule | ServerOptimizer") -> None:
    """Raise InvalidValueError for a number out of range; rates of a schedule are checked later."""
    hold_plain_numbers(value)
    suffix = " of the schedule" if isinstance(value, RateSchedule) else ""
    for name, number in vars(value).items():
        if not (name == "learning_rate" and isinstance(number, RateSchedule)):
            check_range(f"{name}{suffix}", number, _RANGES.get(name, "[0, inf)"))


class ServerOptimizer(ABC):
    """Computes the next model from the released average."""

    def at(self, number: int) -> Self:
        """Return the optimiser for a round, from 1, with each schedule replaced by its rate."""
        return at_round(self, number)

    def init(self, parameters: Parameters) -> OptimizerState:  # noqa: ARG002
        """Return the state before the first round; by default it has no moments."""
        return OptimizerState({}, {})

    @abstractmethod
    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Return the next parameters and the next state; the arguments must not be changed."""


def stepped(
    optimizer: ServerOptimizer, average: Average, state: OptimizerState, parameters: Parameters
) -> Step:
    """Return the result of `update`, after a check of its names, shapes and types.

    InvalidValueError: the result is not a pair of parameters like these and an `OptimizerState`.
    Other tensors would train nothing, or end a run after its round was charged.
    """
    kind = type(optimizer).__name__
    step = optimizer.update(average, state, parameters)
    kinds = [*map(type, step)] if isinstance(step, tuple) else []
    if kinds[1:] != [OptimizerState] or not isinstance(step[0], Mapping):
        raise InvalidValueError(
            f"update of {kind} must return a pair: parameters by name, and an OptimizerState"
        )
    shapes, expected = _described(step[0]), _described(parameters)
    for n in {**expected, **shapes}:
        shape, limit = shapes.get(n, "absent"), expected.get(n, "absent")
        require(shape == limit, f"{n!r} is {shape} after update of {kind}; it must be {limit}")
    return {n: np.asarray(step[0][n]) for n in parameters}, step[1]


def try_out(optimizer: ServerOptimizer, parameters: Parameters) -> None:
    """Raise InvalidValueError if an optimiser cannot update these parameters.

    Call it before anything is charged.
    """
    copies = {name: p.copy() for name, p in parameters.items()}
    average = {name: np.ones(p.shape) for name, p in parameters.items()}
    try:
        stepped(optimizer.at(1), average, optimizer.init(copies), copies)
    except InvalidValueError:
        raise
    except Exception as error:
        kind, reason = type(optimizer).__name__, f"{type(error).__name__}: {error}"
        raise InvalidValueError(f"{kind} cannot step the server's model: {reason}") from error


def _described(tensors: Mapping[str, object]) -> dict[str, str]:
    # NumPy turns results without axes into scalars of type np.generic.
    arrays = {n: t for n, t in tensors.items() if isinstance(t, np.ndarray | np.generic)}
    described = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    return {name: type(t).__name__ for name, t in tensors.items()} | described


class _Numbers(ServerOptimizer):
    """An optimiser whose fields are numbers and schedules, which are checked."""

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class FedAvg(_Numbers):
    """x ← x + η·Δ (McMahan et al. 2017 for η = 1)."""

    learning_rate: Rate = 1.0

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take a step along the average."""
        return moved(parameters, average, self.learning_rate), state


@dataclass(frozen=True)
class FedAvgM(_Numbers):
    """m ← β·m + Δ;  x ← x + η·m (Hsu et al. 2019)."""

    learning_rate: Rate = 0.3  # 1 overshoots under noise: docs/choosing-settings.md
    momentum: float = 0.9

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return the state with zero velocity, m = 0."""
        return OptimizerState(_filled(parameters, 0.0), {})

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take a step along the velocity."""
        velocity = {name: self.momentum * m + average[name] for name, m in state.first.items()}
        return moved(parameters, velocity, self.learning_rate), OptimizerState(velocity, {})


@dataclass(frozen=True)
class _Adaptive(_Numbers):
    """m ← β₁·m + (1 − β₁)·Δ;  x ← x + η·m / (√v + τ), with v starting at τ²."""

    learning_rate: Rate = 0.03  # η ≥ 0; chosen in docs/choosing-settings.md
    beta1: float = 0.9  # decay of m in [0, 1)
    tau: float = field(default=1e-3, kw_only=True)  # degree of adaptivity τ > 0

    @abstractmethod
    def _second(self, v: Array, square: Array) -> Array:
        """Return the next v, given Δ²."""

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return the state with m = 0 and v = τ²."""
        return OptimizerState(_filled(parameters, 0.0), _filled(parameters, self.tau**2))

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take an adaptive step."""
        decay, gain = self.beta1, 1.0 - self.beta1
        first = {name: decay * m + gain * average[name] for name, m in state.first.items()}
        second = {n: self._second(v, average[n] ** 2) for n, v in state.second.items()}
        direction = {name: m / (np.sqrt(second[name]) + self.tau) for name, m in first.items()}
        return moved(parameters, direction, self.learning_rate), OptimizerState(first, second)


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """m ← β₁·m + (1 − β₁)·Δ;  v ← β₂·v + (1 − β₂)·Δ²;  x ← x + η·m / (√v + τ).

    As in Reddi et al. 2021, there is no bias correction, and v starts at τ². FedAdagrad and FedYogi
    do the same.
    """

    beta2: float = 0.99  # decay of v in [0, 1)

    def _second(self, v: Array, square: Array) -> Array:
        return self.beta2 * v + (1.0 - self.beta2) * square


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """FedAdam with v ← v + Δ²."""

    learning_rate: Rate = 0.1

    def _second(self, v: Array, square: Array) -> Array:
        return v + square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """FedAdam with v ← v − (1 − β₂)·Δ²·sign(v − Δ²)."""

    beta2: float = 0.99

    def _second(self, v: Array, square: Array) -> Array:
        return v - (1.0 - self.beta2) * square * np.sign(v - square)


SERVER_OPTIMIZERS: Mapping[str, type[ServerOptimizer]] = {  # values of server.optimizer
    cls.__name__.lower(): cls for cls in (FedAvg, FedAvgM, FedAdam, FedAdagrad, FedYogi)
}


def _filled(parameters: Parameters, value: float) -> Moments:
    return {name: np.full(p.shape, value) for name, p in parameters.items()}


def moved(parameters: Parameters, direction: Average, learning_rate: Rate) -> Parameters:
    """Return the parameters after a step, clamped to float32's range so that they stay finite."""
    limit, rate = np.finfo(np.float32).max, rate_of(learning_rate)
    return {
        name: np.clip(rate * direction[name] + p, -limit, limit).astype(np.float32)
        for name, p in parameters.items()
    }
