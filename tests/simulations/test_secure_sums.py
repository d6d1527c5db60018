"""What the comparison of secure sums with a trusted server computes, and its federation."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from simulations.secure_sums import CLIPPING, LAYOUT, RATE, USERS, Digits, Q, released

COSTS = """
import json
from dataclasses import asdict
from fedpriv.ledger.events import SecureSum
from simulations.secure_load import costs
print(json.dumps([asdict(cost) for cost in costs(SecureSum(3, 1, 0), 50_000)]))
"""


def test_a_local_step_is_that_of_autograd() -> None:
    digits, cohort = Digits.load(), np.array([3, 44, 200])
    model = np.random.default_rng(0).normal(size=(65, 10))
    found = digits.updates(model, cohort)
    for user, update in zip(cohort, found, strict=True):
        rows = digits.user == user
        weights = torch.tensor(model, requires_grad=True)
        classes = torch.tensor(digits.y[rows].argmax(axis=1))
        scores = torch.tensor(digits.x[rows]) @ weights
        torch.nn.functional.cross_entropy(scores, classes).backward()
        assert weights.grad is not None
        np.testing.assert_allclose(update, -RATE * weights.grad.numpy().ravel(), rtol=1e-9)


@pytest.mark.parametrize(
    ("secure", "growth"), [(None, 1.0), (SecureSum(10, 3, 1), (10 / 6) ** 0.5)]
)
def test_a_release_has_the_noise_of_all_nodes(secure: SecureSum | None, growth: float) -> None:
    sampling = PoissonSampling(USERS, Q)
    mechanism = GaussianMechanism.calibrated(sampling, CLIPPING, 2.0, (1.0,), secure_sum=secure)
    cohort = np.arange(0, USERS, 3)
    sums = np.random.default_rng(1).integers(-(2**20), 2**20, (cohort.size, LAYOUT.dimension))
    errors = np.concatenate([
        released(mechanism, sums, cohort, SeededEntropy(seed))
        - mechanism.query.averaged(sums.sum(axis=0))
        for seed in range(20)
    ])  # fmt: skip
    stddev = growth * mechanism.query.tensor_stddevs["weight"]
    assert np.std(errors) == pytest.approx(stddev, rel=0.03)  # 13,000 numbers: 5 deviations
    assert abs(np.mean(errors)) < 0.05 * stddev


@pytest.mark.slow
def test_a_federation_of_processes_sends_four_bytes_a_number_with_either_trust() -> None:
    """In a process of its own: it forks. Both kinds of rounds check their own sums."""
    done = subprocess.run([sys.executable, "-c", COSTS], capture_output=True, text=True, check=True)
    plain, masked = json.loads(done.stdout)
    for cost in (plain, masked):
        assert 4 * 50_000 < cost["sent"] < 4 * 50_000 + 6_000
