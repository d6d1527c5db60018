"""The guide's example runs, and its numbers are right."""

import re
from pathlib import Path

import pytest

from fedpriv.accounting import calibrate_noise_multiplier
from fedpriv.errors import BudgetExceededError
from fedpriv.ledger import Ledger

GUIDE = (Path(__file__).parents[2] / "docs" / "analytics.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(example: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints, if it has nothing to complain of."""
    exec(compile(EXAMPLES[example], "analytics.md", "exec"), {"__name__": "__main__"})
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_example_runs_once_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(0, capsys)
    mean = re.search(r"minutes on average ([\d.]+) ± ([\d.]+)", text)
    assert abs(float(mean[1]) - 32.0) < 1.0
    assert 0.0 < float(mean[2]) < 0.2
    assert 0.0 < float(re.search(r"ε = ([\d.]+)", text)[1]) <= 1.0
    with pytest.raises(BudgetExceededError):
        printed(0, capsys)
    assert capsys.readouterr().out == ""


def test_the_price_of_sampling_is_as_stated() -> None:
    stated = re.search(r"needs z/q = ([\d.]+), ([\d.]+) and ([\d.]+)", GUIDE)
    for q, number in zip((1.0, 0.5, 0.1), stated.groups(), strict=True):
        z = calibrate_noise_multiplier(1.0, 1e-5, rounds=1, sampling_probability=q)
        assert float(number) == pytest.approx(z / q, abs=0.06)


def test_the_example_of_components_trains_on_the_same_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(1, capsys)
    epsilon, accuracy = re.search(r"ε = ([\d.]+) of both, accuracy (\d+)%", text).groups()
    assert 1.99 <= float(epsilon) <= 2.0
    assert int(accuracy) > 50
    with Ledger.open(tmp_path / "digits.sqlite") as ledger:
        runs = [charge.run for charge in ledger.charges()]
    assert runs[0] == "pixels"
    assert len(runs) == 51


def test_the_example_of_evaluation_asks_users_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(2, capsys)
    mean, low, middle = map(float, re.findall(r"[\d.]+", text))
    # Noise of 0.025 on the mean; thresholds are a quarter apart.
    assert 0.6 < mean < 1.1
    assert 0.0 <= low <= middle <= 1.0
    with Ledger.open(tmp_path / "evaluated.sqlite") as ledger:
        runs = [charge.run for charge in ledger.charges()]
    assert runs[-1] == "evaluated"
    assert len(runs) == 21
