"""Experiments that come with the package, by name, wherever the command is given."""

import shutil
from pathlib import Path

import pytest

from fedpriv.experiment.bundled import NAMES, experiment_file
from fedpriv.experiment.config import load_config
from tests.commandline import printed, refused


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_has_its_name_and_can_be_planned_anywhere(name: str, tmp_path: Path) -> None:
    config = load_config(experiment_file(Path(name)))
    assert config.name == name
    expected = f"q = {config.privacy.sampling_probability:g} of N ="
    assert expected in printed("plan", name, cwd=tmp_path)


def test_a_file_comes_before_a_name_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert experiment_file(Path("digits")).is_file()
    (tmp_path / "digits").rmdir()
    shutil.copy(experiment_file(Path("digits")), "digits")
    assert experiment_file(Path("digits")) == Path("digits")


@pytest.mark.parametrize("path", ["digits.toml", "folder/digits"])
def test_a_path_is_no_name(path: str) -> None:
    assert experiment_file(Path(path)) == Path(path)


@pytest.mark.parametrize("folder", ["mine", "runs/mine", "mine.1", "."])
def test_a_folder_is_refused_and_the_plan_of_a_run_in_it_is_named(
    folder: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    line = refused("simulate", folder, "--resume", "--out", folder, cwd=tmp_path)
    assert line == f"error: {folder} is a folder; it must be a file"
    (tmp_path / folder / "plan.toml").touch()
    line = refused("simulate", folder, "--resume", "--out", folder, cwd=tmp_path)
    assert line.endswith(f"it must be a file, such as {Path(folder) / 'plan.toml'}")


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_an_unknown_name_is_refused_with_all_names(command: str, tmp_path: Path) -> None:
    line = refused(command, "digist", cwd=tmp_path)
    assert "did you mean 'digits'?" in line
    assert line.endswith(f"known names: {', '.join(NAMES)}")
    assert list(tmp_path.iterdir()) == []
