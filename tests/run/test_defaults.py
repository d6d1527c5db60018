"""What Python leaves out is what a file leaves out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedpriv
from fedpriv.data import load_digits
from fedpriv.experiment.config import Config, parse_config, read_toml
from fedpriv.experiment.grouping import ClippingPolicy
from fedpriv.experiment.models import softmax_regression

BUDGET = {"epsilon": 2.0, "delta": 1e-3}


def of_file(**sections: Mapping[str, object]) -> Config:
    """A file that names data, model, ε and δ, and these sections."""
    bare = {"name": "bare", "data": "digits", "model": "softmax", "privacy": BUDGET}
    return parse_config({**bare, **sections}, "test")


def of_run(folder: Path) -> Config:
    """How a run trained."""
    return parse_config(read_toml(folder / "plan.toml"), "plan")


def simulated(out: Path, mechanism: fedpriv.Mechanism, **more: Any) -> Config:
    """How a run of one round trained."""
    task, calibrated = (
        fedpriv.Task(softmax_regression()),
        mechanism.calibrate(**BUDGET, rounds=1),
    )
    fedpriv.simulate(load_digits(users=40), task, calibrated, out=out, quiet=True, **more)
    return of_run(out)


def test_data_model_epsilon_and_delta_are_an_experiment(tmp_path: Path) -> None:
    run, expected = simulated(tmp_path / "run", fedpriv.Mechanism.poisson()), of_file()
    assert run.training() == expected.training() == fedpriv.SGD(0.3, batch_size=32, epochs=1)
    assert run.server.build() == expected.server.build() == fedpriv.FedAdam(0.03)
    found = replace(run.mechanism(), noise_multiplier=None)
    assert found == expected.mechanism().for_users(40) != expected.mechanism()
    assert fedpriv.Mechanism.poisson().calibrate(**BUDGET).rounds == expected.rounds


@pytest.mark.parametrize("kind", [fedpriv.Flat, fedpriv.PerLayer, fedpriv.Joint])
@pytest.mark.parametrize(
    ("q", "users", "norm"),
    [(0.3, 300, 0.1), (0.5, 800, 0.2), (0.1, 25_000, 0.5), (1.0, 10_000, 1.0), (0.2, 10**6, 1.0)],
)
def test_the_norm_grows_as_the_root_of_a_cohort_s_size_from_a_tenth_to_one(
    kind: type[fedpriv.Flat], q: float, users: int, norm: float
) -> None:
    left_out = fedpriv.Mechanism.poisson(q, kind())
    found = left_out.for_users(users).clipping
    assert isinstance(found, kind)
    assert found.norm == pytest.approx(norm)
    for other in (kind(0.7), fedpriv.Grouped({"all": fedpriv.Part(["*"], kind(0.7))})):
        given = fedpriv.Mechanism.poisson(q, other)
        assert given.for_users(users) is given


@pytest.mark.parametrize(
    ("clipping", "section"),
    [
        (fedpriv.Flat(0.5), {"norm": 0.5}),
        (fedpriv.Flat(0.1), {"norm": 0.1}),
        (fedpriv.Joint(), {"strategy": "joint"}),
        (fedpriv.PerLayer(0.2), {"strategy": "per-layer", "norm": 0.2}),
    ],
)
def test_the_optimiser_belongs_to_the_norm(
    tmp_path: Path, clipping: ClippingPolicy, section: dict[str, object]
) -> None:
    found = simulated(tmp_path / "run", fedpriv.Mechanism.poisson(clipping=clipping))
    assert found.server.build() == of_file(clipping=section).server.build()
    named = simulated(
        tmp_path / "named", fedpriv.Mechanism.poisson(clipping=clipping), server=fedpriv.FedYogi()
    )
    assert named.server.build() == fedpriv.FedYogi()


def test_examples_give_a_gradient_to_the_same_optimiser(tmp_path: Path) -> None:
    found = simulated(tmp_path / "run", fedpriv.Mechanism.poisson(unit="example"))
    expected = of_file(privacy={**BUDGET, "unit": "example"})
    assert found.training() == expected.training()
    assert found.server.build() == expected.server.build()


def test_arms_of_other_norms_are_compared_under_one_optimiser(tmp_path: Path) -> None:
    usual = fedpriv.Mechanism.poisson().calibrate(**BUDGET, rounds=1)
    larger = {"mechanism": replace(usual, clipping=fedpriv.Flat(0.5))}
    arms = {"usual": {}, "larger": larger, "average": {**larger, "server": fedpriv.FedAvg()}}
    study = fedpriv.compare(
        load_digits(users=40), fedpriv.Task(softmax_regression()), usual, arms, seeds=1,
        out=tmp_path / "study", quiet=True,
    )  # fmt: skip
    found = {path.parts[-4]: of_run(path.parent) for path in study.folder.rglob("plan.toml")}
    assert {arm: config.server.build() for arm, config in found.items()} == {
        "usual": fedpriv.FedAdam(0.03),
        "larger": fedpriv.FedAdam(0.03),
        "average": fedpriv.FedAvg(),
    }
    assert {config.training() for config in found.values()} == {of_file().training()}
