"""People join and leave: a population goes on with the ledger of the one that it succeeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedpriv
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.ledger import Ledger
from tests.commandline import printed

RNG = np.random.default_rng(0)
X = RNG.standard_normal((240, 3)).astype(np.float32)
Y = X.argmax(1)


def people(users: int, succeeds: str | None = None) -> fedpriv.Population:
    rows = slice(0, 4 * users)
    ids = np.repeat(np.arange(users), 4)
    made = fedpriv.Population.from_arrays(X[rows], Y[rows], ids, held_out=(X[200:], Y[200:]))
    return replace(made, succeeds=succeeds)


def simulated(users: fedpriv.Population, out: Path, **more: object) -> fedpriv.Run:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.with_noise(2.0, epsilon=8.0, delta=1e-3)
    settings = {"local": fedpriv.SGD(0.5, epochs=1), "rounds": 2, "quiet": True, "out": out}
    return fedpriv.simulate(users, fedpriv.Task(nn.Linear(3, 3)), mechanism, **settings, **more)


def test_charges_add_up_over_both_for_those_who_stay(tmp_path: Path) -> None:
    ledger = tmp_path / "shared.sqlite"
    first = simulated(people(40), tmp_path / "a", ledger=ledger)
    assert "all who are enrolled" in first.report().read_text(encoding="utf-8")
    with pytest.raises(LedgerError, match=r"not 'people: 41 users'.*succeeds"):
        simulated(people(41), tmp_path / "b", ledger=ledger)
    joined = people(41, succeeds="people: 40 users")
    second = simulated(joined, tmp_path / "b", ledger=ledger)
    third = simulated(
        replace(people(39), succeeds="people: 40 users"), tmp_path / "c", ledger=ledger
    )
    assert first.epsilon < second.epsilon < third.epsilon
    with Ledger.open(ledger) as opened:
        events = [row.event for row in opened.charges()]
    assert [event.sampling.population for event in events] == [40, 40, 41, 41, 39, 39]
    assert third.epsilon == epsilon_of(events, 1e-3).epsilon
    page = third.report().read_text(encoding="utf-8")
    assert "those enrolled in all runs (N = 40, 41, 39); others spent less" in page


def test_a_successor_needs_the_ledger_that_it_goes_on_with(tmp_path: Path) -> None:
    joined = people(41, succeeds="people: 40 users")
    for ledger in (None, tmp_path / "absent.sqlite"):
        with pytest.raises(InvalidValueError, match="succeeds 'people: 40 users'"):
            simulated(joined, tmp_path / "a", ledger=ledger)
    assert list(tmp_path.iterdir()) == []


def test_a_file_names_whom_its_users_succeed(tmp_path: Path) -> None:
    settings = ["rounds=1", f"privacy.ledger={tmp_path / 'l.sqlite'}", "privacy.epsilon=8.0"]
    shared = [f"--set={text}" for text in (*settings, "privacy.noise_multiplier=4.0")]
    printed("simulate", "digits", *shared, "--out", tmp_path / "a", cwd=tmp_path)
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        name = ledger.population_name
    fewer = ["--set=data.options.users=200", f"--set=data.succeeds={name}"]
    shown = printed("simulate", "digits", *shared, *fewer, "--out", tmp_path / "b", cwd=tmp_path)
    assert "(N = 287, 200)" in shown
