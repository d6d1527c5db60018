"""`fedpriv attack`: a table or JSON, and exit code 3 where a ledger is refuted."""

import json
import re
from pathlib import Path

import pytest
import tomli_w

from fedpriv.attack import POPULATIONS
from simulations import broken_engines as broken
from tests.attack.targets import config_of
from tests.commandline import fedpriv, refused


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """A file that is attacked in a second."""
    config = config_of(
        data={"name": "synthetic", "options": {"users": 6, "shape": [6], "classes": 3}}
    )
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
    return path


SHORT = ("--rounds", "1", "--users", "4")


def test_what_is_certified_stands_beside_what_the_ledger_says(experiment: Path) -> None:
    done = fedpriv(
        *("attack", experiment, "--runs", "8", *SHORT),
        *("--population", "huge", "--population", "late", "--set", "privacy.epsilon=1.5"),
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    (huge,) = (line.split() for line in lines if "largest number" in line)
    (late,) = (line.split() for line in lines if "never arrives" in line)
    assert (huge[0], late[0]) == ("huge", "late")
    for row in (huge, late):
        assert row[-1] == "consistent"
        assert "1.500" in row
    assert "tiny: 1 rounds, q = 1 of N = 4 users" in done.stdout
    assert "8 runs certify at most 0.000" in done.stdout
    assert "That cannot refute the ledger; --runs 64 could." in done.stdout
    assert "huge" in done.stderr  # how far it is


def test_json_has_the_counts_and_nothing_else_is_printed(experiment: Path) -> None:
    options = ("--runs", "10", *SHORT, "--population", "not-finite", "--json")
    done = fedpriv("attack", experiment, *options)
    content = json.loads(done.stdout)
    assert (content["experiment"], content["runs"], content["users"]) == ("tiny", 10, 4)
    (row,) = content["populations"]
    assert row["population"] == "not-finite"
    assert row["attacks"] == POPULATIONS["not-finite"].attacks
    assert row["runs_with"] == row["runs_without"] == 6
    assert row["epsilon_low"] <= row["ledger_epsilon"] <= 1.0
    assert content["refuted"] is False


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_refutation_is_exit_code_3(experiment: Path, form: tuple[str, ...]) -> None:
    with broken.no_noise():
        options = ("--runs", "36", *SHORT, "--population", "alone", *form)
        done = fedpriv("attack", experiment, *options)
    assert done.returncode == 3
    if form:
        assert json.loads(done.stdout)["refuted"] is True
    else:
        assert "refuted: with population alone, ε is at least 1." in done.stdout
        assert "the ledger says 1.000" in done.stdout


def test_bad_input_is_one_sentence(experiment: Path) -> None:
    # With "all" taken for every population, what is wrong is the next thing.
    all_of = ("--population", "all", "--rounds", "1", "--users", "2")
    assert "unknown population" not in refused("attack", experiment, *all_of, "--set", "rounds=0")
    line = refused("attack", experiment, "--population", "hug")
    assert "unknown population 'hug'; did you mean 'huge'? known names: alone, " in line
    assert "8" in refused("attack", experiment, "--runs", "7")
    assert "rounds" in refused("attack", experiment, "--rounds", "0")
    assert "digist" in refused("attack", "digist")
    assert "epsilon" in refused("attack", experiment, "--set", "privacy.epsilon=-1")


def test_the_page_lists_every_kept_population() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attack.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|$", page, re.MULTILINE)
    assert listed == [(each.name, each.attacks) for each in POPULATIONS.values()]
