"""The ServerApp: what it is told, and a whole run on a grid in this process."""

import shutil
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore import object_ref
from safetensors.numpy import load_file

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.experiment.config import checked
from fedpriv.flower.grid import RunConfig
from fedpriv.flower.grid import app as server_app
from tests.commandline import fedpriv
from tests.flower.local_grid import LocalGrid, app

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "fedpriv/experiment/bundled/digits.toml"
SETTINGS = ("rounds=2", "seed=3", "privacy.noise_multiplier=0.0", "privacy.unsafe_no_privacy=true")


def run_on_workers(number: int, **config: object) -> None:
    nodes = {k + 2: (app, {"partition-id": k, "num-partitions": number}) for k in range(number)}
    grid = LocalGrid(nodes)
    try:
        server_app(grid=grid, context=Context(1, 1, {}, RecordDict(), config))
    finally:
        grid.close()


def test_a_run_is_that_of_one_process_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    given = [f"--set={text}" for text in SETTINGS]
    assert fedpriv("simulate", DIGITS, *given, "--out", tmp_path / "here").returncode == 0
    there = {"experiment": str(DIGITS), "out": str(tmp_path / "there"), "resume": True}
    run_on_workers(3, **there, set="; ".join(SETTINGS), workers=3)
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("here", "there")]
    for name, parameter in models[0].items():
        assert parameter.any()
        np.testing.assert_array_equal(models[1][name], parameter)
    written = {path.name for path in (tmp_path / "there").iterdir()}
    assert written == {path.name for path in (tmp_path / "here").iterdir()}
    run_on_workers(2, **there, set="; ".join(SETTINGS), workers=2)
    assert load_file(tmp_path / "there" / "model.safetensors").keys() == models[0].keys()
    with pytest.raises(InvalidValueError, match="holds a run already"):
        run_on_workers(2, **(there | {"resume": False}), set="; ".join(SETTINGS))


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
    there = {"experiment": str(experiment), "out": str(tmp_path / "there")}
    run_on_workers(2, **there, set="; ".join(settings), workers=2)
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("here", "there")]
    for name, parameter in models[0].items():
        np.testing.assert_array_equal(models[1][name], parameter)
        assert parameter.any()


def test_workers_have_the_activations_of_the_experiment(tmp_path: Path) -> None:
    rounded = (*SETTINGS, "rounds=1", 'engine.activations="bfloat16"')
    given = [f"--set={text}" for text in rounded]
    assert fedpriv("simulate", DIGITS, *given, "--out", tmp_path / "here").returncode == 0
    for name, settings in {"there": rounded, "exact": (*SETTINGS, "rounds=1")}.items():
        told = {"experiment": str(DIGITS), "out": str(tmp_path / name)}
        run_on_workers(2, **told, set="; ".join(settings), workers=2)
    weights = {
        name: load_file(tmp_path / name / "model.safetensors")["1.weight"]
        for name in ("here", "there", "exact")
    }
    size = np.linalg.norm(weights["exact"])
    np.testing.assert_array_equal(weights["here"], weights["there"])
    assert 1e-4 * size < np.linalg.norm(weights["there"] - weights["exact"]) < 2e-2 * size


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "key experiment is absent"),
        ({"experiment": 3}, "experiment is 3"),
        ({"experiment": "x", "workers": 0}, "workers is 0"),
        ({"experiment": "x", "resume": True}, "out must then be given"),
        ({"experiment": "x", "out-folder": "y"}, "unknown key out-folder"),
    ],
    ids=str,
)
def test_a_run_config_that_is_not_legal_is_refused(
    config: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        checked(RunConfig, config, "run config").setup()


def test_an_experiment_is_text_or_lies_in_the_bundle_or_comes_with_fedpriv(tmp_path: Path) -> None:
    of_file = RunConfig(
        experiment="fedpriv/experiment/bundled/digits.toml", set="seed=1", out=str(tmp_path)
    )
    for given in (DIGITS.read_text(encoding="utf-8"), "digits"):
        same = of_file.model_copy(update={"experiment": given})
        assert of_file.setup().config == same.setup().config
    with pytest.raises(InvalidValueError, match="cannot be read"):
        RunConfig(experiment="simulations/none.toml").setup()


def test_the_users_are_not_loaded_where_their_name_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'digits'"):
        run_on_workers(2, experiment=str(DIGITS), set="data.name=digts", out=str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # of what Flower calls
def test_the_bundle_holds_no_code(tmp_path: Path) -> None:
    """The installed fedpriv runs, so that there is no second copy under the same names."""
    # Flower looks at each file, those of environments too.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "studies")
    copied = shutil.copytree(ROOT, tmp_path / "app", ignore=left_out)
    shutil.copy(ROOT / ".gitignore", copied)
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(copied))) as file:
        names = set(file.namelist())
    assert names == {"LICENSE", "pyproject.toml", ".info/CONTENT"}


def test_flower_finds_the_apps_in_the_installed_package(tmp_path: Path) -> None:
    components = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    for reference in components["components"].values():
        assert object_ref.validate(reference, project_dir=tmp_path) == (True, None)
