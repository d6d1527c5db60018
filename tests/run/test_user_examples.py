"""Rounds that sample the examples of users, who stay what is protected, through whole runs.

The reference is algorithm 1 of Abadi et al. 2016 on the examples that count, in double precision.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.accounting.policies import poisson_examples_gaussian
from fedpriv.data import from_arrays
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.flower.grid import GridSimulation
from fedpriv.ledger.events import SamplingPolicy, Unit
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import (
    MOST_USERS,
    Averaging,
    GaussianMechanism,
)
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import ExampleSampling, PoissonSampling
from fedpriv.report.guarantee import assumptions, loss_of
from fedpriv.report.run_page import page_of_run
from fedpriv.run.folder import read_run
from fedpriv.run.run import Run, RunSetup
from fedpriv.studies import read_study
from tests.commandline import printed, refused
from tests.run.test_units import (
    NORM,
    RATE,
    ROUNDS,
    SIMULATIONS,
    algorithm_1,
    assert_close,
    population,
    run,
    task,
)
from tests.run.test_units import flat as clipped_to

K = 3


def noiseless(q: float = 1.0, k: int = K, **changes: Any) -> fedpriv.Mechanism:
    mechanism = fedpriv.Mechanism.poisson(q, fedpriv.Flat(NORM), examples_per_user=k, **changes)
    return replace(mechanism, noise_multiplier=0.0, delta=1e-3, unsafe_no_privacy=True)


def private(**changes: Any) -> fedpriv.Mechanism:
    mechanism = fedpriv.Mechanism.poisson(0.3, fedpriv.Flat(NORM), examples_per_user=K, **changes)
    return mechanism.calibrate(epsilon=4.0, delta=1e-3, rounds=ROUNDS)


def counting(people: fedpriv.Population, k: int) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """The example in each place, chosen by hand; None where there is none."""
    places: list[tuple[np.ndarray, np.ndarray] | None] = []
    for user in range(people.users.population):
        own = people.users.examples_of(user)
        n = len(own["y"])
        rows = list(range(n)) if n <= k else [j * n // k for j in range(k)]
        places += [(own["x"][row : row + 1], own["y"][row : row + 1]) for row in rows]
        places += [None] * (k - len(rows))
    return places


@pytest.mark.parametrize("total", [None, 12.0])
def test_rounds_are_algorithm_1_on_k_examples_of_each_user(
    total: float | None, tmp_path: Path
) -> None:
    people, q = population((3, 1, 2, 9, 5)), 0.4
    found = run(people, noiseless(q, total_examples=total), tmp_path / "run", seed=5)
    places, entropy = counting(people, K), SeededEntropy(5)
    coins = PoissonSampling(5 * K, q)
    lots = [
        [p for p in coins.draw(entropy.key(f"sampling//{t}/0"))[0] if places[p] is not None]
        for t in range(1, ROUNDS + 1)
    ]
    assert len({len(lot) for lot in lots}) > 1
    records = [(x, y) for x, y in (place or (None, None) for place in places)]
    expected = algorithm_1(records, lots, q * (total or 5 * K), [clipped_to(NORM)] * ROUNDS)
    assert_close(found, expected)


def test_the_ledger_says_whose_examples_and_how_many(tmp_path: Path) -> None:
    people, mechanism = population((3, 1, 2, 9, 5)), private()
    found = run(people, mechanism, tmp_path / "run")
    path = tmp_path / "run" / "ledger.sqlite"
    with Ledger.open(path) as ledger, ParticipationRecord.open(record_path(path)) as record:
        ledger.verify(record)  # places beyond N are no strangers
        assert ledger.population_name == people.name
        rows = list(ledger.charges())
    for row in rows:
        sampling = row.event.sampling
        assert sampling.policy is SamplingPolicy.EXAMPLES
        assert (sampling.population, sampling.examples_per_user) == (5, K)
        assert sampling.unit is Unit.USER
        assert json.loads(row.text)["examples_per_user"] == K
    z = mechanism.noise_multiplier or 0.0
    price = fedpriv.epsilon([poisson_examples_gaussian(0.3, K, z, ROUNDS)], 1e-3)
    assert found.epsilon == pytest.approx(price.epsilon, rel=1e-3)
    assert 0.99 * 4.0 < found.epsilon <= 4.0
    # Priced as a statement about each example, the same rounds seem to cost much less.
    of_examples = fedpriv.Mechanism.poisson(0.3, fedpriv.Flat(NORM), unit="example")
    alone = of_examples.calibrate(epsilon=4.0, delta=1e-3, rounds=ROUNDS)
    assert z > 1.5 * (alone.noise_multiplier or math.inf)


def test_users_and_their_examples_are_charged_to_one_ledger(tmp_path: Path) -> None:
    people, ledger = population((3, 1, 4, 2, 5)), tmp_path / "ledger.sqlite"
    whole = fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(NORM))
    whole = whole.with_noise(3.0, epsilon=20.0, delta=1e-3)
    local = fedpriv.SGD(0.1, epochs=1)
    first = run(people, whole, tmp_path / "a", ledger=ledger, local=local)
    examples = replace(private(), epsilon=20.0, rounds=None)
    second = run(people, examples, tmp_path / "b", ledger=ledger)
    with Ledger.open(ledger) as opened:
        spent = opened.spent()
    assert second.epsilon == pytest.approx(fedpriv.epsilon(spent, 1e-3).epsilon, rel=1e-9)
    assert second.epsilon > max(first.epsilon, 4.0)


def test_what_is_said_names_users_and_their_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    found = run(population(), private(metrics=["accuracy"]), out, quiet=False)
    told = capsys.readouterr().out
    assert "user-level (ε, δ)" in told
    assert "N = 5 users" in told
    assert "poisson-examples sampling" in told
    assert {result.unit for result in found.rounds} == {"user"}
    shown = printed("ledger", "show", out / "ledger.sqlite")
    assert re.search(r"poisson-examples,\s+add-or-remove-one,\s+3 of each", shown)
    record = read_run(out)
    on_page = str(assumptions(loss_of(record), record.ledger))
    assert "each of up to k = 3 examples of an enrolled user joins the cohort" in on_page
    assert "N = 5 users are enrolled" in on_page
    charts = [chart for section in page_of_run(record).sections for chart in section.charts]
    told = {chart.name: f"{chart.caption} {chart.y.title}" for chart in charts}
    for name in ("metric-contributors", "metric-accuracy", "norms"):  # what is counted and clipped
        assert "example" in told[name]
        assert "user" not in told[name]
    assert "user-level" in told["epsilon"]


def test_metrics_are_averages_over_the_public_number_of_examples(tmp_path: Path) -> None:
    people = population((3, 1, 2, 9, 5))
    mechanism = noiseless(total_examples=12.0, metrics={"examples": {"cap": 10}})
    found = run(people, mechanism, tmp_path / "run", rounds=1)
    # 3 + 1 + 2 + 3 + 3 places are filled, with an example each.
    assert found.rounds[0].metrics["examples"] == pytest.approx(1.0, abs=1e-6)
    assert found.rounds[0].scalar_metrics["contributors"] == pytest.approx(12.0, abs=1e-5)


def moved_by_one_user(
    rows: np.ndarray, q: float, k: int, seed: int, out: Path
) -> tuple[float, int]:
    """How far one user with these inputs moves the sum of a noiseless round, and its draws."""
    people, total = population((2, 4)), 3 * k
    x, y = people.users.fields["x"], people.users.fields["y"]
    ids = np.repeat(np.arange(2), [2, 4])
    # The user is last, so that the coins of the others are the same; its place stays empty.
    sums = []
    for name, more in (("with", len(rows)), ("without", 0)):
        fields = {
            "x": np.concatenate([x, rows[:more]]),
            "y": np.concatenate([y, np.zeros(more, y.dtype)]),
        }
        users = from_arrays(fields, np.append(ids, np.full(more, 2)))
        whole = fedpriv.Population(f"people: {users.population}", users, people.test)
        if not more:  # enrolled, without an example
            offsets = np.append(whole.users.offsets, whole.users.rows)
            whole = replace(whole, users=replace(whole.users, offsets=offsets, user_ids=None))
        mechanism = noiseless(q, k)
        found = run(whole, mechanism, out / name, rounds=1, seed=seed)
        start = task().parameters()
        moved = [(found.state.parameters[n] - p).astype(np.float64) for n, p in start.items()]
        sums.append(np.concatenate([m.ravel() for m in moved]) * q * total / RATE)
    drawn = ExampleSampling(3, q, k).draw(SeededEntropy(seed).key("sampling//1/0"))[0]
    own = drawn[(drawn >= 2 * k) & (drawn < 2 * k + min(k, len(rows)))]
    return float(np.linalg.norm(sums[0] - sums[1])), own.size


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, math.inf, math.nan])
def test_a_user_moves_the_sum_by_a_norm_for_each_of_its_examples_that_is_drawn(
    scale: float, seed: int, tmp_path: Path
) -> None:
    with np.errstate(invalid="ignore"):
        rows = scale * np.sign(np.random.default_rng(1).normal(size=(1, 3)))
    moved, drawn = moved_by_one_user(
        np.repeat(rows, 6, 0).astype(np.float32), 0.5, 6, seed, tmp_path
    )
    assert moved <= drawn * NORM * (1 + 1e-5)
    if scale == 1e4:
        assert drawn > 0
        assert moved >= drawn * NORM * 0.999  # the bound is reached
    if not math.isfinite(scale):
        assert moved <= NORM * 1e-5  # they count as zero


def test_a_user_with_ten_thousand_examples_has_k_that_count(tmp_path: Path) -> None:
    rows = np.full((10_000, 3), 1e4, np.float32)
    moved, drawn = moved_by_one_user(rows, 1.0, 7, 0, tmp_path)
    assert drawn == 7
    assert moved == pytest.approx(7 * NORM, rel=1e-3)


def test_a_ratio_to_the_weight_of_a_cohort_is_refused() -> None:
    layout = Layout(("w",), ((2,),))
    sampling = ExampleSampling(10, 0.5, 2)
    averaging = Averaging(floor=0.5)
    clipping = Clipping(layout, flat(layout, 1.0), weighted=("update",))
    with pytest.raises(InvalidValueError, match="are averaged with weights or a floor"):
        GaussianMechanism.calibrated(sampling, clipping, 1.0, (1.0,), averaging)
    with pytest.raises(InvalidValueError, match="could overflow"):
        GaussianMechanism.calibrated(
            ExampleSampling(MOST_USERS, 0.5, 2), Clipping(layout, flat(layout, 1.0)), 1.0, (1.0,)
        )


FILE = """
name = "test"
rounds = 2
data = { name = "digits", options = { users = 40 } }
model = { name = "softmax", options = { inputs = 64, classes = 10 } }
clipping.norm = 0.5

[sampling]
policy = "poisson-examples"
options = { examples_per_user = 20 }

[privacy]
sampling_probability = 0.02
epsilon = 4.0
delta = 1e-3
"""


def test_a_file_names_the_policy_and_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    told = printed("simulate", tmp_path / "a.toml", "--out", tmp_path / "run")
    assert "user-level (ε, δ)" in told
    plan = tmp_path / "run" / "plan.toml"
    assert "examples_per_user = 20" in plan.read_text()
    told = printed("simulate", plan, "--set", "run=again", "--out", tmp_path / "again")
    assert "up to 20 examples of each of N = 40 users" in " ".join(told.split())
    planned = printed("plan", tmp_path / "a.toml")
    assert "expected cohort 16" in planned
    assert "how far one example moves" in planned


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["sampling.options={}"], "no value for option 'examples_per_user'|examples_per_user"),
        (["sampling.options.examples_per_user=0"], "examples_per_user is 0"),
        (["sampling.options.total_examples='a'"], "total_examples is 'a'"),
        (
            ["averaging.floor=0.5"],
            "are averaged with weights or a floor; if examples are drawn",
        ),
        (["sampling.options.total_examples=900"], "total_examples is 900"),
        (["privacy.unit=example"], "unit is 'example'"),
        (
            ["local={learning_rate=1.0,epochs=2}"],
            "local is given and sampling.policy is 'poisson-examples'; that must be 'poisson'",
        ),
        (
            ["averaging={cap=5,total_weight=9.0}"],
            "averaging.cap is given and sampling.policy is 'poisson-examples'",
        ),
        (
            ["federated_evaluation={every=1,report={accuracy={}},noise_multiplier=9.0}"],
            "federated_evaluation is given and sampling.policy is 'poisson-examples'; that must be "
            "'poisson'",
        ),
        (
            ["personalisation={local={learning_rate=1.0}}"],
            "personalisation is given and sampling.policy is 'poisson-examples'",
        ),
        (["privacy.accountant=rdp"], "rdp accountant has no analysis of poisson-examples"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    assignments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    given = [part for each in assignments for part in ("--set", each)]
    assert re.search(message, refused("simulate", tmp_path / "a.toml", *given))
    assert {path.name for path in tmp_path.iterdir()} == {"a.toml"}


def test_nodes_have_whole_users_alone(tmp_path: Path) -> None:
    change = [
        "sampling={policy='poisson-examples',options={examples_per_user=4}}",
        "local={learning_rate=1.0,steps=1}",
    ]
    setup = RunSetup.at(
        load_config(SIMULATIONS / "federation.toml", change), tmp_path / "run", resume=False
    )
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match="is 'poisson-examples'"):
        setup.on_nodes(setup.config.federation, "people", ["a", "b"])


def test_nodes_and_workers_have_whole_users_whatever_the_policy_is_called(tmp_path: Path) -> None:
    policy = "fedpriv.experiment.mechanism:PoissonExamples"
    change = [f"sampling={{policy='{policy}',options={{examples_per_user=4}}}}"]
    file = SIMULATIONS / "federation.toml"
    setup = RunSetup.at(load_config(file, change), tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match=f"'{policy}' draws examples of users; on nodes it"):
        setup.on_nodes(setup.config.federation, "people", [*map(str, range(30))])
    setup = RunSetup.at(
        load_config(experiment_file(Path("digits")), change), tmp_path / "run", resume=False
    )
    with pytest.raises(InvalidValueError, match=f"'{policy}' draws examples of users; on workers"):
        GridSimulation.of(setup, 2)
    assert list(tmp_path.iterdir()) == []


def test_python_refuses_what_a_file_does(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"local is given and sampling\.policy"):
        run(population(), private(), tmp_path / "a", local=fedpriv.SGD(1.0, epochs=2))
    with pytest.raises(InvalidValueError, match=r"total_examples is 5\.0"):
        fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0), total_examples=5.0)
    assert not (tmp_path / "a").exists()


def test_a_run_is_resumed_with_its_number_of_examples_alone(tmp_path: Path) -> None:
    people, out = population(), tmp_path / "run"
    mechanism = private()
    run(people, mechanism, out)
    (out / "checkpoints" / f"round-{ROUNDS:06d}.safetensors").unlink()
    again: Run = run(people, mechanism, out, resume=True)
    assert len(again.rounds) == ROUNDS - 1  # as the budget does not pay for the last one again
    more = replace(mechanism, sampling=fedpriv.PoissonExamples(0.3, K + 1))
    with pytest.raises(InvalidValueError, match="can only be resumed with the plan"):
        run(people, more, out, resume=True)


def test_a_study_compares_users_with_their_examples_at_one_epsilon(tmp_path: Path) -> None:
    whole = fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(NORM))
    whole = whole.calibrate(epsilon=4.0, delta=1e-3, rounds=ROUNDS)
    arms = {"users": {"local": fedpriv.SGD(0.1, epochs=1)}, "examples": {"mechanism": private()}}
    study = fedpriv.compare(
        population(), task(), whole, arms, seeds=1, out=tmp_path / "study", quiet=True
    )
    assert [0.0 < arm.epsilon <= 4.0 for arm in study.arms] == [True, True]
    assert read_study(study.folder).study.unit == "user"
