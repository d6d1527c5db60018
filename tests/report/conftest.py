"""A run of DIGITS and a small study, each with its report, once for all tests."""

from pathlib import Path

import pytest

from fedpriv.run.compare import calibrated, run_cell
from fedpriv.studies.study import load_study
from tests.commandline import printed
from tests.studies.studying import study_file

ROOT = Path(__file__).parents[2]
SHORT = (
    "rounds=6",
    "privacy.noise_multiplier=4.0",
    "seed=1",
    "output.simulation_only=true",
)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reported") / "run"
    settings = [part for one in SHORT for part in ("--set", one)]
    printed("simulate", ROOT / "fedpriv/experiment/bundled/digits.toml", *settings, "--out", folder)
    return folder


@pytest.fixture(scope="session")
def report(run_folder: Path) -> Path:
    """The report of the run, as its command writes it."""
    path = run_folder / "report.html"
    assert printed("report", run_folder).strip() == str(path)
    return path


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny study of two arms at two targets."""
    folder = tmp_path_factory.mktemp("study")
    target = {"epsilon": [4.0, 8.0], "delta": 1e-2}
    study = load_study(study_file(folder, target=target))
    noise = calibrated(study)
    for cell in study.cells:
        run_cell(study, cell, folder, noise[cell.arm, cell.target])
    return folder


@pytest.fixture(scope="session")
def study_report(study_folder: Path) -> Path:
    path = study_folder / "page.html"
    assert printed("report", study_folder, "--out", path).strip() == str(path)
    return path
