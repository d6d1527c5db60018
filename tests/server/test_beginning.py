"""What a run on nodes is called, and what it cannot record."""

from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.run.setup import RunSetup
from fedpriv.server.enrolment import enrolled_experiment

FEDERATION = Path(__file__).parents[2] / "simulations" / "federation.toml"


def test_the_population_of_nodes_is_called_by_its_id(tmp_path: Path) -> None:
    population, enrolment = "5f" * 16, tmp_path / "enrolment.toml"
    enrolment.write_text(f'population = "{population}"\n[nodes.a]\nusers = ["ann", "bob"]\n')
    assignments = [f"federation.enrolment={enrolment}"]
    beginning = RunSetup.of(FEDERATION, assignments, tmp_path / "run", resume=False)
    assert beginning.config.federation is not None
    experiment, _ = enrolled_experiment(beginning, beginning.config.federation)
    assert experiment.plan.population == population
    assert experiment.plan.sampling.population == 2


def test_nodes_are_not_asked_for_figures_that_are_not_private(tmp_path: Path) -> None:
    assignments = ["output.simulation_only=true"]
    beginning = RunSetup.of(FEDERATION, assignments, tmp_path / "run", resume=False)
    assert beginning.config.federation is not None
    with pytest.raises(InvalidValueError, match="on nodes it must be false"):
        enrolled_experiment(beginning, beginning.config.federation)
    assert list(tmp_path.iterdir()) == []


def test_nodes_are_not_asked_for_work_without_bound(tmp_path: Path) -> None:
    experiment = tmp_path / "endless.toml"
    kept = [line for line in FEDERATION.read_text().splitlines() if "max_examples" not in line]
    experiment.write_text("\n".join(kept))
    beginning = RunSetup.of(experiment, [], tmp_path / "run", resume=False)
    assert beginning.config.federation is not None
    with pytest.raises(InvalidValueError, match=r"local\.max_examples is absent; on nodes it"):
        enrolled_experiment(beginning, beginning.config.federation)
    assert list(tmp_path.iterdir()) == [experiment]
