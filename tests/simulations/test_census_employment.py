"""Private logistic regression on a census: against the exact fit, a slow twin and known truths."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import fedpriv
from simulations.datasets.people import CENSUS_FILE as FILE
from simulations.papers import census_employment as census
from simulations.papers.census_employment import People, Quality, Study, Training

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("FEDPRIV_DATA", ROOT.parent / "shared" / "data"))
NO_NOISE = fedpriv.Mechanism(
    fedpriv.Poisson(1.0),
    fedpriv.Flat(100.0),
    noise_multiplier=0.0,
    delta=census.DELTA,
    unsafe_no_privacy=True,
)


def synthetic(count: int, seed: int = 0) -> tuple[People, People]:
    return census.synthetic_people(count, seed)[0].split(count // 5)


def real_people() -> People:
    for place in (FOLDER / FILE, FOLDER / "census_pums" / FILE):
        if place.is_file():
            return census.load(place)
    pytest.skip(f"{FILE} is absent: set FEDPRIV_DATA to the folder that holds it")


def test_without_noise_and_clipping_it_is_maximum_likelihood() -> None:
    people, test = synthetic(1_000)
    exact, stderr = census.maximum_likelihood(people.x, people.y)
    found = census.train(people, test, NO_NOISE, census.EVERYBODY, seed=0)
    assert np.abs((found.coefficients - exact) / stderr).max() < 0.02
    assert found.epsilon == np.inf


def test_clipped_rounds_are_those_of_a_slow_twin() -> None:
    """Every gradient clipped by itself, one person after another."""
    people, test = synthetic(500)
    training = Training(1.0, 6, 4.0)
    assert training.burn_in == 2
    norm = 0.6  # clips most
    clipped = replace(NO_NOISE, clipping=fedpriv.Flat(norm))
    columns = np.column_stack([np.ones(len(people.y)), census.scaled(people.x)]).astype(float)
    found, iterates = np.zeros(10), []
    for _ in range(training.rounds):
        total = np.zeros(10)
        for row, y in zip(columns, people.y, strict=True):
            gradient = (1.0 / (1.0 + np.exp(-row @ found)) - y) * row
            total += gradient * min(1.0, norm / np.linalg.norm(gradient))
        found = found - 4.0 * total / len(columns)
        iterates.append(found)
    mean = np.mean(iterates[2:], axis=0)
    shares = np.array([*census.SHARES.values()])
    slopes = mean[1:] / (shares * (1.0 - shares)) ** 0.25
    slow = np.array([mean[0] - slopes @ shares, *slopes])
    fast = census.train(people, test, clipped, training, seed=0).coefficients
    assert fast == pytest.approx(slow, abs=2e-4)
    unclipped = census.train(people, test, NO_NOISE, training, seed=0).coefficients
    assert np.abs(unclipped - slow).max() > 0.05


def test_maximum_likelihood_is_that_of_another_library_and_its_errors_cover_the_truth() -> None:
    truth = census.synthetic_people(1, 0)[1]
    scores = []
    for seed in range(40):
        people, _ = census.synthetic_people(4_000, seed)
        found, stderr = census.maximum_likelihood(people.x, people.y)
        scores.append((found - truth) / stderr)
    other = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(people.x, people.y)
    assert found == pytest.approx([*other.intercept_, *other.coef_[0]], abs=1e-4)
    # 400 scores, of ten coefficients whose errors depend on each other.
    assert abs(np.mean(scores)) < 0.2
    assert 0.85 < np.std(scores) < 1.15


def test_synthetic_people_have_the_public_shares() -> None:
    people, _ = census.synthetic_people(100_000, 1)
    assert people.x.mean(axis=0) == pytest.approx([*census.SHARES.values()], abs=0.006)
    assert set(np.unique(people.x)) == set(np.unique(people.y)) == {0.0, 1.0}


def test_quality_of_probabilities_by_hand() -> None:
    p, y = np.array([0.2, 0.2, 0.6, 0.65, 0.65, 1.0 - 1e-9]), np.array([0.0, 1.0, 1.0, 0.0, 1.0, 1])
    assert census.reliability(p, y) == [
        (2, pytest.approx(0.2), 0.5),
        (3, pytest.approx(1.9 / 3), pytest.approx(2 / 3)),
        (1, pytest.approx(1.0), 1.0),
    ]
    quality = Quality.of(p, y)
    assert quality.accuracy == pytest.approx(4 / 6)
    said = (0.8, 0.2, 0.6, 0.35, 0.65, 1.0)
    assert quality.log_loss == pytest.approx(-np.log(said).mean())
    assert quality.calibration_error == pytest.approx((2 * 0.3 + 3 * (0.1 / 3)) / 6)


def test_the_slope_tells_predictions_that_are_too_extreme() -> None:
    people, _ = synthetic(4_000)
    exact, _ = census.maximum_likelihood(people.x, people.y)
    for factor, shift in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.4)):
        moved = exact * factor + shift * np.eye(10)[0]
        quality = Quality.of(census.predicted(moved, people.x), people.y)
        # A maximum-likelihood fit is calibrated on its own people.
        assert quality.calibration_slope == pytest.approx(1.0 / factor, abs=1e-6)
        assert quality.calibration_intercept == pytest.approx(-shift, abs=1e-6)


def test_less_privacy_is_less_noise_and_the_ledger_costs_what_was_asked() -> None:
    people, test = synthetic(2_000)
    training = Training(1.0, 8, 4.0)
    study = Study.of(people, test, [(0.5, training), (8.0, training)], seeds=3)
    strict, loose = study.rows
    # Noise is 16 times less, up to the logarithm of δ.
    assert study.noise_ratio(strict) > 3.0 * study.noise_ratio(loose) > 0.0
    assert np.mean([q.log_loss for q in strict.quality]) > np.mean(
        [q.log_loss for q in loose.quality]
    )
    for row in study.rows:
        assert all(0.98 * row.epsilon < run.epsilon <= row.epsilon for run in row.released)


def test_the_average_of_lots_is_within_its_price() -> None:
    people, test = synthetic(1_000)
    lots = Training(0.2, 10, 2.0)
    found = census.train(people, test, census.mechanism(lots, 4.0), lots, seed=3)
    assert 3.9 < found.epsilon <= 4.0
    assert np.isfinite(found.coefficients).all()


def test_it_prints_tables_and_writes_numbers_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    people, _ = census.synthetic_people(600, 5)
    school = np.where(people.x[:, 4] == 1.0, 12, 9)
    columns = np.column_stack([people.x[:, :4], school, people.x[:, 5:], people.y])
    header = ",".join(f'"{name}"' for name in census.COLUMNS)
    np.savetxt(tmp_path / FILE, columns, fmt="%d", delimiter=",", header=header, comments="")
    loaded = census.load(tmp_path / FILE)
    assert np.array_equal(loaded.x, people.x)
    assert np.array_equal(loaded.y, people.y)
    short = Training(1.0, 3, 2.0)
    monkeypatch.setattr(census, "EVERYBODY", short)
    monkeypatch.setattr(census, "SETTINGS", [(1.0, short), (1.0, Training(0.5, 3, 2.0))])
    monkeypatch.setattr(census, "HELD_OUT", 200)
    arguments = ["--data", str(tmp_path), "--seeds", "2", "--folder", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["census_employment", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    census.main()
    printed = capsys.readouterr().out
    assert "ε = 1, lots" in printed
    assert "cost more" in printed
    numbers = json.loads((tmp_path / "out" / "census_employment.json").read_text())
    assert len(numbers["private"][1]["coefficients"]) == 2
    assert (tmp_path / "out" / "census_employment.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--seeds", "1"], "--seeds is 1"), (["--data", "nowhere"], "nowhere")],
)
def test_one_seed_and_a_folder_without_the_census_are_refused(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["census_employment", *arguments])
    with pytest.raises(SystemExit, match="2"):
        census.main()
    assert sentence in capsys.readouterr().err


def test_exact_fit_of_the_census_is_as_its_readme_says() -> None:
    people, test = real_people().split(census.HELD_OUT)
    exact, _ = census.maximum_likelihood(people.x, people.y)
    quality = Quality.of(census.predicted(exact, test.x), test.y)
    assert round(quality.accuracy, 3) == 0.677
    assert round(float(test.y.mean()), 3) == 0.635


def test_the_guide_quotes_the_committed_numbers() -> None:
    numbers = json.loads((ROOT / "simulations/results/census_employment.json").read_text())
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/census.md").read_text().splitlines()]
    quoted = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row}
    exact = numbers["exact"]
    columns = [(exact["coefficients"], exact["standard_errors"])]
    for row, asked in zip(numbers["private"], [0.1, 0.5, 1.0, 2.0, 8.0, 1.0], strict=True):
        assert row["epsilon"] == asked
        assert all(0.99 * asked < spent <= asked for spent in row["epsilon_of_ledger"])
        fits = np.array(row["coefficients"])
        assert len(fits) == 10
        columns.append((fits.mean(axis=0), fits.std(axis=0, ddof=1)))
    for place, term in enumerate(census.TERMS):
        cells = [f"{mean[place]:+.2f} ± {sd[place]:.2f}".replace("-", "−") for mean, sd in columns]
        assert quoted[term] == cells
    # Everybody in every round: the less privacy, the less noise.
    noise = np.array([sd for _, sd in columns[1:6]])
    assert (np.diff(noise, axis=0) < 0.0).all()


@pytest.mark.slow
def test_at_epsilon_one_the_census_is_predicted_as_well_as_without_privacy() -> None:
    people, test = real_people().split(census.HELD_OUT)
    study = Study.of(people, test, [(1.0, census.EVERYBODY)], seeds=2)
    (row,) = study.rows
    assert max(run.epsilon for run in row.released) <= 1.0
    for quality in row.quality:
        assert quality.accuracy > study.exact_quality.accuracy - 0.01
        assert quality.log_loss < study.exact_quality.log_loss + 0.003
    away = (row.coefficients - study.exact)[:, 1:] / study.stderr[1:]
    assert np.sqrt(np.square(away).mean()) < 1.0
