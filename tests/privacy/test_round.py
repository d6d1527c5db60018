"""The private round: nothing is noised or released but by `release`, and that needs a charge."""

import ast
import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from fedpriv.errors import BudgetExceededError, InvalidValueError, LedgerError
from fedpriv.experiment.grouping import equal_split
from fedpriv.ledger import Charge, Ledger, ProposedCharge, Randomness
from fedpriv.privacy import gaussian_mechanism
from fedpriv.privacy import round as private
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Averaging, GaussianMechanism
from fedpriv.privacy.layout import Layout, layers, per_layer
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import (
    Draws,
    PartialSum,
    PrivacyRecords,
    RoundAttempt,
    draw_cohort,
    private_round,
    release,
)
from fedpriv.privacy.sampling import PoissonSampling
from tests.training.federation import open_records

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(("a.w", "b.w"), ((3,), (2,)))
GROUPS = per_layer(LAYOUT, layers(LAYOUT), equal_split(layers(LAYOUT), 1.0))
FIRST = RoundAttempt("run", 0, 0)
SEEDED = SeededEntropy(3)
ZERO = PartialSum("cohort", 0, np.zeros(LAYOUT.dimension, np.int64), 0)


def mechanism_of(z: float = 1.0, population: int = 20, q: float = 0.5) -> GaussianMechanism:
    sampling = PoissonSampling(population, q)
    return GaussianMechanism.calibrated(sampling, Clipping(LAYOUT, GROUPS), z, (0.5, 0.5))


MECHANISM = mechanism_of()


def charge_for(
    records: PrivacyRecords,
    at: RoundAttempt = FIRST,
    mechanism: GaussianMechanism = MECHANISM,
) -> Charge:
    source = Randomness.SEEDED
    given = at.run, at.round, at.attempt, source, mechanism.event, "0" * 64
    return records.ledger.charge(ProposedCharge(*given))


def nobody(_: RoundAttempt, users: np.ndarray) -> Iterable[PartialSum]:
    del users
    return ()


# A release needs a charge.


@pytest.fixture
def noised(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys with which noise was drawn."""
    drawn, keys = gaussian_mechanism.rounded_gaussian, []

    def spy(key: bytes, count: int, stddev: float) -> np.ndarray:
        keys.append(key)
        return drawn(key, count, stddev)

    monkeypatch.setattr(gaussian_mechanism, "rounded_gaussian", spy)
    return keys


@pytest.mark.parametrize("charge", [None, FIRST, SimpleNamespace(run="run", round=0, attempt=0)])
def test_without_a_charge_nothing_is_noised(charge: object, noised: list[bytes]) -> None:
    with pytest.raises(LedgerError, match="a release needs a charge of the ledger"):
        release(MECHANISM, FIRST, ZERO, charge, Draws(SEEDED))
    assert noised == []


def test_a_charge_is_good_for_one_release(tmp_path: Path, noised: list[bytes]) -> None:
    with open_records(tmp_path) as records:
        charge = charge_for(records)
        release(MECHANISM, FIRST, ZERO, charge, Draws(SEEDED))
        assert len(noised) == len(GROUPS)
        for used in (charge, copy.copy(charge), replace(charge)):
            with pytest.raises(LedgerError, match="two releases on one charge"):
                release(MECHANISM, FIRST, ZERO, used, Draws(SEEDED))
    assert len(noised) == len(GROUPS)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (RoundAttempt("other", 0, 0), "run 'other'"),
        (RoundAttempt("run", 1, 0), "round 1 of run 'run'"),
        (RoundAttempt("run", 0, 1), "attempt 1 at round 0 of run 'run'"),
    ],
)
def test_a_charge_of_another_round_releases_nothing(
    at: RoundAttempt, message: str, tmp_path: Path, noised: list[bytes]
) -> None:
    with (
        open_records(tmp_path) as records,
        pytest.raises(LedgerError, match=f"the charge is for .*{message}"),
    ):
        release(MECHANISM, FIRST, ZERO, charge_for(records, at), Draws(SEEDED))
    assert noised == []


@pytest.mark.parametrize("other", [mechanism_of(z=2.0), mechanism_of(q=0.4), mechanism_of(0.5)])
def test_a_charge_of_another_event_releases_nothing(
    other: GaussianMechanism, tmp_path: Path, noised: list[bytes]
) -> None:
    with open_records(tmp_path) as records:
        charge = charge_for(records, mechanism=other)
        with pytest.raises(LedgerError, match="the event charged is"):
            release(MECHANISM, FIRST, ZERO, charge, Draws(SEEDED))
        assert noised == []
        release(other, FIRST, ZERO, charge, Draws(SEEDED))  # it was not used up


def test_an_event_that_is_not_the_one_charged_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = gaussian_mechanism.GaussianQuery
    honest = query.noised_average

    def realised(self: object, *given: object) -> tuple[object, object]:
        average, events = honest(self, *given)
        return average, events[:1]

    monkeypatch.setattr(query, "noised_average", realised)
    with (
        open_records(tmp_path) as records,
        pytest.raises(LedgerError, match="the event realised is"),
    ):
        release(MECHANISM, FIRST, ZERO, charge_for(records), Draws(SEEDED))


# No other module noises or releases a sum.


@dataclass(frozen=True)
class Use:
    """Where a name is called, imported or otherwise used."""

    module: str
    function: str


@cache
def product_code() -> dict[str, list[tuple[str, ast.AST]]]:
    """All nodes of each module of the product, with the function that each is in."""
    return {
        path.relative_to(ROOT).as_posix(): list(_walk(ast.parse(path.read_text("utf-8")), ""))
        for top in ("fedpriv", "server", "clients")
        for path in (ROOT / top).rglob("*.py")
    }


def uses_of(name: str) -> set[Use]:
    """All functions of the product that use a name, as a variable, an attribute or an import."""
    return {
        Use(module, function)
        for module, nodes in product_code().items()
        for function, node in nodes
        if _names(node) & {name, f"_{name}"}
    }


def _walk(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield inside, child
        yield from _walk(child, child.name if named else inside)


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.Name():
            return {node.id}
        case ast.Attribute():
            return {node.attr}
        case ast.alias():
            return {node.name.rpartition(".")[2], node.asname or ""}
        case ast.Constant() if isinstance(node.value, str):  # getattr, and lists of exports
            return {node.value}
        case _:
            return set()


ROUND, QUERY = "fedpriv/privacy/round.py", "fedpriv/privacy/gaussian_mechanism.py"
NOISE, SIMULATED = "fedpriv/privacy/correlated_noise.py", "fedpriv/secure_sums/simulation.py"


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        (
            "rounded_gaussian",
            {Use(QUERY, ""), Use(QUERY, "rounded_noise"), Use(NOISE, ""), Use(NOISE, "step")},
        ),
        (
            "rounded_noise",  # nodes of a secure sum draw shares of the noise
            {
                Use(QUERY, "noised_average"),
                *(Use(SIMULATED, name) for name in ("", "noised_sum")),
                *(Use("clients/secure.py", name) for name in ("", "_noised_sum")),
            },
        ),
        ("noised_average", {Use(ROUND, "release")}),
        ("redeem", {Use(ROUND, "_redeemed")}),
        ("_redeemed", {Use(ROUND, "release"), Use(ROUND, "secure_round")}),
        ("add_up", {Use(ROUND, "private_round")}),
    ],
)
def test_only_the_round_noises_and_releases_sums(name: str, uses: set[Use]) -> None:
    assert uses_of(name) == uses


def test_only_the_round_calls_release_and_only_the_ledger_makes_charges() -> None:
    # Locks have a method of that name, so only what is imported from the round counts.
    imports = {
        (module, alias.name)
        for module, nodes in product_code().items()
        for _, node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in {"fedpriv.privacy", PRIVATE}
        for alias in node.names
    }
    assert not [use for use in imports if use[1] in {"round", "release", "add_up", "*"}]
    assert {use.function for use in uses_of("release") if use.module == ROUND} == {"private_round"}
    made = {
        Path(module).parts[1]
        for module, nodes in product_code().items()
        for _, node in nodes
        if isinstance(node, ast.Call) and "Charge" in _names(node.func)
    }
    assert made == {"ledger"}


PRIVATE = "fedpriv.privacy.round"


def test_a_use_elsewhere_would_be_seen() -> None:
    for code in (
        "from fedpriv.privacy.noise import rounded_gaussian as noise",
        "import fedpriv.privacy.noise.rounded_gaussian",
        "def f(x):\n    return x.rounded_gaussian(1)",
        'g = getattr(noise, "rounded_gaussian")',
    ):
        assert any("rounded_gaussian" in _names(n) for _, n in _walk(ast.parse(code), ""))


# The order: draw, record, collect, charge, noise, release.


def test_steps_are_taken_in_order_and_the_charge_is_on_disk_before_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    drawn = gaussian_mechanism.rounded_gaussian

    def collect(at: RoundAttempt, users: np.ndarray) -> Iterator[PartialSum]:
        with open_records(tmp_path) as another_process:
            commitment = another_process.participation
            seen.append(("asked", at, another_process.ledger.head.count))
            assert commitment.next_attempt("run", 0) == at.attempt + 1
        yield PartialSum("node", users.size, np.zeros(LAYOUT.dimension, np.int64), users.size)

    def spy(*given: object) -> np.ndarray:
        with open_records(tmp_path) as another_process:
            seen.append(("noised", None, another_process.ledger.head.count))
        return drawn(*given)

    monkeypatch.setattr(gaussian_mechanism, "rounded_gaussian", spy)
    with open_records(tmp_path) as records:
        made = private_round(MECHANISM, "run", 0, collect, records, SEEDED)
        (row,) = records.ledger.charges()
        records.ledger.verify(records.participation)
        cohort = records.participation.users_of(row.cohort_commitment)
    alone = replace(FIRST, first=True)
    assert seen == [("asked", alone, 0), ("noised", None, 1), ("noised", None, 1)]
    assert (row.event, row.hash, row.attempt) == (MECHANISM.event, made.charge_hash, made.attempt)
    np.testing.assert_array_equal(cohort, draw_cohort(MECHANISM, alone, Draws(SEEDED)))


def test_where_the_budget_would_be_passed_no_user_is_asked_and_nothing_noised(
    tmp_path: Path, noised: list[bytes]
) -> None:
    with open_records(tmp_path, limit=0.5) as records:
        with pytest.raises(BudgetExceededError, match="no user was asked and nothing charged"):
            private_round(MECHANISM, "run", 0, None, records, SEEDED)
        assert records.ledger.head.count == records.next_attempt("run", 0) == 0
    assert noised == []


def test_a_budget_that_another_process_used_up_meanwhile_is_refused_by_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noised: list[bytes]
) -> None:
    monkeypatch.setattr(PrivacyRecords, "refuse_if_beyond", lambda *_: None)
    with open_records(tmp_path, limit=0.5) as records:
        with pytest.raises(BudgetExceededError, match="nothing was charged"):
            private_round(MECHANISM, "run", 0, nobody, records, SEEDED)
        assert records.ledger.head.count == 0
    assert noised == []


def test_the_number_of_a_round_may_be_one_of_numpy(tmp_path: Path) -> None:
    loud = mechanism_of(z=2000.0)
    with open_records(tmp_path) as records:
        for number in (*np.arange(2), 1):
            private_round(loud, "run", number, nobody, records, SEEDED)
        records.ledger.verify(records.participation)
        rows = [(row.round, row.attempt) for row in records.ledger.charges()]
    assert rows == [(0, 0), (1, 0), (1, 1)]


def test_a_round_that_is_repeated_or_was_interrupted_is_a_new_attempt(tmp_path: Path) -> None:
    def interrupted(_: RoundAttempt, users: np.ndarray) -> Iterable[PartialSum]:
        raise OSError("interrupted", users)

    loud = mechanism_of(z=2000.0)
    with open_records(tmp_path) as records:
        first = private_round(loud, "run", 0, nobody, records, SEEDED)
        with pytest.raises(OSError, match="interrupted"):
            private_round(loud, "run", 0, interrupted, records, SEEDED)
        last = private_round(loud, "run", 0, nobody, records, SEEDED)
        assert (first.attempt, last.attempt) == (0, 2)
        assert [row.attempt for row in records.ledger.charges()] == [0, 1, 2]
    assert not np.any(first.average == last.average)


def test_no_more_users_count_than_were_drawn(tmp_path: Path) -> None:
    ones = np.ones(LAYOUT.dimension, np.int64)
    silent = mechanism_of(z=0.0, population=2, q=1.0)
    with open_records(tmp_path) as records:
        for users in (2, 3):
            sums = [PartialSum("node", users, ones, users)]
            made = private_round(silent, "run", users, lambda *_, s=sums: s, records, SEEDED)
            assert bool(np.any(made.average)) is (users == 2)


def test_an_empty_cohort_is_charged_and_released(tmp_path: Path) -> None:
    empty = mechanism_of(population=1, q=1e-12)
    with open_records(tmp_path) as records:
        made = private_round(empty, "run", 0, nobody, records, OperatingSystemEntropy())
        assert records.ledger.head.count == 1
    assert np.all(made.average != 0.0)


def test_the_weight_of_the_cohort_reaches_the_query(tmp_path: Path) -> None:
    clipping = Clipping(LAYOUT, GROUPS, weighted=tuple(group.name for group in GROUPS))
    sampling = PoissonSampling(4, 1.0)
    floored = GaussianMechanism.calibrated(
        sampling, clipping, 0.0, (0.5, 0.5), Averaging(floor=0.25)
    )
    total = np.full(LAYOUT.dimension, 2**20)
    with open_records(tmp_path) as records:
        for number, users in enumerate((1, 2, 4)):
            sums = [PartialSum("node", users, total, users)]
            made = private_round(floored, "run", number, lambda *_, s=sums: s, records, SEEDED)
            np.testing.assert_allclose(made.average, clipping.in_units(total) / users, rtol=1e-5)


@dataclass(frozen=True)
class Asked(Entropy):
    """Remembers what it was asked for keys for."""

    randomness: ClassVar[Randomness] = Randomness.SEEDED

    purposes: list[str] = field(default_factory=list)

    def key(self, purpose: str) -> bytes:
        self.purposes.append(purpose)
        return SEEDED.key(purpose)


def test_no_key_is_for_two_draws(tmp_path: Path) -> None:
    """In no run, round or attempt: what a seed gives for one purpose is always the same."""
    asked = Asked()
    with open_records(tmp_path) as records:
        for run, number, _ in product(("run", "other"), (0, 1), range(2)):
            private_round(MECHANISM, run, number, nobody, records, asked)
    streams = Counter(purpose.partition("/")[0] for purpose in asked.purposes)
    assert streams == {"sampling": 8, "noise": 16}
    assert len(set(asked.purposes)) == len(asked.purposes)


def test_cohorts_and_noise_are_fresh_per_run_round_and_attempt() -> None:
    many = mechanism_of(population=1000)
    places = [RoundAttempt(r, n, a) for r, n, a in product(("run", "other"), (0, 1), (0, 1))]
    cohorts = [draw_cohort(many, at, Draws(SEEDED)).tolist() for at in places]
    assert len({tuple(cohort) for cohort in cohorts}) == len(places)
    assert draw_cohort(many, FIRST, Draws(SEEDED)).tolist() == cohorts[0]
    assert draw_cohort(many, FIRST, Draws(OperatingSystemEntropy())).tolist() != cohorts[0]


def test_what_a_seed_gives_does_not_depend_on_the_name_of_the_first_run(tmp_path: Path) -> None:
    purposes = []
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        with open_records(tmp_path / name) as records:
            asked = Asked()
            for number in (1, 1, 2):  # with a second attempt
                private_round(MECHANISM, name, number, nobody, records, asked)
            purposes.append(asked.purposes)
    assert purposes[0] == purposes[1]


def test_noise_without_a_name_is_that_of_the_run_that_was_charged_first(tmp_path: Path) -> None:
    """Even if both runs asked their cohorts before either was charged, and the other was alone."""
    asked = {"fast": Asked(), "slow": Asked()}
    with open_records(tmp_path) as records, open_records(tmp_path) as others:

        def overtaken(*_: object) -> Iterator[PartialSum]:
            private_round(MECHANISM, "fast", 1, nobody, others, asked["fast"])
            yield from ()

        private_round(MECHANISM, "slow", 1, overtaken, records, asked["slow"])
        for name, source in asked.items():
            private_round(MECHANISM, name, 2, nobody, records, source)
        assert [row.run for row in records.ledger.charges()] == ["fast", "slow", "fast", "slow"]
    for name, begins in (("fast", "noise//"), ("slow", "noise/slow/")):
        noise = [each for each in asked[name].purposes if each.startswith("noise")]
        assert len(noise) == 4
        assert all(each.startswith(begins) for each in noise)
    drawn = [each for source in asked.values() for each in source.purposes]
    assert len(set(drawn)) == len(drawn)


def test_calibration_gives_the_noise_multiplier_of_the_round_whatever_is_averaged() -> None:
    weighted = tuple(group.name for group in GROUPS)
    for averaging, cap in ((Averaging(), 1), (Averaging(4, 10.0), 4), (Averaging(floor=0.5), 1)):
        named = () if averaging == Averaging() else weighted
        clipping = Clipping(LAYOUT, GROUPS, weighted=named, weight_cap=cap)
        made = GaussianMechanism.calibrated(
            PoissonSampling(20, 0.5), clipping, 1.3, (0.3, 0.7), averaging
        )
        assert 1.3 <= made.event.noise_multiplier <= 1.3 * (1 + 1e-9)
        query = made.query
        assert query.denominator == 10.0
        expected = 0.5 * (averaging.total_weight or 20.0)
        assert query.weighted_denominator == (expected if named else None)
        least = expected * (averaging.floor or 1.0)
        assert query.divisors == ((least,) * 2 if named else (10.0,) * 2)
    with pytest.raises(InvalidValueError, match="noise_multiplier is"):
        GaussianMechanism.calibrated(
            PoissonSampling(20, 0.5), Clipping(LAYOUT, GROUPS), math.nan, (0.5, 0.5)
        )


def test_a_ledger_that_cannot_be_written_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noised: list[bytes]
) -> None:
    def full(*_: object) -> Charge:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(Ledger, "charge", full)
    with open_records(tmp_path) as records, pytest.raises(LedgerError, match="disk is full"):
        private_round(MECHANISM, "run", 0, nobody, records, SEEDED)
    assert noised == []
    kept = {"attempt", "average", "charge_hash", "part"}
    assert private.Release.__dataclass_fields__.keys() == kept
