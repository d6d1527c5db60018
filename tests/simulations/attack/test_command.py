"""`python -m simulations.attack`: a table or JSON, and exit code 3 where a ledger is refuted."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from simulations import broken_engines as broken
from simulations.attack import POPULATIONS
from simulations.attack.__main__ import main
from tests.commandline import Done
from tests.simulations.attack.targets import config_of


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
Attack = Callable[..., Done]


@pytest.fixture
def attack(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Attack:
    """The command in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def attacked(*arguments: str | Path) -> Done:
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments)])
        return Done(int(end.value.code or 0), *capsys.readouterr())

    return attacked


def test_what_is_certified_stands_beside_what_the_ledger_says(
    experiment: Path, attack: Attack
) -> None:
    done = attack(
        *(experiment, "--runs", "8", *SHORT),
        *("--population", "huge", "--population", "late", "--set", "privacy.epsilon=1.5"),
    )
    assert done.returncode == 0
    lines = done.stdout.replace("│", " ").splitlines()
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


def test_json_has_the_counts_and_nothing_else_is_printed(experiment: Path, attack: Attack) -> None:
    options = ("--runs", "10", *SHORT, "--population", "not-finite", "--json")
    done = attack(experiment, *options)
    content = json.loads(done.stdout)
    assert (content["experiment"], content["runs"], content["users"]) == ("tiny", 10, 4)
    (row,) = content["populations"]
    assert row["population"] == "not-finite"
    assert row["attacks"] == POPULATIONS["not-finite"].attacks
    assert row["runs_with"] == row["runs_without"] == 6
    assert row["epsilon_low"] <= row["ledger_epsilon"] <= 1.0
    assert content["refuted"] is False


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_refutation_is_exit_code_3(
    experiment: Path, form: tuple[str, ...], attack: Attack
) -> None:
    with broken.no_noise():
        options = ("--runs", "36", *SHORT, "--population", "alone", *form)
        done = attack(experiment, *options)
    assert done.returncode == 3
    if form:
        assert json.loads(done.stdout)["refuted"] is True
    else:
        assert "refuted: with population alone, ε is at least 1." in done.stdout
        assert "the ledger says 1.000" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "rounds=0"), "rounds"),
        (("--set", "privacy.epsilon=-1"), "epsilon"),
        (("--runs", "7"), "runs is 7"),
        (("--rounds", "0"), "rounds is 0"),
        (("--users", "1"), "users is 1"),
    ],
)
def test_bad_input_is_one_sentence(
    experiment: Path, options: tuple[str, ...], said: str, attack: Attack
) -> None:
    done = attack(experiment, *options)
    assert done.returncode == 2
    *_, line = done.stderr.splitlines()  # behind what shows how far it is
    assert line.startswith("error: ")
    assert said in line


def test_names_that_are_unknown_are_refused_with_those_that_are_known(attack: Attack) -> None:
    of_experiment, of_population = attack("digist"), attack("--population", "hug")
    assert (of_experiment.returncode, of_population.returncode) == (2, 2)
    assert "did you mean 'digits'?" in of_experiment.stderr
    assert all(name in of_population.stderr for name in POPULATIONS)


def test_the_page_lists_every_kept_population() -> None:
    page = (Path(__file__).parents[3] / "docs" / "attack.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|$", page, re.MULTILINE)
    assert listed == [(each.name, each.attacks) for each in POPULATIONS.values()]
