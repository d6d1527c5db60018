"""The set-up of Bu et al. 2020, Table 2, on another census: columns, price and accuracy."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.accounting import epsilon, poisson_gaussian
from simulations.datasets.files import read_csv
from simulations.datasets.people import CENSUS_FILE as FILE
from simulations.datasets.people import YES_OR_NO
from simulations.papers import bu, census_income
from simulations.papers.census_income import People

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("FEDPRIV_DATA", ROOT.parent / "shared" / "data"))


def columns(count: int) -> dict[str, np.ndarray]:
    """Invented people: those with a master's degree earn more."""
    draw = np.random.default_rng(0)
    found = {name: draw.integers(0, 2, count).astype(float) for name in YES_OR_NO}
    found["age"] = draw.integers(18, 94, count).astype(float)
    found["educ"] = draw.integers(1, 17, count).astype(float)
    found["income"] = np.where(found["educ"] >= 14, 60_000.0, 20_000.0)
    return found


def test_people_are_14_facts() -> None:
    found = People.of(columns(400))
    assert found.x.shape == (400, 7 + 16 + 2 * 12)
    assert set(found.x.sum(axis=1)) == {14.0}
    one = {name: np.array([0.0]) for name in YES_OR_NO}
    one |= {"age": np.array([25.0]), "educ": np.array([16.0]), "sex": np.array([1.0])}
    for income, above in ((50_000.0, 0), (50_001.0, 1)):
        person = People.of(one | {"income": np.array([income])})
        assert person.y.tolist() == [above]
        # Ages from 25 to 34, a doctorate, a woman, and nothing else.
        assert np.flatnonzero(person.x).tolist() == [1, 22, 24, *range(25, 47, 2)]


def test_it_is_the_row_of_the_paper() -> None:
    (row,) = [each for each in bu.SETTINGS if each.where == "Table 2, Adult"]
    assert row.sigma == census_income.NOISE_MULTIPLIER
    assert row.epochs == census_income.EPOCHS
    assert row.delta == census_income.DELTA
    assert row.q == census_income.LOT / 29_305


def test_it_learns_and_its_ledger_has_the_price_of_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = columns(2_000)
    rows = np.column_stack([table[name] for name in census_income.COLUMNS])
    header = ",".join(census_income.COLUMNS)
    np.savetxt(tmp_path / FILE, rows, fmt="%d", delimiter=",", header=header, comments="")
    monkeypatch.setattr(census_income, "EPOCHS_WITHOUT_PRIVACY", 8)
    monkeypatch.setattr(census_income, "EPOCHS", 5)
    arguments = ["--data", str(tmp_path), "--seeds", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["census_income", *arguments])
    census_income.main()
    assert "nobody does" in capsys.readouterr().out
    networks = json.loads((tmp_path / "census_income.json").read_text())["networks"]
    (private,), (exact,) = networks["private network"], networks["network without privacy"]
    q = 256 / 1_800
    price = epsilon([poisson_gaussian(q, 0.55, round(5 / q))], 1e-5).epsilon
    assert private["epsilon"] == pytest.approx(price, rel=1e-9)
    assert exact["epsilon"] is None
    assert exact["accuracy"] > 0.8


def test_a_folder_without_the_census_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["census_income", "--data", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        census_income.main()
    assert "nowhere" in capsys.readouterr().err


def test_gradients_are_clipped_and_noised_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """R = 1 and σ = 0.55 are of the gradient; a step of 0.15 along it would hardly be clipped."""
    people = People.of(columns(1_000))
    given: dict[str, Any] = {}

    def simulate(population: object, task: object, mechanism: object, **others: object) -> None:
        given.update(others, mechanism=mechanism)
        raise KeyboardInterrupt

    monkeypatch.setattr(fedpriv, "simulate", simulate)
    with pytest.raises(KeyboardInterrupt):
        census_income.train(people, 0, 18, private=True)
    assert (given["local"].learning_rate, given["local"].steps) == (1.0, 1)
    assert given["server"] == fedpriv.FedAvg(0.15)
    assert given["mechanism"].clipping == fedpriv.Flat(1.0)
    assert given["mechanism"].noise_multiplier == 0.55


@pytest.mark.slow
def test_seven_private_epochs_tell_some_of_those_who_earn_more() -> None:
    places = (FOLDER / FILE, FOLDER / "census_pums" / FILE)
    found = [place for place in places if place.is_file()]
    if not found:
        pytest.skip(f"{FILE} is absent: set FEDPRIV_DATA to the folder that holds it")
    people = People.of(read_csv(found[0], census_income.COLUMNS))
    outcome = census_income.train(people, 0, 7, private=True)
    # After four epochs the network still says that nobody does.
    assert outcome.accuracy > 1.0 - people.split(0)[1].y.mean() + 0.02
    assert outcome.epsilon is not None
    assert outcome.epsilon < 13.0  # of 18 epochs: 13.17


def test_the_guide_quotes_the_committed_numbers() -> None:
    numbers = json.loads((ROOT / "simulations/results/census_income.json").read_text())
    guide = (ROOT / "docs/census.md").read_text()
    assert f"| the more frequent answer | | {1.0 - numbers['share']:.1%} |" in guide
    for name, outcomes in numbers["networks"].items():
        found = np.array([100.0 * each["accuracy"] for each in outcomes])
        cell = f"{found.mean():.1f} ± {found.std(ddof=1):.1f}%"
        assert f"| {name} | {census_income.PAPER[name]} | {cell} |" in guide
    assert {each["epsilon"] for each in numbers["networks"]["network without privacy"]} == {None}
