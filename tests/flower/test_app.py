"""A whole run on a grid in this process."""

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.experiment.config import load_config
from fedpriv.flower.grid import GridSimulation
from fedpriv.report.tables import screen
from fedpriv.run.run import RunSetup
from tests.commandline import fedpriv
from tests.flower.local_grid import LocalGrid, app

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "fedpriv/experiment/bundled/digits.toml"
SETTINGS = ("rounds=2", "seed=3", "privacy.noise_multiplier=0.0", "privacy.unsafe_no_privacy=true")


def run_on_workers(
    workers: int, out: Path, *settings: str, experiment: Path = DIGITS, resume: bool = False
) -> None:
    nodes = {k + 2: (app, {"partition-id": k, "num-partitions": workers}) for k in range(workers)}
    setup = RunSetup.at(load_config(experiment, list(settings)), out, resume=resume)
    simulation, grid = GridSimulation.of(setup, workers), LocalGrid(nodes)
    try:
        simulation.run(grid, threading.Event(), screen())
    finally:
        grid.close()


def test_a_run_is_that_of_one_process_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    given = [f"--set={text}" for text in SETTINGS]
    assert fedpriv("simulate", DIGITS, *given, "--out", tmp_path / "here").returncode == 0
    run_on_workers(3, tmp_path / "there", *SETTINGS, resume=True)
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("here", "there")]
    for name, parameter in models[0].items():
        assert parameter.any()
        np.testing.assert_array_equal(models[1][name], parameter)
    written = {path.name for path in (tmp_path / "there").iterdir()}
    assert written == {path.name for path in (tmp_path / "here").iterdir()}
    run_on_workers(2, tmp_path / "there", *SETTINGS, resume=True)
    assert load_file(tmp_path / "there" / "model.safetensors").keys() == models[0].keys()
    with pytest.raises(InvalidValueError, match="holds a run already"):
        run_on_workers(2, tmp_path / "there", *SETTINGS)


POLICIES = {
    "random-allocation": "{ rounds = 2 }",
    "fixed-size": "{ cohort_size = 100 }",
    "every-user": '{ relation = "replace-one" }',
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_under_another_sampling_policy_is_that_of_one_process(
    tmp_path: Path, policy: str
) -> None:
    text = DIGITS.read_text(encoding="utf-8").replace("sampling_probability = 0.3\n", "")
    experiment = tmp_path / "other.toml"
    sampling = f'[sampling]\npolicy = "{policy}"\noptions = {POLICIES[policy]}\n'
    experiment.write_text(f"{text}\n{sampling}", encoding="utf-8")
    settings = ("rounds=3", "seed=3", "privacy.noise_multiplier=1.0", "privacy.epsilon=1000.0")
    given = [f"--set={text}" for text in settings]
    done = fedpriv("simulate", experiment, *given, "--out", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    run_on_workers(2, tmp_path / "there", *settings, experiment=experiment)
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("here", "there")]
    for name, parameter in models[0].items():
        np.testing.assert_array_equal(models[1][name], parameter)
        assert parameter.any()


def test_workers_have_the_activations_of_the_experiment(tmp_path: Path) -> None:
    rounded = (*SETTINGS, "rounds=1", 'engine.activations="bfloat16"')
    given = [f"--set={text}" for text in rounded]
    assert fedpriv("simulate", DIGITS, *given, "--out", tmp_path / "here").returncode == 0
    for name, settings in {"there": rounded, "exact": (*SETTINGS, "rounds=1")}.items():
        run_on_workers(2, tmp_path / name, *settings)
    weights = {
        name: load_file(tmp_path / name / "model.safetensors")["1.weight"]
        for name in ("here", "there", "exact")
    }
    size = np.linalg.norm(weights["exact"])
    np.testing.assert_array_equal(weights["here"], weights["there"])
    assert 1e-4 * size < np.linalg.norm(weights["there"] - weights["exact"]) < 2e-2 * size


def test_the_users_are_not_loaded_where_their_name_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'digits'"):
        run_on_workers(2, tmp_path / "a", "data.name=digts")
    assert list(tmp_path.iterdir()) == []
