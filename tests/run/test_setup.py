"""What a run on nodes is called, and what it cannot record."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.experiment.build import simulated
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import write_report
from fedpriv.run.run import RunSetup
from fedpriv.run.terminal import execute
from tests.commandline import printed, refused

SIMULATIONS = Path(__file__).parents[2] / "simulations"
FEDERATION = SIMULATIONS / "federation.toml"
DATA = '[data]\nname = "digits"\noptions = { users = 287 }\n'


def test_the_population_of_nodes_is_called_by_its_id(tmp_path: Path) -> None:
    population = "5f" * 16
    setup = RunSetup.at(load_config(FEDERATION, []), tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    experiment = setup.on_nodes(setup.config.federation, population, ["a", "b"])
    assert experiment.plan.population == population
    assert experiment.plan.sampling.population == 2


def test_a_server_names_the_classes_of_its_rows(tmp_path: Path) -> None:
    words = [f"digit {number}" for number in range(10)]
    config = load_config(FEDERATION, [f"evaluation.classes={words}"])
    setup = RunSetup.at(config, tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    assert setup.on_nodes(setup.config.federation, "people", ["a", "b"]).classes == tuple(words)


def test_nodes_are_not_asked_for_figures_that_are_not_private(tmp_path: Path) -> None:
    assignments = ["output.simulation_only=true"]
    setup = RunSetup.at(load_config(FEDERATION, assignments), tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match="on nodes it must be false"):
        setup.on_nodes(setup.config.federation, "people", ["a", "b"])
    assert list(tmp_path.iterdir()) == []


def test_nodes_are_not_asked_for_training_that_they_do_not_know(tmp_path: Path) -> None:
    assignments = ["local.algorithm=mine:SignSGD"]
    setup = RunSetup.at(load_config(FEDERATION, assignments), tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match="is 'mine:SignSGD'"):
        setup.on_nodes(setup.config.federation, "people", ["a", "b"])


def test_nodes_are_not_asked_for_work_without_bound(tmp_path: Path) -> None:
    experiment = tmp_path / "endless.toml"
    kept = [line for line in FEDERATION.read_text().splitlines() if "max_examples" not in line]
    experiment.write_text("\n".join(kept))
    setup = RunSetup.at(load_config(experiment, []), tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match=r"local\.max_examples is absent"):
        setup.on_nodes(setup.config.federation, "people", ["a", "b"])
    assert list(tmp_path.iterdir()) == [experiment]


def without_data(folder: Path, *more: str) -> RunSetup:
    text = FEDERATION.read_text()
    assert DATA in text
    (folder / "a.toml").write_text(text.replace(DATA, ""))
    return RunSetup.at(load_config(folder / "a.toml", list(more)), folder / "run", resume=False)


def test_a_server_with_rows_of_its_own_needs_no_section_data(tmp_path: Path) -> None:
    rows = {"x": np.zeros((5, 64), np.float32), "y": np.arange(5)}
    np.savez(tmp_path / "rows.npz", **rows)
    setup = without_data(tmp_path, f"federation.held_out={tmp_path / 'rows.npz'}")
    assert setup.config.federation is not None
    experiment = setup.on_nodes(setup.config.federation, "people", [*map(str, range(200))])
    assert experiment.config.data is None
    assert len(experiment.held_out["x"]) == 5


def test_the_rows_of_a_server_are_of_nobody_who_is_enrolled(tmp_path: Path) -> None:
    rows = {"x": np.zeros((3, 64), np.float32), "y": np.arange(3)}
    setup = without_data(tmp_path, f"federation.held_out={tmp_path / 'rows.npz'}")
    assert setup.config.federation is not None
    for owners, found in (
        (["zoe", "ann ", "ann "], "held-out rows name 1 of the enrolled users"),
        ([7.0, 8.0, 9.0], "user id number 0 is 7.0"),
    ):
        np.savez(tmp_path / "rows.npz", **rows, held_out_user=np.array(owners))
        with pytest.raises(DataError, match=found):
            setup.on_nodes(setup.config.federation, "people", ["ann", "bob"])
    np.savez(tmp_path / "rows.npz", **rows, held_out_user=np.array(["zoe", "zoe", "eve"]))
    experiment = setup.on_nodes(setup.config.federation, "people", ["ann", "bob"])
    assert experiment.held_out["held_out_user"].tolist() == ["zoe", "zoe", "eve"]


def test_a_server_without_any_rows_measures_nothing_and_releases_no_metric(tmp_path: Path) -> None:
    setup = without_data(tmp_path)
    assert setup.config.federation is not None
    assert setup.on_nodes(setup.config.federation, "people", [*map(str, range(200))]).held_out == {}
    measured = without_data(tmp_path, "metrics.report.examples={cap=5}")
    with pytest.raises(InvalidValueError, match=r"federation\.held_out or data must be given"):
        measured.on_nodes(setup.config.federation, "people", [*map(str, range(200))])


def test_a_run_without_held_out_rows_has_neither_loss_nor_accuracy(tmp_path: Path) -> None:
    settings = ["rounds=2", "data.options.users=40", "output.evaluate_every=1"]
    setup = RunSetup.at(
        load_config(experiment_file(Path("digits")), settings), tmp_path / "run", resume=False
    )
    experiment, transport = simulated(setup.config, setup.run)
    unmeasured = replace(experiment, held_out={})
    run = execute(setup, unmeasured, lambda *_: transport, Console(quiet=True))
    assert (run.loss, run.accuracy) == (None, None)
    assert [(each.loss, each.accuracy) for each in run.rounds] == [(None, None)] * 2
    assert "ε" in write_report(run.folder).read_text(encoding="utf-8")


def test_a_simulation_needs_data(tmp_path: Path) -> None:
    without_data(tmp_path)
    assert "key data is absent" in refused("simulate", tmp_path / "a.toml")


def test_a_run_finds_its_files_from_any_working_directory(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    text = experiment_file(Path("digits")).read_text()
    (here / "a.toml").write_text(text.replace("[privacy]", '[privacy]\nledger = "shared.sqlite"'))
    short = ("--set", "rounds=1", "--set", "data.options.users=40", "--set", "seed=1")
    printed("simulate", "../here/a.toml", *short, "--out", "run", cwd=there)
    assert (here / "shared.sqlite").exists()
    assert {path.name for path in there.iterdir()} == {"run"}
    plan = there / "run" / "plan.toml"
    assert str(tmp_path) not in plan.read_text(encoding="utf-8")
    # Moved together they still fit together, and a resumed run finds its ledger as well.
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(here, moved)
    shutil.move(there, moved)
    folder = moved / "there" / "run"
    printed("simulate", folder / "plan.toml", "--out", folder, "--resume", cwd=tmp_path)
    printed("report", folder, cwd=tmp_path)
    assert not (tmp_path / "shared.sqlite").exists()


def test_a_ledger_has_one_run_of_each_name(tmp_path: Path) -> None:
    ledger = tmp_path / "shared.sqlite"
    given = ["simulate", "digits", "--set", "rounds=2", "--set", f"privacy.ledger={ledger}"]
    given += ["--set", "privacy.epsilon=9.0", "--set", "privacy.noise_multiplier=2.0"]
    first = [*given, "--set", "seed=1", "--out", tmp_path / "first"]
    printed(*first)
    before = ledger.read_bytes()
    said = refused(*given, "--set", "seed=1", "--out", tmp_path / "second")
    assert "run is 'digits-seed1', and " in said
    assert "change name or seed" in said
    named = refused(*given, "--set", "run=digits-seed1", "--out", tmp_path / "second")
    assert "change run, or resume it" in named  # which name and seed would not change
    assert ledger.read_bytes() == before
    assert not (tmp_path / "second").exists()
    printed(*first, "--resume")
    printed(*given, "--set", "seed=2", "--out", tmp_path / "second")
    with Ledger.open(ledger) as opened:
        assert [row.run for row in opened.charges()] == ["digits-seed1"] * 2 + ["digits-seed2"] * 2
