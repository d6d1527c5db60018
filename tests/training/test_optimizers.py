"""Server optimisers against torch's where the rules agree, and by hand where they do not."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from fedpriv.errors import InvalidValueError
from fedpriv.training.optimizers import (
    SERVER_OPTIMIZERS,
    Average,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    OptimizerState,
    Parameters,
    ServerOptimizer,
    Step,
    stepped,
    try_out,
)

RNG = np.random.default_rng(0)
PARAMETERS = {"w": RNG.standard_normal((3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
AVERAGES = [{"w": RNG.standard_normal((3, 2)), "b": RNG.standard_normal(2)} for _ in range(6)]


def run(optimizer: ServerOptimizer) -> dict[str, np.ndarray]:
    parameters, state = PARAMETERS, optimizer.init(PARAMETERS)
    for average in AVERAGES:
        parameters, state = optimizer.update(average, state, parameters)
    return dict(parameters)


def run_torch(make: type[torch.optim.Optimizer], **options: float) -> dict[str, np.ndarray]:
    """The same averages as negative gradients, in float64."""
    tensors = {n: torch.tensor(p, dtype=torch.float64) for n, p in PARAMETERS.items()}
    optimizer = make(list(tensors.values()), **options)
    for average in AVERAGES:
        for name, tensor in tensors.items():
            tensor.grad = -torch.tensor(average[name])
        optimizer.step()
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("optimizer", "twin"),
    [
        (FedAvg(0.7), run_torch(torch.optim.SGD, lr=0.7)),
        (FedAvgM(0.3, 0.8), run_torch(torch.optim.SGD, lr=0.3, momentum=0.8)),
        (
            FedAdagrad(0.2, beta1=0.0, tau=0.1),
            run_torch(torch.optim.Adagrad, lr=0.2, initial_accumulator_value=0.01, eps=0.1),
        ),
    ],
    ids=["FedAvg", "FedAvgM", "FedAdagrad"],
)
def test_equals_torch(optimizer: ServerOptimizer, twin: dict[str, np.ndarray]) -> None:
    for name, tensor in run(optimizer).items():
        assert tensor.dtype == np.float32
        np.testing.assert_allclose(tensor, twin[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_rules_follow_the_paper(rule: type[ServerOptimizer]) -> None:
    eta, beta1, beta2, tau = 0.1, 0.9, 0.99, 1e-2
    decays = {} if rule is FedAdagrad else {"beta2": beta2}
    result = run(rule(eta, beta1, tau=tau, **decays))
    for name, start in PARAMETERS.items():
        for index in np.ndindex(start.shape):
            x, m, v = float(start[index]), 0.0, tau**2
            for average in AVERAGES:
                delta = float(average[name][index])
                m = beta1 * m + (1 - beta1) * delta
                if rule is FedAdagrad:
                    v = v + delta**2
                elif rule is FedAdam:
                    v = beta2 * v + (1 - beta2) * delta**2
                else:
                    v = v - (1 - beta2) * delta**2 * math.copysign(1.0, v - delta**2)
                x = x + eta * m / (math.sqrt(v) + tau)
            assert float(result[name][index]) == pytest.approx(x, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("optimizer", [rule() for rule in SERVER_OPTIMIZERS.values()], ids=repr)
def test_arguments_are_left_alone_and_models_stay_finite(optimizer: ServerOptimizer) -> None:
    before = {name: p.copy() for name, p in PARAMETERS.items()}
    huge = {name: np.full(p.shape, 1e300) for name, p in PARAMETERS.items()}
    with np.errstate(over="ignore"):
        after, _ = optimizer.update(huge, optimizer.init(PARAMETERS), PARAMETERS)
    for name, tensor in PARAMETERS.items():
        np.testing.assert_array_equal(tensor, before[name])
        assert np.all(np.isfinite(after[name]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(-1.0), "learning_rate is -1.0"),
        (lambda: FedAvg(math.nan), "learning_rate is nan"),
        (lambda: FedAvgM(1.0, 1.0), "momentum is 1.0"),
        (lambda: FedAdam(beta2=1.0), "beta2 is 1.0"),
        (lambda: FedAdam(tau=0.0), "tau is 0.0; it must be positive"),
    ],
)
def test_bad_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


class Own(ServerOptimizer):
    """An optimiser from outside the package, which makes something of what FedAvg gives."""

    def __init__(self, made: Callable[[Parameters], object], *, whole: bool = False) -> None:
        self.made, self.whole = made, whole

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        found = self.made(FedAvg().update(average, state, parameters)[0])
        return found if self.whole else (found, state)  # type: ignore[return-value]


def each(made: Callable[[np.ndarray], object]) -> Callable[[Parameters], Mapping[str, object]]:
    return lambda parameters: {name: made(p) for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            Own(each(lambda p: p.astype(np.float64))),
            r"^'w' is float64\[3, 2\] after update of Own",
        ),
        (Own(each(lambda p: p[:1])), r"^'w' is float32\[1, 2\] after update of Own"),
        (Own(each(torch.from_numpy)), "^'w' is Tensor after update of Own"),
        (Own(lambda p: {"w": p["w"]}), r"^'b' is absent after update of Own"),
        (Own(lambda p: {**p, "z": p["b"]}), r"^'z' is float32\[2\] after .* it must be absent$"),
        (Own(lambda p: list(p.values())), "^update of Own must return a pair: parameters by name"),
        (Own(lambda p: p, whole=True), "^update of Own must return a pair: parameters by name"),
        (Own(lambda p: (p, {}), whole=True), "^update of Own must return a pair: parameters by"),
        (Own(lambda p: p["v"]), "^Own cannot step the server's model: KeyError: 'v'$"),
    ],
)
def test_an_optimiser_that_cannot_step_is_refused(optimizer: Own, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        try_out(optimizer, PARAMETERS)


def test_trying_an_optimiser_out_leaves_parameters_alone() -> None:
    class InPlace(FedAvg):
        def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
            for name in parameters:
                parameters[name][...] += average[name]
            return parameters, state

    held = {name: p.copy() for name, p in PARAMETERS.items()}
    try_out(InPlace(), held)
    for name, tensor in held.items():
        np.testing.assert_array_equal(tensor, PARAMETERS[name])


@pytest.mark.parametrize("optimizer", [rule() for rule in SERVER_OPTIMIZERS.values()], ids=repr)
def test_a_parameter_may_be_a_number(optimizer: ServerOptimizer) -> None:
    one = {"scale": np.ones((), np.float32)}
    try_out(optimizer, one)
    after, _ = stepped(optimizer, {"scale": np.ones(())}, optimizer.init(one), one)
    assert isinstance(after["scale"], np.ndarray)


def test_tensors_keep_the_order_of_the_parameters() -> None:
    backwards = Own(lambda p: dict(reversed([*p.items()])))
    after, _ = stepped(backwards, AVERAGES[0], backwards.init(PARAMETERS), PARAMETERS)
    assert [*after] == [*PARAMETERS]
