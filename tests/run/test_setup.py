"""What a run on nodes is called, and what it cannot record."""

from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.run.run import RunSetup

FEDERATION = Path(__file__).parents[2] / "simulations" / "federation.toml"


def test_the_population_of_nodes_is_called_by_its_id(tmp_path: Path) -> None:
    population = "5f" * 16
    setup = RunSetup.of(FEDERATION, [], tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    experiment = setup.on_nodes(setup.config.federation, population, 2)
    assert experiment.plan.population == population
    assert experiment.plan.sampling.population == 2


def test_nodes_are_not_asked_for_figures_that_are_not_private(tmp_path: Path) -> None:
    assignments = ["output.simulation_only=true"]
    setup = RunSetup.of(FEDERATION, assignments, tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match="on nodes it must be false"):
        setup.on_nodes(setup.config.federation, "people", 2)
    assert list(tmp_path.iterdir()) == []


def test_nodes_are_not_asked_for_training_that_they_do_not_know(tmp_path: Path) -> None:
    assignments = ["local.algorithm=mine:SignSGD"]
    setup = RunSetup.of(FEDERATION, assignments, tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match=r"is 'mine:SignSGD'; on nodes it must be one of"):
        setup.on_nodes(setup.config.federation, "people", 2)


def test_nodes_are_not_asked_for_work_without_bound(tmp_path: Path) -> None:
    experiment = tmp_path / "endless.toml"
    kept = [line for line in FEDERATION.read_text().splitlines() if "max_examples" not in line]
    experiment.write_text("\n".join(kept))
    setup = RunSetup.of(experiment, [], tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match=r"local\.max_examples is absent; on nodes it"):
        setup.on_nodes(setup.config.federation, "people", 2)
    assert list(tmp_path.iterdir()) == [experiment]
