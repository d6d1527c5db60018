"""The example on the census: what it prints, and what it says without data."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.accounting import epsilon
from fedpriv.ledger import Ledger
from fedpriv.support.checks import epsilon_up

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("FEDPRIV_DATA", ROOT.parent / "shared" / "data"))
FILE = "FultonPUMS5full.csv"


def census(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "FEDPRIV_DATA"}
    return subprocess.run(
        [sys.executable, "-m", "simulations.census", *arguments],
        cwd=ROOT,
        env={**kept, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "no folder for the census: give folder= or set FEDPRIV_DATA"),
        ({"FEDPRIV_DATA": "/nowhere"}, f"{FILE} is absent from /nowhere and /nowhere/census_pums"),
    ],
)
def test_without_data_it_ends_with_one_sentence(environment: dict[str, str], sentence: str) -> None:
    done = census(**environment)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "age,educ\n1,2\n", '"age","educ","income"\n40,x,3\n'])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    done = census("--data", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{tmp_path / FILE} cannot be read")
    assert done.stderr.count("\n") == 1


def test_it_prints_truth_release_and_noise_and_the_price_of_the_ledger(tmp_path: Path) -> None:
    if not any((place / FILE).is_file() for place in (FOLDER, FOLDER / "census_pums")):
        pytest.skip("the census is absent: set FEDPRIV_DATA to the folder that holds its file")
    done = census("--data", str(FOLDER), "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    cells = [re.split(r"\s*│\s*", line.strip(" │")) for line in done.stdout.splitlines()]
    (mean,) = [row for row in cells if row[0] == "mean age"]
    # The study's README says of age: years, 18-93; noise and truth are of what is printed.
    assert abs(float(mean[2]) - float(mean[3])) < 6.0 * float(mean[4]) + 0.02
    assert len([row for row in cells if row[0] == "education"]) == 16
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        (event,) = [row.event for row in ledger.charges()]
    spent = epsilon([event], 1e-5, accountant="tight").epsilon
    assert f"ε = {epsilon_up(spent)}" in done.stdout
    assert 0.99 <= spent <= 1.0
    assert "not private" in done.stdout
    again = census("--data", str(FOLDER), "--out", str(tmp_path))
    assert again.returncode == 1
    assert "pass the budget of ε = 1.0 at δ = 1e-05; no user was asked" in again.stderr
