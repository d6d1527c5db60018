"""The commands that price ledgers and plan within a budget, with good and bad input."""

import csv
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from fedpriv.accounting.accountants import ACCOUNTANTS, Bound
from fedpriv.accounting.accountants import delta as delta_of
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.fdp import trade_off
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from tests.commandline import fedpriv, printed, refused, table

ONE = poisson_gaussian(0.1, 2.0, population=300)
TWO = poisson_gaussian(0.2, 3.0, population=900)
FULL = poisson_gaussian(1.0, 4.0, population=300)


def ledger_of(
    path: Path,
    runs: dict[str, Sequence[RoundEvent]],
    population: str = "people",
    randomness: Randomness = Randomness.OPERATING_SYSTEM,
) -> Path:
    """A ledger of these rounds, run by run."""
    with Ledger.open_or_create(path, population) as ledger:
        for run, events in runs.items():
            for number, event in enumerate(events):
                ledger.charge(ProposedCharge(run, number, 0, randomness, event, "0" * 64))
    return path


def replaced(policy: SamplingPolicy, q: float) -> RoundEvent:
    """A round of 100 users for neighbours that differ in one user, with z = 4."""
    sampling = SamplingEvent(policy, q, 100, NeighbouringRelation.REPLACE_ONE)
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, 4.0),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledgers")
    ledger_of(folder / "a.sqlite", {"first": [ONE] * 5, "second": [ONE, TWO]})
    seeded = Randomness.SEEDED
    ledger_of(folder / "b.sqlite", {"third": [TWO] * 3}, "others", randomness=seeded)
    ledger_of(folder / "odd.sqlite", {"[/] $x": [TWO] * 3}, "$[/bold] :smile: $")
    ledger_of(folder / "empty.sqlite", {})
    ledger_of(folder / "full.sqlite", {"full": [FULL] * 4})
    noiseless = poisson_gaussian(0.1, 0.0, population=300)
    ledger_of(folder / "infinite.sqlite", {"bare": [ONE, noiseless]})
    return folder


def test_ledgers_add_up(folder: Path) -> None:
    a, b = folder / "a.sqlite", folder / "b.sqlite"
    rows = table("epsilon", a, b, "--delta", "1e-5", "--accountant", "rdp")
    expected = [
        (str(a), "first", [ONE] * 5),
        (str(a), "second", [ONE, TWO]),
        (str(a), "all runs", [ONE] * 6 + [TWO]),
        (str(b), "third", [TWO] * 3),
        ("all ledgers", "all runs", [ONE] * 6 + [TWO] * 4),
    ]
    assert len(rows) == len(expected)
    for row, (ledger, run, events) in zip(rows, expected, strict=True):
        assert row[:4] == [ledger, run, str(len(events)), "rdp"]
        truth = epsilon_of(events, 1e-5, "rdp").epsilon
        assert truth <= float(row[4]) <= truth + 1.001e-3
        assert row[5] == "upper bound"
    text = printed("epsilon", a, b)
    # 900 users here and 900 there may be 1,800 in all.
    assert "user-level ε of people, others at δ = 0.0001" in text
    assert "one user that may be in each of their populations" in text
    assert "Randomness: seeded: reproducible, not a guarantee." in text
    assert "Sums and noise: floating-point noise." in text


def test_an_interval_from_zero_is_an_upper_bound(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "a", {"r": [poisson_gaussian(0.001, 50.0)]}, "p")
    (row,) = table("epsilon", ledger, "--delta", "0.1", "--accountant", "tight")
    assert row[3:] == ["0.000", "upper bound"]


def test_sums_are_exact_where_all_charges_have_a_granularity(tmp_path: Path) -> None:
    whole = SumQueryEvent("update", 1.0, 3.0, 2.0**-24)
    exact = RoundEvent(ONE.sampling, (whole,))
    mixed = RoundEvent(ONE.sampling, (whole, SumQueryEvent("metrics", 1.0, 3.0)))
    for name, events, said in (
        ("exact", [exact, exact], "exact"),
        ("one", [exact, ONE], "floating-point noise"),
        ("mixed", [mixed], "floating-point noise"),
    ):
        path = ledger_of(tmp_path / name, {"r": events}, "people")
        assert f"Sums and noise: {said}." in printed("epsilon", path, "--delta", "1e-5")
        found = json.loads(printed("epsilon", path, "--delta", "1e-5", "--json"))
        assert found["arithmetic"] == said


def test_the_default_delta_counts_one_population_once(tmp_path: Path) -> None:
    small = poisson_gaussian(0.1, 2.0, population=600)
    one = ledger_of(tmp_path / "one.sqlite", {"r": [small]}, "same")
    two = ledger_of(tmp_path / "two.sqlite", {"r": [small]}, "same")
    other = ledger_of(tmp_path / "other.sqlite", {"r": [small]}, "another")
    assert "at δ = 0.001" in printed("epsilon", one, two, "--accountant", "rdp")
    assert "at δ = 0.0001" in printed("epsilon", one, other, "--accountant", "rdp")


def test_delta_is_printed_in_full_as_epsilon_is_larger_for_less(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "a", {"r": [poisson_gaussian(0.1, 2.0, population=600)]}, "p")
    exact = "0.0003484320557491289"
    text = printed("epsilon", ledger, "--delta", exact, "--accountant", "rdp")
    assert f"at δ = {exact}" in " ".join(text.split())


def test_every_accountant_speaks_for_itself(folder: Path) -> None:
    text = printed("epsilon", folder / "full.sqlite", "--delta", "1e-5")
    rows = table("epsilon", folder / "full.sqlite", "--delta", "1e-5")
    assert [row[2] for row in rows] == list(ACCOUNTANTS)
    for row in rows:
        loss = epsilon_of([FULL] * 4, 1e-5, row[2])
        assert loss.assumptions.partition(";")[0] in " ".join(text.split())
        assert loss.epsilon <= float(row[3]) <= loss.epsilon + 1.001e-3
        if loss.bound is Bound.ESTIMATE:
            assert row[4] == "estimate"
        else:
            assert row[4].startswith(("upper bound", "certified interval"))


def test_what_an_attacker_can_tell_is_said_of_all_releases(folder: Path) -> None:
    text = " ".join(printed("epsilon", folder / "full.sqlite", "--delta", "1e-5").split())
    said = re.search(
        r"rises from 50% to at most (\S+)%\. Of those that took part, at most (\S+)% are found "
        r"at 1% false alarms, (\S+)% at 0\.1%\. Gaussian DP: μ = 0\.5\.",
        text,
    )
    assert said is not None
    # Four rounds of z = 4 without sampling tell N(0, 1) from N(½, 1).
    truths = [norm.cdf(0.25), *(norm.cdf(norm.ppf(alpha) + 0.5) for alpha in (0.01, 0.001))]
    for shown, truth in zip(map(float, said.groups()), truths, strict=True):
        assert truth <= shown / 100 <= truth + 1e-3


@pytest.mark.slow
def test_an_accountant_without_an_analysis_says_so(tmp_path: Path) -> None:
    fixed = replaced(SamplingPolicy.FIXED_SIZE, 0.1)
    ledger = ledger_of(tmp_path / "fixed.sqlite", {"fixed": [fixed] * 3}, "fixed")
    rows = table("epsilon", ledger, "--delta", "1e-3")
    assert [row[2] for row in rows] == ["tight", "pld"]
    for row in rows:
        loss = epsilon_of([fixed] * 3, 1e-3, row[2])
        assert loss.epsilon <= float(row[3]) <= loss.epsilon + 1.001e-3
    text = printed("epsilon", ledger)
    assert "replace-one neighbours, fixed-size sampling" in text
    assert "Not priced: the gdp accountant has no analysis of fixed-size sampling" in text
    found = json.loads(printed("epsilon", ledger, "--json"))
    assert len(found["refusals"]) == len(ACCOUNTANTS) - 2
    assert [each["accountant"] for each in found["rows"]] == ["tight", "pld"]
    message = refused("epsilon", ledger, "--accountant", "gdp")
    assert "the gdp accountant has no analysis" in message


def test_kinds_of_neighbours_do_not_add_up(folder: Path, tmp_path: Path) -> None:
    every = replaced(SamplingPolicy.EVERY_USER, 1.0)
    ledger = ledger_of(tmp_path / "replace.sqlite", {"every": [every]})
    alone = table("epsilon", ledger, "--accountant", "pld", "--delta", "1e-5")
    # Replacing moves the sum twice as far as adding: z = 4 is as z = 2.
    truth = epsilon_of([poisson_gaussian(1.0, 2.0)], 1e-5).epsilon
    assert truth <= float(alone[0][3]) <= truth + 1.001e-3
    message = refused("epsilon", folder / "a.sqlite", ledger)
    assert "add-or-remove-one and with replace-one neighbours cannot be added up" in message


def test_delta_at_an_epsilon(folder: Path) -> None:
    a = folder / "a.sqlite"
    rows = table("epsilon", a, "--epsilon", "0.7")
    events = {"first": [ONE] * 5, "second": [ONE, TWO], "all runs": [ONE] * 6 + [TWO]}
    assert len(rows) == len(events) * len(ACCOUNTANTS)
    for run, _, name, value, _ in rows:
        truth = delta_of(events[run], 0.7, name)
        # Summing in another order may change the last digits.
        assert truth * (1 - 1e-9) <= float(value) <= 1.01 * truth
    assert "user-level δ of people at ε = 0.7" in printed("epsilon", a, "--epsilon", "0.7")
    (row,) = table("epsilon", folder / "full.sqlite", "--epsilon", "0", "--accountant", "pld")
    assert row[4] == "upper bound"
    # Total variation of N(0, 1) and N(μ, 1) with μ = √4/4.
    assert 2 * norm.cdf(0.25) - 1 <= float(row[3]) <= 1.01 * (2 * norm.cdf(0.25) - 1)


def test_json_is_one_object_with_the_same_numbers(folder: Path) -> None:
    a, b = folder / "a.sqlite", folder / "b.sqlite"
    found = json.loads(printed("epsilon", a, b, "--delta", "1e-5", "--json"))
    assert found["delta"] == 1e-5
    assert found["randomness"] == Randomness.SEEDED
    assert [ledger["population"] for ledger in found["ledgers"]] == ["people", "others"]
    with Ledger.open(b) as ledger:
        assert found["ledgers"][1] == {
            "path": str(b),
            "ledger_id": ledger.ledger_id,
            "population": "others",
            "charges": 3,
            "head": ledger.head.hash,
        }
    counts = {(row["ledger"], row["run"]): row["rounds"] for row in found["rows"] if row["run"]}
    assert counts == {(str(a), "first"): 5, (str(a), "second"): 2, (str(b), "third"): 3}
    everything = trade_off([ONE] * 6 + [TWO] * 4)
    assert found["risks"]["advantage"] == everything.advantage
    assert found["risks"]["power"]["0.01"] == float(everything.power(0.01))
    totals = [row for row in found["rows"] if row["ledger"] is None]
    assert [row["accountant"] for row in totals] == list(ACCOUNTANTS)
    for row in totals:
        loss = epsilon_of([ONE] * 6 + [TWO] * 4, 1e-5, row["accountant"])
        assert row["run"] is None
        assert row["rounds"] == 10
        assert row["epsilon"] == pytest.approx(loss.epsilon, rel=1e-12)
        assert row["epsilon_low"] == pytest.approx(loss.epsilon_low, rel=1e-12)
        assert (row["delta"], row["bound"]) == (1e-5, loss.bound)
        assert (row["relation"], row["assumptions"]) == (loss.relation, loss.assumptions)


def test_json_of_deltas(folder: Path) -> None:
    found = json.loads(printed("epsilon", folder / "b.sqlite", "--epsilon", "0.7", "--json"))
    assert found["epsilon"] == 0.7
    assert "delta" not in found
    for row in found["rows"]:
        assert row["delta"] == delta_of([TWO] * 3, 0.7, row["accountant"])
        assert row["epsilon"] == 0.7
        assert "epsilon_low" not in row


def test_an_infinite_epsilon_is_no_number_in_json(folder: Path) -> None:
    text = printed("epsilon", folder / "infinite.sqlite", "--json", "--accountant", "pld")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (row,) = json.loads(text, parse_constant=refuse)["rows"]
    assert row["epsilon"] == "Infinity"
    assert float(row["epsilon"]) == math.inf
    assert table("epsilon", folder / "infinite.sqlite", "--accountant", "pld")[0][3] == "∞"


def test_an_empty_ledger_is_refused_alone_and_costs_nothing_beside_another(folder: Path) -> None:
    empty = folder / "empty.sqlite"
    for arguments in ([], ["--epsilon", "1"], ["--json"]):
        message = refused("epsilon", empty, *arguments)
        assert f"{empty} has no charge; nothing was released" in message
    rows = table("epsilon", folder / "b.sqlite", empty, "--accountant", "rdp")
    assert [row[1] for row in rows] == ["third", "(no charge)", "all runs"]
    assert rows[0][4] == rows[2][4]
    assert rows[1][4] == "0.000"
    found = json.loads(printed("epsilon", folder / "b.sqlite", empty, "--json"))
    assert found["ledgers"][1]["head"] is None


def test_names_are_no_markup(folder: Path) -> None:
    odd = folder / "odd.sqlite"
    (row, *_) = table("epsilon", odd)
    assert row[0] == "[/] $x"
    assert "$[/bold] :smile: $" in printed("epsilon", odd)
    assert "[/] $x" in printed("ledger", "show", odd)
    assert "$[/bold] :smile: $: 3 charges" in printed("ledger", "show", odd)


def test_bad_epsilon_commands_are_refused(folder: Path, tmp_path: Path) -> None:
    a = folder / "a.sqlite"
    both = refused("epsilon", a, "--delta", "1e-5", "--epsilon", "2")
    assert "delta is 1e-05 and epsilon is 2.0; only one can be given" in both
    copied = shutil.copy(a, tmp_path / "copy.sqlite")
    for again in a, copied:
        message = refused("epsilon", a, again)
        assert f"{a} and {again} are one ledger" in message
        assert "each ledger must be given once" in message
    assert "absent.sqlite" in refused("epsilon", a, folder / "absent.sqlite")
    assert str(folder) in refused("epsilon", folder)
    assert "'moments'" in refused("epsilon", a, "--accountant", "moments", "--json")
    for bad in "-1", "inf", "nan":
        assert f"epsilon is {float(bad)}" in refused("epsilon", a, "--epsilon", bad)
    for bad in "0", "1", "nan", "-1e-5":
        assert f"delta is {float(bad)}" in refused("epsilon", a, "--delta", bad)
    assert "--delta" in refused("epsilon", a, "--delta", "small")
    assert "LEDGER" in refused("epsilon")
    assert "--detla" in refused("epsilon", a, "--detla", "1")


def test_a_command_without_arguments_shows_its_help() -> None:
    for arguments in (), ("ledger",):
        done = fedpriv(*arguments)
        assert done.returncode == 2
        assert done.stderr == ""
        assert "Usage" in done.stdout
    assert "No such command 'nonsense'" in refused("nonsense")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def drawn(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drawn") / "deep" / "curves"
    before = (folder / "full.sqlite").read_bytes()
    text = printed("curves", folder / "full.sqlite", "--out", out)
    assert (folder / "full.sqlite").read_bytes() == before
    assert text.split() == [str(out / f"trade_off.{suffix}") for suffix in ("png", "svg", "csv")]
    for figure in out.glob("*.png"):
        assert figure.read_bytes().startswith(b"\x89PNG")
    return out


def test_the_trade_off_is_proven_and_near_the_truth(drawn: Path) -> None:
    rows = rows_of(drawn / "trade_off.csv")
    one, two, gaussian, perfect = (
        np.array([float(row[name]) for row in rows])
        for name in ("type_one", "type_two", "type_two_gaussian", "type_two_perfect")
    )
    assert one[0] == 0.0
    assert one[-1] == 1.0
    assert np.array_equal(perfect, 1 - one)
    # Four rounds of z = 4 without sampling are exactly G_μ with μ = √4/4.
    truth = norm.cdf(norm.isf(one) - 0.5)
    assert np.all(two <= truth + 1e-12)
    assert np.all(two >= truth - 2e-3)
    assert np.allclose(gaussian, truth, atol=1e-12)
    # A trade-off function is convex.
    slopes = np.diff(two) / np.diff(one)
    assert np.all(np.diff(slopes) >= -1e-6)


def test_the_risks_are_those_of_the_best_test(folder: Path) -> None:
    ledger = folder / "full.sqlite"
    found = json.loads(printed("epsilon", ledger, "--delta", "1e-5", "--json"))["risks"]
    assert (found["bound"], found["slack"], found["regret"]) == ("interval", 0.0, 0.0)
    assert found["mu"] == pytest.approx(0.5, rel=1e-12)
    assert found["advantage"] == pytest.approx(2 * norm.cdf(0.25) - 1, rel=1e-9)
    assert set(found["power"]) == {"0.001", "0.01", "0.05", "0.1"}
    for alpha, power in found["power"].items():
        truth = norm.sf(norm.isf(float(alpha)) - 0.5)
        assert truth <= power <= truth + 2e-3


def test_the_trade_off_of_sampled_rounds_is_above_a_real_test(folder: Path, tmp_path: Path) -> None:
    printed("curves", folder / "odd.sqlite", "--out", tmp_path)
    found = json.loads(printed("epsilon", folder / "odd.sqlite", "--json"))["risks"]
    # Above the limit of many rounds, and below all users in every round.
    assert 0.2 * math.sqrt(3 * math.expm1(1 / 9)) < found["mu"] < math.sqrt(3) / 3
    assert "<svg" in (tmp_path / "trade_off.svg").read_text(encoding="utf-8")
    rows = rows_of(tmp_path / "trade_off.csv")
    # A test that looks at the sum of the releases of all three rounds, and its two errors.
    rng = np.random.default_rng(7)
    samples = 200_000
    noise = rng.normal(0.0, 3.0, (samples, 3)).sum(axis=1)
    user = rng.binomial(3, 0.2, samples) + rng.normal(0.0, 3.0, (samples, 3)).sum(axis=1)
    thresholds = np.linspace(-5, 5, 21)
    alpha = np.array([(noise > threshold).mean() for threshold in thresholds])
    beta = np.array([(user <= threshold).mean() for threshold in thresholds])
    one = [float(row["type_one"]) for row in rows]
    proven = np.interp(alpha, one, [float(row["type_two"]) for row in rows])
    # Six standard deviations of a frequency in 200,000 draws, for both errors.
    assert np.all(beta >= proven - 12 * 0.5 / math.sqrt(samples))
    # Nor is the bound far below: this test, which is not the best one, comes near it.
    assert np.max(beta - proven) < 0.05


def test_bad_curves_are_refused(folder: Path, tmp_path: Path) -> None:
    full = folder / "full.sqlite"
    assert "has no charge" in refused("curves", folder / "empty.sqlite", "--out", tmp_path / "x")
    assert "--out" in refused("curves", full)
    assert "absent" in refused("curves", folder / "absent.sqlite", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert "cannot be used" in refused("curves", full, "--out", full)
