"""The network of Abadi et al. 2016 on digits: one budget for all that is charged."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import fedpriv
from fedpriv.accounting import epsilon
from fedpriv.data import load_digits
from fedpriv.ledger import Ledger
from simulations.papers import abadi_mnist
from simulations.papers.abadi_mnist import (
    SETTINGS,
    Found,
    Setting,
    main,
    measure,
    results_table,
    trained,
)

SMALL = Setting(4.0, 4, 8, 16.0, 0.3, 0.9, q=0.1)


@pytest.fixture(scope="module")
def people() -> fedpriv.Population:
    return load_digits(users=1437)


def test_the_noise_on_components_is_the_papers_and_leaves_most_of_the_budget() -> None:
    assert [(each.epsilon, each.component_noise) for each in SETTINGS] == [
        (0.5, 16.0), (2.0, 7.0), (8.0, 4.0),
    ]  # fmt: skip


@pytest.mark.parametrize("asked", [True, False])
def test_an_arm_charges_examples_within_its_budget(
    people: fedpriv.Population, tmp_path: Path, asked: bool
) -> None:
    run = trained(SMALL, people, 0, tmp_path / "run", private_components=asked, hidden=16)
    with Ledger.open(run.ledger) as ledger:
        events = [charge.event for charge in ledger.charges()]
    assert len(events) == SMALL.rounds + asked == 40 + asked
    assert {event.sampling.unit for event in events} == {"example"}
    assert (events[0].noise_multiplier == pytest.approx(16.0)) == asked
    assert (events[0].sampling.sampling_probability == 1.0) == asked
    assert 3.99 < epsilon(events, 1e-5).epsilon <= 4.0
    assert run.accuracy is not None
    assert run.accuracy > 0.25  # chance is 0.1


def test_results_are_means_of_seeds_beside_the_paper(people: fedpriv.Population) -> None:
    short = replace(SMALL, epochs=1.0)
    projected, whole = found = [
        measure(short, people, 2, private_components=asked, hidden=8) for asked in (True, False)
    ]
    assert (projected.components, whole.components) == (8, None)
    assert len(projected.here) == len(whole.here) == 2
    # The query takes its part, so that rounds have more noise.
    assert projected.noise_multiplier > whole.noise_multiplier
    assert [row[0] for row in results_table(found).rows] == ["8 components", "all pixels"]


def test_a_row_alone_joins_the_results_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretended(
        setting: Setting, people: object, seeds: int, *, private_components: bool
    ) -> Found:
        components = setting.components if private_components else None
        return Found(setting, components, 1.0, setting.epsilon, (0.5,) * seeds)

    monkeypatch.setattr(abadi_mnist, "mnist", object)
    monkeypatch.setattr(abadi_mnist, "measure", pretended)
    others = [Found(each, 60, 2.0, 0.4, (0.25,)) for each in SETTINGS]
    (tmp_path / "abadi_mnist.json").write_text(json.dumps([asdict(each) for each in others]))
    arguments = ["--both", "0.2", "--folder", str(tmp_path)]
    main([*arguments, "--rows", "9"])
    read = json.loads((tmp_path / "abadi_mnist.json").read_text())
    last = Found(replace(SETTINGS[2], epochs=4.0), None, 1.0, 8.0, (0.5,))
    assert [Found.read(each) for each in read] == [*others, last]
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--rows", "10"])
    assert "--rows is [10]; each must be from 1 to 9" in capsys.readouterr().err
