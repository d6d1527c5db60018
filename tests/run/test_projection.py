"""Simulations that stand for a larger population: its noise, its budget, and marks everywhere."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedpriv
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.engine.released import read_released
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.experiment.mechanism import AsIf, Poisson
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Projection,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
    Unit,
)
from fedpriv.ledger.ledger import Ledger, event_from, event_text
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.folder import write_report
from tests.commandline import fedpriv as typed
from tests.commandline import printed, refused

RNG = np.random.default_rng(0)
X = RNG.standard_normal((240, 3)).astype(np.float32)
Y = X.argmax(1)
LAYOUT = Layout(("w",), ((5,),))
AS_IF, Q, DELTA = 100_000, 0.01, 1e-6  # of a cohort of 1,000


def people(users: int = 40) -> fedpriv.Population:
    rows = slice(0, 4 * users)
    ids = np.repeat(np.arange(users), 4)
    return fedpriv.Population.from_arrays(X[rows], Y[rows], ids, held_out=(X[200:], Y[200:]))


def simulated(users: fedpriv.Population, out: Path, **more: object) -> fedpriv.Run:
    mechanism = fedpriv.Mechanism.poisson(q=Q, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=2.0, delta=DELTA, rounds=3)
    settings = {"local": fedpriv.SGD(0.5, epochs=1), "quiet": True, "out": out}
    return fedpriv.simulate(users, fedpriv.Task(nn.Linear(3, 3)), mechanism, **settings, **more)


def mechanism_of(sampling: PoissonSampling, z: float, norm: float) -> GaussianMechanism:
    return GaussianMechanism.calibrated(sampling, Clipping(LAYOUT, flat(LAYOUT, norm)), z, (1.0,))


@given(
    st.integers(1, 1000),
    st.integers(0, 6),
    st.floats(1e-6, 1.0),
    st.floats(0.05, 20.0),
    st.floats(1e-3, 1e3),
)
def test_an_average_has_the_noise_of_the_larger_population(
    users: int, magnitude: int, q: float, z: float, norm: float
) -> None:
    # pfl's benchmarks do so: noise on a sum of m users, scaled by m over the cohort it is for.
    as_if = users * 10**magnitude
    projected = mechanism_of(AsIf(Poisson(q), as_if).of(users, Unit.USER), z, norm)
    larger = mechanism_of(PoissonSampling(as_if, q), z, norm)
    assert projected.tensor_stddevs["w"] == pytest.approx(larger.tensor_stddevs["w"], rel=1e-6)
    assert projected.tensor_stddevs["w"] == pytest.approx(z * norm / (q * as_if), rel=1e-6)
    drawn = projected.sampling.expected_cohort_size
    assert drawn == pytest.approx(min(users, q * as_if))
    # The as-if event costs no more than the stated noise on the larger population.
    as_if_event = projected.event.as_if
    assert as_if_event.sampling == larger.event.sampling
    assert as_if_event.noise_multiplier >= z
    assert projected.event.noise_multiplier == pytest.approx(z * drawn / (q * as_if), rel=1e-9)


def test_a_cohort_of_fewer_users_gets_the_same_noise_in_its_average() -> None:
    some = mechanism_of(AsIf(Poisson(Q), AS_IF, cohort=20).of(500, Unit.USER), 1.0, 0.5)
    assert some.sampling.expected_cohort_size == 20
    assert some.tensor_stddevs["w"] == pytest.approx(0.5 / 1000)


@given(
    st.integers(1, 2**40),
    st.floats(1e-9, 1.0),
    st.integers(1, 2**50),
    st.floats(1e-9, 1.0),
    st.floats(0.0, 1e9),
)
def test_ledgers_keep_projections_exactly(
    users: int, q: float, larger: int, q_larger: float, stddev: float
) -> None:
    relation, projection = NeighbouringRelation.ADD_OR_REMOVE_ONE, Projection(larger, q_larger)
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, users, relation, projection=projection)
    event = RoundEvent(sampling, (SumQueryEvent("update", 1.0, stddev),))
    assert event_from(event_text(event)) == event
    alone = replace(event, sampling=replace(sampling, projection=None))
    assert alone.as_if == alone
    if stddev:  # what is charged is what the users who are there have
        assert epsilon_of([event], 0.5).epsilon == epsilon_of([alone], 0.5).epsilon


def test_the_budget_is_that_of_the_larger_population_and_the_ledger_tells_the_truth(
    tmp_path: Path,
) -> None:
    run = simulated(people().as_if(AS_IF), tmp_path / "run")
    assert run.as_if == AS_IF
    assert 1.99 < run.epsilon <= 2.0
    with Ledger.open(run.ledger) as ledger:
        events = [row.event for row in ledger.charges()]
    assert len(events) == 3
    (event,) = set(events)
    sampling = event.sampling
    assert sampling.projection == Projection(AS_IF, Q)
    assert (sampling.population, sampling.sampling_probability) == (40, 1.0)  # 1,000 are not there
    z = event.noise_multiplier
    claimed = epsilon_of([poisson_gaussian(Q, z * 1000 / 40, 3)], DELTA).epsilon
    assert run.epsilon == pytest.approx(claimed, rel=1e-6)
    assert run.enrolled_epsilon == epsilon_of(events, DELTA).epsilon
    plain = poisson_gaussian(1.0, z, 3)
    assert run.enrolled_epsilon == pytest.approx(epsilon_of([plain], DELTA).epsilon, rel=1e-6)
    assert run.enrolled_epsilon > 50 * run.epsilon


def test_everything_that_tells_an_epsilon_says_that_it_is_a_projection(tmp_path: Path) -> None:
    run = simulated(people().as_if(AS_IF, cohort=10), tmp_path / "run")
    (note,) = (text for text in run.warnings if "projection" in text)
    assert f"as if {AS_IF:,} users" in note
    assert "for the 40 enrolled" in note
    for result in run.rounds:
        assert result.as_if == AS_IF
        assert "privacy/epsilon" not in result.scalars
        assert result.scalars["projected/epsilon"] == result.epsilon
        assert result.expected_cohort_size == 10
    _, release = read_released(run.folder / "model.safetensors")
    assert release["as_if"] == AS_IF
    end = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))
    assert (end["as_if"], end["enrolled_epsilon"]) == (AS_IF, run.enrolled_epsilon)
    page = run.report().read_text(encoding="utf-8")
    assert f"A projection: as if {AS_IF:,} users were enrolled" in page
    assert "For the 40 enrolled it is (" in page
    assert "projected user-level" in page
    charts = [path for path in run.draw() if path.suffix == ".svg"]
    (spent,) = (path for path in charts if path.stem == "epsilon")
    assert "projected user-level ε" in spent.read_text(encoding="utf-8")
    assert "projections to a larger population" in printed("ledger", "show", run.ledger)
    priced = printed("epsilon", run.ledger, "--delta", str(DELTA))
    assert "projections to larger populations: this is for enrolled users" in priced


def test_a_plain_run_has_no_mark(tmp_path: Path) -> None:
    run = simulated(people(), tmp_path / "run")
    assert (run.as_if, run.enrolled_epsilon) == (None, None)
    _, release = read_released(run.folder / "model.safetensors")
    assert "as_if" not in release
    page = run.report().read_text(encoding="utf-8")
    assert "projected user" not in page
    assert "A projection:" not in page


def test_a_ledger_holds_projections_or_other_rounds_but_not_both(tmp_path: Path) -> None:
    both, other = tmp_path / "projected.sqlite", tmp_path / "plain.sqlite"
    simulated(people().as_if(AS_IF), tmp_path / "a", ledger=both)
    simulated(people(), tmp_path / "b", ledger=other)
    for ledger, users in ((both, people()), (other, people().as_if(AS_IF))):
        with pytest.raises((LedgerError, InvalidValueError)):
            simulated(users, tmp_path / "c", ledger=ledger)
        with Ledger.open(ledger) as opened:
            assert opened.head.count == 3


def test_an_interrupted_projection_goes_on_with_the_same_noise(tmp_path: Path) -> None:
    settings = ["digits", "--set=population.as_if=5000", "--set=rounds=4", "--set=seed=1"]
    printed("simulate", *settings, "--out", tmp_path / "whole")
    out = tmp_path / "parts"
    done = typed(
        "simulate", *settings, "--set=trackers=[\"mine:stop\"]", "--out", out,
        cwd=written(tmp_path),
    )  # fmt: skip
    assert done.returncode != 0
    printed("simulate", *settings, "--out", out, "--resume")
    ends = (json.loads((tmp_path / n / "run.json").read_text()) for n in ("whole", "parts"))
    whole, parts = ends
    assert parts["round"] == whole["round"] == 4
    with (
        Ledger.open(tmp_path / "whole" / "ledger.sqlite") as one,
        Ledger.open(out / "ledger.sqlite") as two,
    ):
        events = {row.event for ledger in (one, two) for row in ledger.charges()}
    assert len(events) == 1


def written(folder: Path) -> Path:
    """A folder with a module whose function fails after the second round."""
    text = "def stop(result):\n    if result.round == 2:\n        raise KeyboardInterrupt\n"
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["population.as_if=100"], "as_if is 100 and cohort is None; it must be cohort"),
        (["population.as_if=0"], "population.as_if is 0"),
        (["population.cohort=10"], "cohort is 10; without as_if"),
        (["population.as_if=5000", "population.cohort=288"], "cohort is 288"),
        (["population.as_if=1000", "population.cohort=301"], "cohort is 301"),
        (["population.as_if=5000", "audit.canaries=20"], "audit is given"),
        (
            ["population.as_if=5000", "federated_evaluation.noise_multiplier=9.0"],
            "federated_evaluation is given",
        ),
    ],
)  # fmt: skip
def test_settings_that_no_projection_can_have(
    settings: list[str], named: str, tmp_path: Path
) -> None:
    given = [f"--set={setting}" for setting in settings]
    assert named in refused("simulate", "digits", *given, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_sampling_and_searches_are_refused(tmp_path: Path) -> None:
    toml = tmp_path / "fixed.toml"
    toml.write_text(
        """
name = "fixed"
data = { name = "digits", options = { users = 287 } }
model = { name = "softmax", options = { inputs = 64, classes = 10 } }
sampling = { policy = "fixed-size", options = { cohort_size = 20 } }
privacy = { epsilon = 2.0, delta = 1e-3 }
population = { as_if = 5000 }
""",
        encoding="utf-8",
    )
    assert "sampling is FixedSize; it must be Poisson" in refused("plan", toml)
    searched = refused("tune", "digits", "--on", "users", "--set=population.as_if=5000", "--price")
    assert "population.as_if is 5000; for a search it must be absent" in searched


def test_plan_gives_both_costs() -> None:
    settings = ["digits", "--set=population.as_if=100000", "--set=rounds=5"]
    told = json.loads(printed("plan", *settings, "--json"))
    assert told["projected_epsilon"] <= 2.0
    assert told["epsilon"] > 100.0
    assert "As a projection" in printed("plan", *settings)
    assert json.loads(printed("plan", "digits", "--json"))["projected_epsilon"] is None


def test_noise_that_is_given_is_that_of_the_larger_population(tmp_path: Path) -> None:
    mechanism = fedpriv.Mechanism.poisson(q=Q, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.with_noise(1.5, epsilon=50.0, delta=DELTA)
    run = fedpriv.simulate(
        people().as_if(AS_IF), fedpriv.Task(nn.Linear(3, 3)), mechanism, rounds=2,
        local=fedpriv.SGD(0.5, epochs=1), quiet=True, out=tmp_path / "run",
    )  # fmt: skip
    assert run.epsilon == pytest.approx(
        epsilon_of([poisson_gaussian(Q, 1.5, 2)], DELTA).epsilon, rel=1e-6
    )


def test_the_default_norm_is_that_of_the_larger_cohort() -> None:
    mechanism = fedpriv.Mechanism(AsIf(Poisson(0.1), 40_000), fedpriv.Flat())
    assert mechanism.for_users(500).clipping.norm == pytest.approx(0.632, abs=1e-3)


@pytest.mark.parametrize("users", [-1, 0, 1.5, "many", float("nan")])
def test_a_population_stands_for_a_whole_number_of_users(users: object) -> None:
    with pytest.raises(InvalidValueError, match="users of as_if is"):
        people().as_if(users)
    with pytest.raises(InvalidValueError, match="cohort of as_if is"):
        people().as_if(100, users)


def test_a_study_names_the_arms_that_are_projections(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(
        """
name = "sizes"
seeds = 2
baseline = "real"
arms = [{ name = "real" }, { name = "larger", set = ["population.as_if=50000"] }]

[target]
epsilon = 4.0
delta = 1e-3

[base]
name = "digits"
rounds = 3
data = { name = "digits", options = { users = 287 } }
model = { name = "softmax", options = { inputs = 64, classes = 10 } }
""",
        encoding="utf-8",
    )
    out = tmp_path / "out"
    said = printed("compare", study, "--out", out)
    assert "larger, as if N = 50,000" in " ".join(said.replace("│", " ").split())
    page = write_report(out, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Arm larger: This is a projection" in page
    assert "Arm real: " not in page
    assert "partly projected user" in page
    rows = {row["arm"]: row for row in json.loads(printed("report", out, "--json"))["arms"]}
    assert (rows["real"]["as_if"], rows["larger"]["as_if"]) == (None, 50_000)
    assert "ε = 4.000: any outcome" in page or "ε = 3.99" in page  # of the arm without projection


def test_a_cost_that_is_no_guarantee_is_not_dressed_up_as_one(tmp_path: Path) -> None:
    run = simulated(people().as_if(10**7, cohort=5), tmp_path / "run")
    page = run.report().read_text(encoding="utf-8")
    assert "e^ε = 10^" in page
