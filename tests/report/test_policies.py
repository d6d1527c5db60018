"""What the assumptions of a report say of each sampling policy, in one sentence."""

from pathlib import Path

import pytest

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.policies import (
    banded_poisson_gaussian,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.accounting.pricing import read_ledger
from fedpriv.ledger.events import NeighbouringRelation, Randomness, RoundEvent, SamplingPolicy
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.report.guarantee import assumptions
from fedpriv.report.tables import print_ledger

ADD = NeighbouringRelation.ADD_OR_REMOVE_ONE
EVENTS = {
    "poisson: each enrolled user joins the cohort of a round independently, with probability "
    "q = 0.4": [poisson_gaussian(0.4, 2.0, population=30)],
    "poisson: each enrolled user joins the cohort of a round independently, with probability "
    "q = 0.1 to 0.4": [poisson_gaussian(q, 2.0, population=30) for q in (0.4, 0.1)],
    "poisson-examples: each of up to k = 8 examples of an enrolled user joins the cohort of a "
    "round independently, with probability q = 0.1": [
        poisson_examples_gaussian(0.1, 8, 2.0, population=30)
    ],
    "fixed-size: m = 12 of those enrolled are drawn afresh for each round, every such set equally "
    "likely": [fixed_size_gaussian(12, 30, 2.0)],
    "every-user: all of those enrolled are in every cohort": [
        every_user_gaussian(2.0, ADD, population=30)
    ],
    "random-allocation: each user is in k = 2 of the n = 3 rounds of a pass, every choice equally "
    "likely; a pass is charged whole, in its first round": [
        random_allocation_gaussian(3, 2, 2.0, population=30)
    ],
    "separated: each user is in at most k = 2 of the n = 4 rounds of a series, any two at least "
    "b = 2 apart; a series is charged whole, in its first round": [
        separated_gaussian((1.0,), 4, 2, 2, 2.0, ADD, population=30)
    ],
    "poisson-within-bands: b = 2 groups take turns in the n = 4 rounds of a series, and each user "
    "of a group joins its rounds independently, with probability q = 0.5; a series is charged "
    "whole, in its first round": [banded_poisson_gaussian((1.0,), 4, 2, 0.5, 2.0, ADD, 1, 30)],
}


@pytest.mark.parametrize("said", EVENTS, ids=lambda said: said.partition(":")[0])
def test_how_cohorts_were_drawn(tmp_path: Path, said: str) -> None:
    text = " ".join(" ".join(_terms(tmp_path, EVENTS[said])).split())
    assert f"{said}; N = 30 users are enrolled. Who took part " in text
    # Where no privacy is won by drawing, nothing rests on who was drawn.
    whole = said.partition(":")[0] in ("every-user", "separated")
    assert ("need not be secret" if whole else "is assumed to stay secret") in text


@pytest.mark.parametrize("strategy", [(1.0,), (1.0, 0.5)])
def test_that_noise_is_correlated_is_said(
    tmp_path: Path,
    strategy: tuple[float, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = _terms(tmp_path, [separated_gaussian(strategy, 4, 2, 2, 2.0, ADD, population=30)])
    correlated = "Noise is correlated over the rounds of a series, and its key must stay secret."
    assert (correlated in " ".join(said)) == (strategy != (1.0,))
    monkeypatch.setenv("COLUMNS", "300")
    print_ledger(tmp_path / "ledger.sqlite", None)
    shown = capsys.readouterr().out
    assert "2 of 4 rounds" in shown
    assert ("2 of 4 rounds, noise correlated over 2 rounds" in shown) == (strategy != (1.0,))


def test_there_is_a_sentence_for_every_policy() -> None:
    kinds = {event.sampling.policy for events in EVENTS.values() for event in events}
    assert kinds == {*SamplingPolicy}


def _terms(folder: Path, events: list[RoundEvent]) -> list[str]:
    path = folder / "ledger.sqlite"
    with Ledger.open_or_create(path, "people") as ledger:
        for number, event in enumerate(events):
            source = Randomness.OPERATING_SYSTEM
            ledger.charge(ProposedCharge("run", number, 0, source, event, "0f" * 32))
    return list(assumptions(epsilon(events, 1e-3), read_ledger(path)).terms.values())
