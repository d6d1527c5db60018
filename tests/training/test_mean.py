"""The mean of the models of the last third of a run's rounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.run.folder import RunFolder
from fedpriv.training.rounds import load_checkpoint
from tests.run.test_released_model import PEOPLE, accuracy


class Normalised(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def simulated(out: Path, rounds: int, **more: object) -> fedpriv.Run:
    metrics = {"batch-norm": {"bound": 4.0}}
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0), metrics=metrics)
    mechanism = mechanism.calibrate(epsilon=4.0, delta=1e-2, rounds=rounds)
    return fedpriv.simulate(
        PEOPLE, fedpriv.Task(Normalised()), mechanism, local=fedpriv.SGD(0.5, epochs=1), out=out,
        engine=fedpriv.Engine(processes=1), quiet=True, seed=1, **more,
    )  # fmt: skip


@pytest.mark.parametrize("rounds", [3, 7, 9])
def test_it_is_the_mean_of_the_models_of_the_last_third(rounds: int, tmp_path: Path) -> None:
    models = []

    def keep(result: fedpriv.RoundResult) -> None:
        folder = tmp_path / "run" / "checkpoints"
        models.append(load_checkpoint(folder / f"round-{result.round:06d}.safetensors").state.model)

    run = simulated(tmp_path / "run", rounds, trackers=[keep])
    averaged = models[-(rounds // 3) :]
    state = run.mean_model.state_dict()
    for name in ("head.weight", "head.bias", "norm.weight", "norm.running_mean"):
        mean = np.mean([model[name] for model in averaged], axis=0, dtype=np.float64)
        np.testing.assert_allclose(state[name].numpy(), mean, rtol=1e-5, atol=1e-7)
    assert run.mean_accuracy == accuracy(run.mean_model)
    loaded = fedpriv.load_model(run.folder / "mean.safetensors", Normalised())
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name])
    if rounds > 3:  # there is more than one model in it
        assert not torch.equal(state["head.weight"], run.model.state_dict()["head.weight"])


def test_a_run_of_two_rounds_has_none(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", 2)
    assert (run.mean_model, run.mean_accuracy, run.mean_loss) == (None, None, None)
    assert not RunFolder(run.folder).mean.exists()


def test_a_run_that_goes_on_has_the_same(tmp_path: Path) -> None:
    def stop(result: fedpriv.RoundResult) -> None:
        if result.round == 8:
            raise KeyboardInterrupt

    whole = simulated(tmp_path / "whole", 9)
    with pytest.raises(KeyboardInterrupt):
        simulated(tmp_path / "parts", 9, trackers=[stop])
    parts = simulated(tmp_path / "parts", 9, resume=True)
    assert torch.equal(parts.mean_model.head.weight, whole.mean_model.head.weight)
    assert parts.mean_accuracy == whole.mean_accuracy
