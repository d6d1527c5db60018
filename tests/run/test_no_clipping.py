"""A baseline without noise and without clipping: the plain average of what users learn."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import parse_config

RNG = np.random.default_rng(0)
X = 30.0 * RNG.standard_normal((60, 4)).astype(np.float32)  # long updates, of unequal norms
Y = X[:, :3].argmax(1)
RATE = 0.7


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def unclipped(**more: object) -> fedpriv.Mechanism:
    settings = {"noise_multiplier": 0.0, "delta": 1e-3, "unsafe_no_privacy": True} | more
    return fedpriv.Mechanism(fedpriv.EveryUser(), fedpriv.Flat(math.inf), **settings)


def simulated(mechanism: fedpriv.Mechanism, out: Path) -> fedpriv.Run:
    return fedpriv.simulate(
        fedpriv.Population.from_arrays(X, Y, np.arange(60) // 6, held_out=(X, Y)),
        fedpriv.Task(model()),
        mechanism,
        local=fedpriv.SGD(RATE, epochs=1),
        server=fedpriv.FedAvg(),
        rounds=1,
        out=out,
        quiet=True,
        engine=fedpriv.Engine(processes=1),
    )


def test_the_average_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    expected = 0.0
    for user in range(10):
        alone = model()
        rows = slice(6 * user, 6 * user + 6)
        loss = functional.cross_entropy(alone(torch.tensor(X[rows])), torch.tensor(Y[rows]))
        (gradient,) = torch.autograd.grad(loss, alone.weight)
        expected = expected + (alone.weight - RATE * gradient) / 10
    released = simulated(unclipped(), tmp_path / "run").model.weight
    assert (released - model().weight).norm() > 1.0
    torch.testing.assert_close(released, expected, rtol=0.0, atol=1e-5)


def test_noise_needs_clipping_and_so_does_a_norm_that_adapts(tmp_path: Path) -> None:
    noisy = unclipped(noise_multiplier=1.0)
    with pytest.raises(InvalidValueError, match="'update' is not clipped"):
        simulated(noisy, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidValueError, match="norm is infinite"):
        unclipped(adaptive=fedpriv.AdaptiveClipping())
    for other in (fedpriv.Joint, fedpriv.PerLayer):
        with pytest.raises(InvalidValueError, match="norm is inf"):
            other(math.inf)


def test_a_file_can_say_so() -> None:
    table = {
        "name": "baseline",
        "model": "softmax",
        "clipping": {"norm": math.inf},
        "privacy": {"noise_multiplier": 0.0, "delta": 1e-3, "unsafe_no_privacy": True},
    }
    config = parse_config(table, "test")
    assert config.mechanism().clipping == fedpriv.Flat(math.inf)
    assert parse_config(config.model_dump(exclude_none=True), "again") == config
