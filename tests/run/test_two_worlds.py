"""Everything that a run tells follows from its noisy sums: two worlds, to the byte."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedpriv.privacy import round as rounds
from fedpriv.privacy.round import PartialSum
from fedpriv.training import rounds as training
from tests.two_worlds import (
    ABSENT,
    MANY,
    Case,
    Hostile,
    compare,
    compare_on_nodes,
    random_case,
)

NUMBERS = [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 220))]


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_but_noisy_sums_tells_of_a_user(number: int, tmp_path: Path) -> None:
    case = random_case(number, killed=number % 3 == 2)
    assert compare(case, tmp_path).found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "nan", "trip", "end", "loop"])
def test_nothing_else_tells_of_a_user_of_a_node_that_has_a_deadline(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    compare_on_nodes(Hostile(kind, 700), ABSENT, tmp_path)


def logged(total: PartialSum) -> PartialSum:
    logging.getLogger("fedpriv").warning("a sum of %d users", total.weight)
    return total


LEAKS: dict[str, tuple[Callable[[PartialSum], PartialSum], str]] = {
    "a line of the log": (logged, "a sum of"),
    "twice the sensitivity": (lambda sum_: replace(sum_, total=2 * sum_.total), "update"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_seen(leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, (planted, seen) = rounds.add_up, LEAKS[leak]
    monkeypatch.setattr(rounds, "add_up", lambda *given: planted(honest(*given)))
    with pytest.raises(AssertionError, match=seen):
        compare(simple(), tmp_path)


def test_what_is_not_noised_is_seen_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, honest, closed = list[int](), rounds.add_up, training.close_round

    def watched(*given: Any) -> PartialSum:
        found = honest(*given)
        seen.append(found.weight)
        return found

    def told(*given: Any) -> Any:
        after, result = closed(*given)
        return after, replace(result, metrics={"weight": seen[-1]})

    monkeypatch.setattr(rounds, "add_up", watched)
    monkeypatch.setattr(training, "close_round", told)
    with pytest.raises(AssertionError, match=r"file run/metrics.jsonl"):
        compare(simple(), tmp_path)


def simple(kind: str = "linear", **sections: Any) -> Case:
    """A run whose hostile user takes part and moves the sum as far as it may."""
    table = {
        "name": "simple",
        "rounds": 2,
        "seed": 1,
        "data": {"name": "tests.two_worlds:people"},
        "model": {"name": "tests.two_worlds:network", "options": {"kind": kind}},
        "privacy": {
            "sampling_probability": 1.0, "epsilon": 1e4, "delta": 0.01, "noise_multiplier": 1.0,
        },
        "clipping": {"norm": 1e-3},
        "local": {"learning_rate": 1.0},
        "averaging": {"cap": 5, "total_weight": 10.0},
        "engine": {"processes": 1},
        **sections,
    }  # fmt: skip
    return Case(table, Hostile("normal", 5), ABSENT)


EVALUATED = {
    "personalisation": {"local": {"learning_rate": 0.1, "steps": 2}},
    "federated_evaluation": {"noise_multiplier": 2.0, "sampling_probability": 0.8, "every": 1},
}
TELLING = {
    "whose process ends": (Hostile("end", 5), simple("tripping", engine={"processes": 2})),
    "for whom the model raises": (Hostile("trip", 5), simple("tripping")),
    "of a new size who evaluates": (Hostile("normal", MANY), simple("norm", **EVALUATED)),
    "who evaluates and fails": (Hostile("nan", 5), simple(**EVALUATED)),
}


@pytest.mark.parametrize("user", TELLING)
def test_nothing_tells_of_a_user(user: str, tmp_path: Path) -> None:
    hostile, case = TELLING[user]
    assert compare(replace(case, one=hostile), tmp_path).found
