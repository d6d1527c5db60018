"""Who a run's users are at the beginning, they are to its end."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.errors import InvalidValueError


def test_a_run_goes_on_with_the_users_that_it_began_with(tmp_path: Path) -> None:
    x = np.eye(4, dtype=np.float32).repeat(10, 0)
    y = np.arange(4).repeat(10)

    def simulated(users: np.ndarray, rounds: int) -> fedpriv.Run:
        def stop(result: fedpriv.RoundResult) -> None:
            if result.round == rounds:
                raise KeyboardInterrupt

        mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
        return fedpriv.simulate(
            fedpriv.Population.from_arrays(x, y, users, held_out=(x, y)),
            fedpriv.Task(torch.nn.Linear(4, 4), loss="cross-entropy"),
            mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=3),
            out=tmp_path / "run",
            resume=True,
            on_round=[stop],
            device="cpu",
            quiet=True,
        )

    with pytest.raises(KeyboardInterrupt):
        simulated(np.arange(40), 1)
    with pytest.raises(InvalidValueError, match="the users are not those that run"):
        simulated(np.arange(1, 41), 9)
    assert len(simulated(np.arange(40), 9).rounds) == 3
