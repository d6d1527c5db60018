"""`fedpriv calibrate`: settings within a budget, with good and bad input."""

import json
import re

import pytest

from fedpriv.accounting.accountants import delta as delta_of
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_number,
    largest_probability,
)
from fedpriv.accounting.policies import every_user_gaussian, fixed_size_gaussian, poisson_gaussian
from fedpriv.ledger.events import NeighbouringRelation
from tests.commandline import printed, refused, table

BUDGET = ["calibrate", "--epsilon", "2", "--delta", "1e-5"]
ADVANTAGE = ["calibrate", "--delta", "1e-5", "--advantage"]
ROUNDS = ["--rounds", "1000"]
SAMPLING = ["--sampling-probability", "0.01"]
NOISE = ["--noise-multiplier", "1.0"]
FIXED = ["--policy", "fixed-size", "--population", "1000"]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([*ROUNDS, *SAMPLING], "noise_multiplier"),
        ([*ROUNDS, *NOISE], "sampling_probability"),
        ([*SAMPLING, *NOISE], "rounds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "given",
)
def test_calibrate_finds_the_third(given: list[str], found: str, accountant: str) -> None:
    expected = {"rounds": 1000, "sampling_probability": 0.01, "noise_multiplier": 1.0}
    expected[found] = {
        "noise_multiplier": lambda: calibrate_noise_multiplier(2.0, 1e-5, 1000, 0.01, accountant),
        "sampling_probability": lambda: largest_probability(
            2.0, 1e-5, lambda q: [poisson_gaussian(q, 1.0, 1000)], accountant
        ),
        "rounds": lambda: largest_number(
            2.0, 1e-5, lambda n: [poisson_gaussian(0.01, 1.0, n)], 2**30 + 1, accountant
        ),
    }[found]()
    command = [*BUDGET, *given, "--accountant", accountant]
    plan = json.loads(printed(*command, "--json"))
    assert {name: plan[name] for name in expected} == expected
    assert plan["found"] == found
    event = poisson_gaussian(plan["sampling_probability"], plan["noise_multiplier"], plan["rounds"])
    loss = epsilon_of([event], 1e-5, accountant)
    assert plan["epsilon"] == loss.epsilon <= plan["target_epsilon"] == 2.0
    assert plan["epsilon_low"] == loss.epsilon_low
    assert (plan["delta"], plan["accountant"]) == (1e-5, accountant)
    assert (plan["bound"], plan["relation"]) == (loss.bound, loss.relation)
    assert plan["assumptions"] == loss.assumptions
    rows = {row[0]: row[1:] for row in table(*command)}
    # What is printed can be typed again and costs the same.
    assert float(rows["noise multiplier z"][0]) == plan["noise_multiplier"]
    assert int(rows["rounds T"][0]) == plan["rounds"]
    assert float(rows["sampling probability q"][0]) == plan["sampling_probability"]
    assert [row[1] for row in rows.values()].count("given") == 2
    assert loss.epsilon <= float(rows["user-level ε"][0]) <= 2.0
    assert rows["accountant"][0] == accountant


def test_an_advantage_is_a_budget() -> None:
    command = ["calibrate", "--advantage", "0.2", "--delta", "1e-5", *ROUNDS, *SAMPLING]
    plan = json.loads(printed(*command, "--json"))
    event = poisson_gaussian(0.01, plan["noise_multiplier"], 1000)
    assert 0.199 < delta_of([event], 0.0) <= plan["risks"]["advantage"] * (1 + 1e-6)
    assert plan["risks"]["advantage"] <= 0.2
    assert (plan["target_advantage"], plan["target_epsilon"]) == (0.2, None)
    assert (plan["delta"], plan["epsilon"]) == (1e-5, epsilon_of([event], 1e-5).epsilon)
    text = " ".join(printed(*command).split())
    assert "within an advantage of 0.2, with ε at δ = 1e-05" in text
    # ½ + 0.2/2, and no test does better at 1% than one that finds 21%.
    assert "rises from 50% to at most 60%" in text
    (found,) = re.findall(r"at most ([0-9.]+)% are found at 1% false alarms", text)
    assert plan["risks"]["power"]["0.01"] <= float(found) / 100 <= 0.21
    (mu,) = re.findall(r"Gaussian DP: μ = ([0-9.]+), up to δ", text)
    assert plan["risks"]["mu"] <= float(mu)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BUDGET], "give two of rounds, sampling probability and noise multiplier, to find"),
        ([*BUDGET, *NOISE], "give two of rounds"),
        ([*BUDGET, *ROUNDS, *SAMPLING, *NOISE], "give two of rounds"),
        (
            [*BUDGET, *ROUNDS, *NOISE, *FIXED[:2]],
            "population is None; for fixed-size sampling it must be",
        ),
        ([*BUDGET, *ROUNDS, *SAMPLING, *FIXED, "--relation", "add-or-remove-one"], "no analysis"),
        ([*BUDGET, *ROUNDS, "--sampling-probability", "0.0105", *FIXED], "whole cohort size"),
        ([*BUDGET, *ROUNDS, *NOISE, "--policy", "random-allocation"], "--policy"),
        (["calibrate", "--epsilon", "2", *ROUNDS, *NOISE], "--delta"),
        (["calibrate", "--delta", "1e-5", *ROUNDS, *NOISE], "the budget is absent"),
        ([*BUDGET, "--advantage", "0.2", *ROUNDS, *NOISE], "--epsilon 2.0 and --advantage 0.2"),
        ([*ADVANTAGE, "1.5", *ROUNDS, *NOISE], "advantage is 1.5; it must be in (0, 1)"),
        ([*ADVANTAGE, "nan", *ROUNDS, *NOISE], "advantage is nan; it must be in (0, 1)"),
        ([*ADVANTAGE, "0.2", *NOISE], "give two of rounds"),
        ([*ADVANTAGE, "0.2", *ROUNDS, "--noise-multiplier", "1e4"], "advantage is 0.2; every"),
        (["calibrate", "--epsilon", "0", "--delta", "1e-5", *ROUNDS, *NOISE], "epsilon is 0.0"),
        (["calibrate", "--epsilon", "nan", "--delta", "1e-5", *ROUNDS, *NOISE], "epsilon is nan"),
        (["calibrate", "--epsilon", "2", "--delta", "1", *ROUNDS, *NOISE], "delta is 1.0"),
        ([*BUDGET, *NOISE, "--rounds", "0"], "rounds is 0"),
        ([*BUDGET, *NOISE, "--rounds", "9" * 30], "rounds is 999"),
        ([*BUDGET, *NOISE, "--rounds", "1.5"], "--rounds"),
        ([*BUDGET, *NOISE, "--sampling-probability", "1.5"], "is 1.5; it must be in (0, 1]"),
        ([*BUDGET, *SAMPLING, "--noise-multiplier", "nan"], "is nan"),
        ([*BUDGET, *SAMPLING, "--noise-multiplier", "0"], "multiplier is 0.0"),
        ([*BUDGET, *ROUNDS, "--noise-multiplier", "0"], "multiplier is 0.0"),
        ([*BUDGET, *ROUNDS, "--noise-multiplier", "1e4"], "every sampling probability up to 1"),
        ([*BUDGET, *ROUNDS, *NOISE, "--accountant", "all"], "accountant 'all'"),
        (
            ["calibrate", "--epsilon", "1e-9", "--delta", "1e-9", *ROUNDS, *SAMPLING],
            "no noise multiplier up to",
        ),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else "refused",
)
def test_bad_calibrations_are_refused(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_other_policies_are_calibrated_as_their_events_are_priced() -> None:
    command = [*BUDGET, "--rounds", "100", "--policy", "every-user", "--relation", "replace-one"]
    plan = json.loads(printed(*command, "--json"))
    relation = NeighbouringRelation.REPLACE_ONE
    event = every_user_gaussian(plan["noise_multiplier"], relation, 100)
    assert plan["relation"] == relation
    assert plan["epsilon"] == epsilon_of([event], 1e-5).epsilon <= 2.0
    command = [*BUDGET, "--rounds", "10", "--noise-multiplier", "4.0", *FIXED]
    plan = json.loads(printed(*command, "--json"))
    size = round(plan["sampling_probability"] * 1000)
    assert epsilon_of([fixed_size_gaussian(size, 1000, 4.0, 10)], 1e-5).epsilon <= 2.0
    assert epsilon_of([fixed_size_gaussian(size + 1, 1000, 4.0, 10)], 1e-5).epsilon > 2.0
