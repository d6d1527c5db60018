"""Runs with cohorts of each policy: from a file, interrupted, or refused with nothing spent."""

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedpriv
from fedpriv.accounting.accountants import epsilon, sampling_text
from fedpriv.accounting.pricing import price, read_ledger
from fedpriv.data.population import load_population
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import load_config
from fedpriv.experiment.mechanism import Mechanism
from fedpriv.experiment.models import build_model
from fedpriv.ledger.events import NeighbouringRelation, SamplingPolicy, Unit
from fedpriv.ledger.ledger import ChargedRow, Ledger, paid_events
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.run.folder import RunFolder
from fedpriv.training.rounds import Stop
from tests.commandline import printed, refused

N, ROUNDS = 30, 5
FILE = """
name = "drawn"
rounds = 5
seed = 1
[data]
name = "digits"
options = { users = 30 }
[model]
name = "softmax"
options = { inputs = 64, classes = 10 }
[local]
batch_size = "all"
epochs = 1
[clipping]
norm = 0.5
[privacy]
epsilon = 8.0
delta = 1e-2
"""
ALLOCATION = ("sampling.policy=random-allocation", "sampling.options={rounds=3,participations=2}")
FIXED = ("sampling.policy=fixed-size", "sampling.options={cohort_size=12}")
EVERY_USER = ("sampling.policy=every-user",)
POLICIES = {
    "poisson": ("privacy.sampling_probability=0.4",),
    "fixed-size": FIXED,
    "every-user": EVERY_USER,
    "every-user-replaced": (*EVERY_USER, 'sampling.options={relation="replace-one"}'),
    "random-allocation": ALLOCATION,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "drawn.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def sets(*settings: str) -> list[str]:
    return [part for one in settings for part in ("--set", one)]


def rows_of(folder: Path) -> list[ChargedRow]:
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger.verify()
        return [*ledger.charges()]


def cohorts_of(folder: Path) -> list[np.ndarray]:
    with ParticipationRecord.open(record_path(folder / "ledger.sqlite")) as record:
        return [record.users_of(row.cohort_commitment) for row in rows_of(folder)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_draws_what_it_is_charged_for(file: Path, tmp_path: Path, policy: str) -> None:
    settings, out = sets(*POLICIES[policy]), tmp_path / "run"
    said = printed("simulate", file, *settings, "--out", out)
    rows, cohorts = rows_of(out), cohorts_of(out)
    events = paid_events(rows)
    spent = epsilon(events, 1e-2).epsilon
    assert 7.9 < spent <= 8.0
    printed(
        "ledger",
        "verify",
        out / "ledger.sqlite",
        "--participation",
        record_path(out / "ledger.sqlite"),
    )
    assert sampling_text(rows[0].event.sampling).split(",")[0] in re.sub(r"[│\s]+", " ", said)
    sizes, times = [users.size for users in cohorts], np.bincount(np.concatenate(cohorts))
    drawn = rows[0].event.sampling
    if policy == "fixed-size":
        assert sizes == [12] * ROUNDS
        assert drawn.relation is NeighbouringRelation.REPLACE_ONE
        assert len({tuple(users.tolist()) for users in cohorts}) == ROUNDS
    elif drawn.policy is SamplingPolicy.EVERY_USER:
        assert sizes == [N] * ROUNDS
        replaced = policy == "every-user-replaced"
        assert (drawn.relation is NeighbouringRelation.REPLACE_ONE) == replaced
    elif policy == "random-allocation":
        assert [row.part for row in rows] == [0, 1, 2, 0, 1]
        assert len(events) == 2
        first = np.bincount(np.concatenate(cohorts[:3]))
        assert first.tolist() == [2] * N
        assert times.max() <= 4
        assert "5 charged, paid by 2" in said


def train(
    out: Path, settings: tuple[str, ...], *, rounds: int = ROUNDS, **given: Any
) -> fedpriv.Run:
    """The run of the file with some settings, from Python."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "drawn.toml"
        file.write_text(FILE, encoding="utf-8")
        config = load_config(file, [*settings])
    mechanism = config.mechanism().calibrate(epsilon=8.0, delta=1e-2, rounds=rounds, users=N)
    people = load_population(config.data.name, config.data.options)
    task = fedpriv.Task(build_model("softmax", {"inputs": 64, "classes": 10}, 0))
    given = {"quiet": True, "seed": 1, "rounds": rounds, "out": out, **given}
    return fedpriv.simulate(people, task, mechanism, local=fedpriv.SGD(0.5, epochs=1), **given)


@pytest.mark.parametrize(
    ("policy", "first"),
    [(name, 2) for name in POLICIES] + [("random-allocation", at) for at in (1, 3, 4)],
)
def test_a_run_that_goes_on_is_the_uninterrupted_one(
    tmp_path: Path, policy: str, first: int
) -> None:
    """In the middle of a pass too, with the same cohorts and noise, and no further charge."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def stop(result: fedpriv.RoundResult) -> None:
        if result.round == first:
            raise KeyboardInterrupt

    train(whole, POLICIES[policy])
    with pytest.raises(KeyboardInterrupt):
        train(parts, POLICIES[policy], trackers=[stop])
    assert len(rows_of(parts)) == first
    train(parts, POLICIES[policy], resume=True)
    models = [load_file(out / "model.safetensors") for out in (whole, parts)]
    for name, tensor in models[0].items():
        np.testing.assert_array_equal(tensor, models[1][name])
    charged = [
        [(row.round, row.part, row.series) for row in rows_of(out)] for out in (whole, parts)
    ]
    assert charged[0] == charged[1]
    for one, two in zip(cohorts_of(whole), cohorts_of(parts), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("sampling.policy=fixed-size",), "needs the option 'cohort_size'"),
        ((FIXED[0], "sampling.options={cohort_size=31}"), "cohort_size is 31"),
        ((FIXED[0], "sampling.options={cohort_size=0}"), "cohort_size is 0"),
        ((FIXED[0], "sampling.options={cohort_size=2.5}"), "cohort_size is 2.5"),
        ((FIXED[0], 'sampling.options={cohort_size="x"}'), "cohort_size is 'x'"),
        ((FIXED[0], "sampling.options={cohort_size=true}"), "cohort_size is True"),
        ((FIXED[0], "sampling.options={size=3}"), "has no option 'size'"),
        ((*FIXED, "privacy.sampling_probability=0.3"), "is 0.3; it must be absent for"),
        ((*ALLOCATION, "privacy.sampling_probability=0.3"), "sampling_probability is 0.3"),
        ((ALLOCATION[0],), "needs the option 'rounds'"),
        ((ALLOCATION[0], "sampling.options={rounds=0}"), "the schedule has 0 rounds"),
        ((ALLOCATION[0], "sampling.options={rounds=2.5}"), "the schedule has 2.5 rounds"),
        ((ALLOCATION[0], "sampling.options={rounds=true,x=1}"), "has no option 'x'"),
        ((ALLOCATION[0], "sampling.options={rounds=true}"), "the schedule has True rounds"),
        (
            (
                "sampling.policy=poisson-within-bands",
                "sampling.options={probability=0.4,rounds=4,separation=2}",
            ),
            "sampling.options must not give 0.4 as the probability",
        ),
        (
            (ALLOCATION[0], "sampling.options={rounds=3,participations=4}"),
            "participations of the schedule is 4",
        ),
        (
            (ALLOCATION[0], 'sampling.options={rounds=3,participations="all"}'),
            "participations of the schedule is 'all'",
        ),
        ((*EVERY_USER, 'sampling.options={relation="swap"}'), "relation is 'swap'"),
        ((*EVERY_USER, "sampling.options={relation=3}"), "relation is of the type int"),
        ((*ALLOCATION, "clipping.adaptive={}"), "clipping norms adapt and random-allocation"),
        (("privacy.sampling_probability=0.0",), "sampling_probability"),
        # One ε compares one kind of neighbours, and these queries are of the other.
        ((*FIXED, "federated_evaluation={noise_multiplier=9.0}"), "cannot be added up"),
        (
            (*FIXED, "federated_evaluation={noise_multiplier=9.0}", "privacy.noise_multiplier=9.0"),
            "cannot be added up",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence_and_nothing_is_left(
    file: Path, tmp_path: Path, settings: tuple[str, ...], sentence: str
) -> None:
    said = refused("simulate", file, *sets(*settings), "--out", tmp_path / "run")
    assert sentence in said
    assert "Error" not in said
    assert [*tmp_path.iterdir()] == [file]


def test_a_ledger_of_the_other_relation_is_refused_and_stays_as_it_is(
    file: Path, tmp_path: Path
) -> None:
    ledger, out = tmp_path / "shared.sqlite", tmp_path / "second"
    shared = sets(f"privacy.ledger={ledger}", "privacy.noise_multiplier=9.0", "rounds=1")
    printed("simulate", file, *shared, "--out", tmp_path / "first")
    before = ledger.read_bytes()
    said = refused("simulate", file, *shared, *sets(*FIXED), "--out", out)
    assert "cannot be added up" in said
    assert ledger.read_bytes() == before
    assert not out.exists()


@pytest.mark.parametrize(
    "settings", [FIXED, EVERY_USER, ALLOCATION], ids=["fixed-size", "every-user", "allocation"]
)
def test_a_search_on_users_has_no_price_for_other_policies(
    file: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    more = sets(*settings, 'tune.space={"clipping.norm"=[0.2,0.5]}', "tune.held_out_is_public=true")
    said = refused("tune", file, *more, "--on", "users", "--out", tmp_path / "found")
    assert "a search on users has an analysis only for poisson" in said
    assert not (tmp_path / "found").exists()


def test_a_search_on_public_users_takes_every_policy(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    people = load_population("digits", {"users": N})
    for policy in (fedpriv.FixedSize(12), fedpriv.RandomAllocation(2), fedpriv.EveryUser()):
        mechanism = fedpriv.Mechanism(policy, fedpriv.Flat(0.5)).calibrate(
            epsilon=8.0, delta=1e-2, rounds=2, users=N
        )
        given = {"space": {"local.learning_rate": (0.1, 1.0)}, "trials": 1, "quiet": True}
        task = fedpriv.Task(build_model("softmax", {"inputs": 64, "classes": 10}, 0))
        out = tmp_path / type(policy).__name__
        found = fedpriv.tune(people, task, mechanism, on="public", out=out, **given)
        assert found.arguments["mechanism"].noise_multiplier == mechanism.noise_multiplier
    mechanism = replace(mechanism, sampling=fedpriv.FixedSize(12))
    out = tmp_path / "scaled"
    with pytest.raises(InvalidValueError, match="cohorts have a fixed size, whose noise"):
        fedpriv.tune(people, task, mechanism, on="public", out=out, users=900, **given)
    assert not out.exists()


def test_where_the_key_of_a_pass_is_lost_the_run_pays_again_as_far_as_its_budget_goes(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"

    def stop(result: fedpriv.RoundResult) -> None:
        if result.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(out, ALLOCATION, rounds=6, trackers=[stop])
    with ParticipationRecord.open(record_path(out / "ledger.sqlite")) as record:
        record.forget_series(rows_of(out)[0].run)
    run = train(out, ALLOCATION, rounds=6, resume=True)
    assert [row.part for row in rows_of(out)] == [0, 1, 0, 1, 2]
    assert len(run.rounds) == 5
    assert run.stop is Stop.BUDGET
    assert run.epsilon <= 8.0


def test_the_key_of_a_pass_that_was_killed_at_its_end_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    monkeypatch.setattr(ParticipationRecord, "forget_series", killed)
    with pytest.raises(KeyboardInterrupt):
        train(out, ALLOCATION, rounds=3)
    monkeypatch.undo()
    first = rows_of(out)[0].cohort_commitment
    with ParticipationRecord.open(record_path(out / "ledger.sqlite")) as record:
        assert record.series_key(first) is not None
    train(out, ALLOCATION, rounds=3, resume=True)
    with ParticipationRecord.open(record_path(out / "ledger.sqlite")) as record:
        assert record.series_key(first) is None


class TestPolicies:
    def test_calibration_knows_the_price_of_each(self) -> None:
        """The same policies by name, whose noise keeps the budget by their own events."""
        made = {}
        for policy, users in (
            (fedpriv.Poisson(0.4), None),
            (fedpriv.FixedSize(12), N),
            (fedpriv.EveryUser(), None),
            (fedpriv.RandomAllocation(5, 2), None),
        ):
            mechanism = Mechanism(policy, fedpriv.Flat(0.5))
            found = mechanism.calibrate(epsilon=4.0, delta=1e-3, rounds=10, users=users)
            made[type(policy).__name__] = found.noise_multiplier
            assert policy.of(N, Unit.USER).expected_cohort_size == pytest.approx(
                N if isinstance(policy, fedpriv.EveryUser) else 12
            )
        # Who is replaced moves a sum by twice the norm; where all take part, nothing is secret.
        assert made["FixedSize"] > 1.6 * made["Poisson"]
        assert made["EveryUser"] > 1.5 * made["Poisson"]
        assert made["RandomAllocation"] < made["Poisson"]

    def test_fixed_sizes_need_the_number_of_users(self) -> None:
        with pytest.raises(InvalidValueError, match="users is None"):
            Mechanism(fedpriv.FixedSize(5), fedpriv.Flat(1.0)).calibrate(
                epsilon=1.0, delta=1e-3, rounds=3
            )

    def test_noise_for_other_users_is_refused(self, tmp_path: Path) -> None:
        """It is not raised to what these users need, step by step."""
        mechanism = Mechanism(fedpriv.FixedSize(12), fedpriv.Flat(1.0))
        mechanism = mechanism.calibrate(epsilon=2.0, delta=1e-2, rounds=3, users=100 * N)
        people = load_population("digits", {"users": N})
        task = fedpriv.Task(build_model("softmax", {"inputs": 64, "classes": 10}, 0))
        with pytest.raises(InvalidValueError, match="at which all rounds with N = 30 cost ε = "):
            fedpriv.simulate(people, task, mechanism, out=tmp_path / "run", quiet=True)
        assert not (tmp_path / "run").exists()

    def test_the_last_pass_is_calibrated_whole(self) -> None:
        mechanism = Mechanism(fedpriv.RandomAllocation(4), fedpriv.Flat(1.0))
        noise = [
            mechanism.calibrate(epsilon=1.0, delta=1e-3, rounds=rounds).noise_multiplier
            for rounds in (5, 8, 9)
        ]
        assert noise[0] == noise[1] < noise[2]


def test_rounds_and_costs_of_a_ledger_with_passes(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed("simulate", file, *sets(*ALLOCATION), "--out", out)
    path = out / "ledger.sqlite"
    (found, *_) = price([path], 1e-2, None, "tight").prices
    assert found.releases.rounds == ROUNDS
    assert [event.count for event in found.releases.events] == [2]
    content = read_ledger(path)
    event = content.events[0]
    one, two = (epsilon([event] * passes, 1e-2).epsilon for passes in (1, 2))
    rounds = list(RunFolder(out).read_metrics())
    assert [row["epsilon"] for row in rounds] == [one, one, one, two, two]
    shown = printed("ledger", "show", path)
    assert "5 charges, 3 of them paid by others" in shown


def test_a_plan_says_what_a_pass_is(file: Path) -> None:
    said = printed("plan", file, *sets(*ALLOCATION))
    assert "one sample, 3 rounds to a charge" in said
    joined = re.sub(r"\s+", " ", said)
    assert "random-allocation to 2 of 3 rounds of N = 30 users, expected cohort 20" in joined
    assert "5 rounds, charged as 2 of 3, cost ε" in joined
    said = re.sub(r"\s+", " ", printed("plan", file, *sets(*FIXED)))
    assert "fixed-size cohorts, m = 12 of N = 30 users" in said
    assert "one that is replaced twice that" in said
