"""Federated evaluation: users measure released models on what was kept from training."""

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedpriv
from fedpriv.analytics import Survey
from fedpriv.analytics.survey import collect
from fedpriv.data.population import UserStore
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.evaluation.federated import UserEvaluation, kept_apart, questions_about
from fedpriv.ledger.ledger import Ledger
from fedpriv.measures.metrics import metric
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.report.run_page import _epsilon_note
from fedpriv.run.folder import read_run
from fedpriv.run.run import Run, RunSetup
from fedpriv.support.checks import epsilon_up
from fedpriv.training.rounds import Stop
from tests.commandline import printed, refused

FILE = Path(__file__).parents[2] / "fedpriv/experiment/bundled/digits.toml"
# Of users: ordinary, without rows, with NaN, an illegal label, and enormous numbers.
SIZES = [4, 1, 0, 3, 2, 5, 6]
NAN, ILLEGAL, HUGE = 3, 4, 5
METRICS = (
    metric("accuracy"),
    metric("loss", bound=3.0),
    metric("label-counts", classes=3, bound=2),
)


def store() -> UserStore:
    rng, rows = np.random.default_rng(0), sum(SIZES)
    users = UserStore(
        {"x": rng.normal(size=(rows, 5)).astype(np.float32), "y": rng.integers(0, 3, rows)},
        np.cumsum([0, *SIZES]),
    )
    users.fields["x"][users.rows_of(NAN)] = np.nan
    users.fields["y"][users.rows_of(ILLEGAL)] = 99
    users.fields["x"][users.rows_of(HUGE)] *= 1e30
    return users


def task() -> fedpriv.Task:
    torch.manual_seed(0)
    return fedpriv.Task(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)))


def survey(users: UserStore) -> Survey:
    sampling = PoissonSampling(users.population, 1.0)
    made = task()
    return Survey(
        "run-evaluation", questions_about(made, made.parameters(), METRICS), sampling, 0.0
    )


def slowly(users: UserStore, user: int) -> list[np.ndarray]:
    """What one user adds to the sums: one example after the other, in double precision."""
    fields, zeros = users.examples_of(user), [np.zeros(1), np.zeros(1), np.zeros(3)]
    model = task().model.eval()
    if not len(fields["x"]):
        return zeros
    hits, losses, counts = [], [], np.zeros(3)
    for x, y in zip(torch.tensor(fields["x"]), fields["y"].tolist(), strict=True):
        scores = model(x[None])[0].detach()
        if not 0 <= y < 3:  # its loss raises
            return zeros
        hits.append(float(scores.argmax() == y and not scores.isnan().any()))
        losses.append(float(nn.functional.cross_entropy(scores, torch.tensor(y))))
        counts[y] += 1.0
    mean = np.mean(losses)
    loss = 3.0 if not math.isfinite(mean) else min(mean, 3.0)
    length = np.linalg.norm(counts)
    return [
        np.array([np.mean(hits) - 0.5]),
        np.array([loss - 1.5]),
        counts * min(1.0, 2.0 / length),
    ]


def test_answers_are_means_of_what_users_measure() -> None:
    users = store()
    made = survey(users)
    (partial,) = collect(made, users, np.arange(users.population))
    clipping = made.mechanism.clipping
    found = clipping.layout.unflatten(clipping.in_units(partial.total))
    expected = [
        sum(each) for each in zip(*(slowly(users, u) for u in range(len(SIZES))), strict=True)
    ]
    for name, total in zip(found, expected, strict=True):
        np.testing.assert_allclose(found[name], total, atol=1e-5)
    average = clipping.in_units(partial.total) / len(SIZES)
    accuracy, loss, counts = made.answers(average)
    assert accuracy.question == "evaluation/accuracy"
    assert accuracy.value == pytest.approx(0.5 + expected[0][0] / len(SIZES), abs=1e-5)
    assert loss.value == pytest.approx(1.5 + expected[1][0] / len(SIZES), abs=1e-5)
    assert counts.value.shape == (3,)


@pytest.mark.parametrize("user", range(len(SIZES)))
def test_one_user_more_moves_each_sum_by_at_most_the_radius(user: int) -> None:
    users = store()
    others = np.delete(np.arange(len(SIZES)), user)
    without, made = users.subset(others), survey(users)
    (all_of_them,) = collect(made, users, np.arange(users.population))
    (neighbours,) = collect(survey(without), without, np.arange(len(others)))
    (alone,) = collect(made, users, np.array([user]))
    # In whole steps: the user adds its own and changes nothing else.
    moved = all_of_them.total - neighbours.total
    np.testing.assert_array_equal(moved, alone.total)
    clipping = made.mechanism.clipping
    for group, one in zip(clipping.groups, METRICS, strict=True):
        (span,) = clipping.spans[group.name]
        assert int(np.sum(moved[span] ** 2)) <= group.squared_bound
        assert group.clipping_norm == one.radius
    assert made.event.queries[0].clipping_norm == 0.5


class Drawing(nn.Linear):
    """Drops inputs in evaluation too, as for predictions by Monte Carlo."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, training=True))


def test_what_one_user_draws_changes_nobody_elses_masks() -> None:
    users, made = store(), fedpriv.Task(Drawing(5, 3))
    questions = questions_about(made, made.parameters(), METRICS)
    asked = Survey("run-evaluation", questions, PoissonSampling(users.population, 1.0), 0.0)
    everyone, before = np.arange(users.population), torch.random.get_rng_state()
    (together,) = collect(asked, users, everyone)
    alone = [next(collect(asked, users, everyone[[user]])).total for user in everyone]
    np.testing.assert_array_equal(together.total, sum(alone))
    assert torch.equal(torch.random.get_rng_state(), before)


class Widening(nn.Linear):
    """Divides by the largest input so far, in a buffer or another attribute."""

    largest: torch.Tensor | float

    def __init__(self, where: str) -> None:
        super().__init__(5, 3)
        if where == "buffer":
            self.register_buffer("largest", torch.full((), 10.0))
        else:
            self.largest = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.detach().abs().max()
        if isinstance(self.largest, torch.Tensor):
            self.largest.copy_(torch.maximum(self.largest, most))
        elif not self.training:
            self.largest = max(self.largest, float(most))
        return super().forward(x / self.largest)


@pytest.mark.parametrize("where", ["buffer", "attribute"])
def test_what_a_model_keeps_of_one_user_moves_nobody_elses_answer(where: str) -> None:
    users, made = store(), fedpriv.Task(Widening(where))
    questions = questions_about(made, made.parameters(), METRICS)
    asked = Survey("run-evaluation", questions, PoissonSampling(users.population, 1.0), 0.0)
    everyone = np.arange(users.population)
    for _ in range(2):
        alone = [next(collect(asked, users, everyone[[user]])).total for user in everyone[::-1]]
        (together,) = collect(asked, users, everyone)
        np.testing.assert_array_equal(together.total, sum(alone))


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8), share=st.floats(0.0, 0.99))
def test_each_row_is_trained_on_or_kept(sizes: list[int], share: float) -> None:
    rows = np.arange(sum(sizes))
    users = UserStore({"x": rows}, np.cumsum([0, *sizes]), [f"u{k}" for k in range(len(sizes))])
    trained, kept = kept_apart(users, share)
    for user, size in enumerate(sizes):
        own = users.examples_of(user)["x"].tolist()
        parts = [part.examples_of(user)["x"].tolist() for part in (trained, kept)]
        if share == 0.0:
            assert parts == [own, own]
            continue
        assert sorted(parts[0] + parts[1]) == own
        assert len(parts[1]) == math.floor(size * share)
        slow = [r for j, r in enumerate(own) if math.floor((j + 1) * share) > math.floor(j * share)]
        assert parts[1] == slow
        assert trained.id_of(user) == kept.id_of(user) == f"u{user}"


def population() -> fedpriv.Population:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 5)).astype(np.float32), rng.integers(0, 3, 100)
    return fedpriv.Population.from_arrays(x, y, np.repeat(np.arange(20), 5), held_out=(x, y))


ASKED = fedpriv.FederatedEvaluation(
    noise_multiplier=8.0, report={"accuracy": {}, "loss": {"bound": 3.0}}, every=2, held_out=0.4
)


def run(folder: Path, evaluation: fedpriv.FederatedEvaluation | None, **others: object) -> Run:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=4.0, delta=1e-2, rounds=5)
    given = {"mechanism": mechanism, "seed": 1, "out": folder, "quiet": True}
    return fedpriv.simulate(
        population(),
        task(),
        local=fedpriv.SGD(0.1, epochs=1),
        federated_evaluation=evaluation,
        **{**given, **others},
    )


def charged(folder: Path) -> list[tuple[str, int]]:
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        return [(charge.run, charge.round) for charge in ledger.charges()]


def test_queries_are_charged_beside_the_rounds_within_one_budget(tmp_path: Path) -> None:
    plain, asked = run(tmp_path / "plain", None), run(tmp_path / "asked", ASKED)
    of_run, of_users = "run-seed1", "run-seed1-evaluation"
    assert charged(tmp_path / "asked") == [
        *((of_run, number) for number in (1, 2)),
        (of_users, 2),
        *((of_run, number) for number in (3, 4)),
        (of_users, 4),
        (of_run, 5),
        (of_users, 5),
    ]
    for result in asked.rounds:
        names = {"evaluation/accuracy", "evaluation/loss"} if result.round in (2, 4, 5) else set()
        assert set(result.metrics) == {"contributors"} | names
        if names:
            # Of 20 users, all of whom are asked: 8·√2·radius/20.
            noise = result.metrics_noise_stddev
            assert noise["evaluation/accuracy"] == pytest.approx(8 * math.sqrt(2) * 0.5 / 20)
            assert noise["evaluation/loss"] == pytest.approx(8 * math.sqrt(2) * 1.5 / 20)
    with Ledger.open(tmp_path / "asked" / "ledger.sqlite") as ledger:
        assert asked.epsilon == fedpriv.epsilon(ledger.spent(), 1e-2).epsilon
    # What the queries cost, the rounds cannot spend.
    assert 3.9 < asked.epsilon <= 4.0
    noise = [each.rounds[0].metrics_noise_stddev["contributors"] for each in (plain, asked)]
    assert noise[1] > noise[0]
    assert asked.report().read_text().startswith("<!DOCTYPE html>")


def test_what_a_run_alone_costs_counts_what_its_users_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger.sqlite"
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    shared = {"ledger": ledger, "quiet": False, "rounds": 2}
    shared |= {"mechanism": mechanism.with_noise(4.0, epsilon=4.0, delta=1e-2)}
    asked = fedpriv.FederatedEvaluation(noise_multiplier=3.0, every=1, held_out=0.4)
    alone = run(tmp_path / "asked", asked, **shared, name="asked")
    # Nothing else is in the ledger yet: what the run alone costs goes without saying.
    said = [capsys.readouterr().out, _epsilon_note(read_run(alone.folder))]
    assert not any("this run alone" in each for each in said)
    run(tmp_path / "other", None, **shared, name="other")
    capsys.readouterr()
    again = run(tmp_path / "asked", asked, **shared, name="asked", resume=True)
    said = [capsys.readouterr().out, _epsilon_note(read_run(again.folder))]
    with Ledger.open(ledger) as opened:
        charges = [(charge.run, charge.event) for charge in opened.charges()]
    own = [event for name, event in charges if name in ("asked-seed1", "asked-seed1-evaluation")]
    assert (len(own), len(charges)) == (4, 6)
    cost = epsilon_up(fedpriv.epsilon(own, 1e-2).epsilon)
    for each in said:
        (found,) = re.findall(r"this run alone[^0-9]*([0-9.]+)", each)
        assert found == cost
    assert "2 of 2, 4 charged" in said[0]


def test_a_run_that_is_resumed_repeats_and_pays_for_nothing_more(tmp_path: Path) -> None:
    whole = run(tmp_path / "run", ASKED)
    again = run(tmp_path / "run", ASKED, resume=True)
    assert again.rounds == whole.rounds
    assert len(charged(tmp_path / "run")) == 8
    for changed in ({"held_out": 0.2}, {"noise_multiplier": 4.0}):
        with pytest.raises(InvalidValueError, match="only be resumed with the plan it began with"):
            run(tmp_path / "run", replace(ASKED, **changed), resume=True)


def test_once_means_after_the_last_round(tmp_path: Path) -> None:
    once = fedpriv.FederatedEvaluation(noise_multiplier=8.0, held_out=0.4)
    whole = run(tmp_path / "whole", once)
    asked = [each.round for each in whole.rounds if "evaluation/accuracy" in each.metrics]
    assert asked == [5]


def test_a_query_beyond_the_budget_is_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.with_noise(2.0, epsilon=2.0, delta=1e-2)
    greedy = fedpriv.FederatedEvaluation(noise_multiplier=2.5, every=1, held_out=0.4)
    with caplog.at_level(logging.WARNING):
        found = run(tmp_path / "run", greedy, mechanism=mechanism, rounds=50)
    assert found.stop is Stop.BUDGET
    assert found.epsilon <= 2.0
    assert "the model is not evaluated: run run-seed1-evaluation, round" in caplog.text
    assert "evaluation/accuracy" not in found.rounds[-1].metrics


def test_users_do_not_train_on_what_is_kept() -> None:
    table = {"noise_multiplier": 8.0, "held_out": 0.4}
    config = fedpriv.experiment.config.load_config(
        FILE, [f"federated_evaluation={{{_inline(table)}}}"]
    )
    experiment, transport = fedpriv.experiment.build.simulated(config, "run")
    evaluation = experiment.evaluation
    assert isinstance(evaluation, UserEvaluation)
    everything = fedpriv.data.load_digits(users=287).users
    for user in range(287):
        trained, kept = (s.examples_of(user)["x"] for s in (transport.users, evaluation.users))
        own = everything.examples_of(user)["x"]
        assert (len(trained), len(kept)) == (len(own) - int(len(own) * 0.4), int(len(own) * 0.4))
        both = sorted(row.tobytes() for row in [*trained, *kept])
        assert both == sorted(row.tobytes() for row in own)


def _inline(table: dict[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in table.items())


def test_a_file_asks_for_it(tmp_path: Path) -> None:
    given = [
        *(
            "--set",
            "federated_evaluation={noise_multiplier=10.0, every=2, report={loss={bound=3}}}",
        ),
        *("--set", "rounds=3", "--set", "seed=1"),
    ]
    assert "3 rounds and the evaluation cost" in printed("plan", FILE, *given)
    text = printed("simulate", FILE, *given, "--out", tmp_path / "run")
    assert "users' evaluation of the model" in text
    assert len(charged(tmp_path / "run")) == 5


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ["{noise_multiplier=0.0}"],
            "noise_multiplier is 0.0",
        ),
        (
            ["{noise_multiplier=5.0, held_out=1.0}"],
            "held_out is 1.0",
        ),
        (["{noise_multiplier=5.0, report={}}"], "names no metric"),
        (
            ["{noise_multiplier=5.0, report={acuracy={}}}"],
            "did you mean 'accuracy'",
        ),
        (
            ["{noise_multiplier=5.0, report={'update-norms:update'={thresholds=[1]}}}"],
            "metric 'update-norms:update' is of updates",
        ),
        (
            ["{noise_multiplier=0.5}"],
            "without a round; privacy.epsilon is 2.0 and must",
        ),
        (
            ["{noise_multiplier=5.0}", "privacy.unit=example"],
            "federated_evaluation is given and privacy.unit is 'example'",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(
    assignments: list[str], message: str, tmp_path: Path
) -> None:
    section, *others = assignments
    settings = (f"federated_evaluation={section}", *others)
    given = [part for each in settings for part in ("--set", each)]
    assert message in refused("simulate", FILE, *given, "--out", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_metric_that_fails_is_found_on_public_rows(tmp_path: Path) -> None:
    def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("of no use")

    own = fedpriv.Task(nn.Linear(5, 3), metrics={"mine": failing})
    asked = fedpriv.FederatedEvaluation(noise_multiplier=8.0, report={"mine": {"radius": 1.0}})
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    with pytest.raises(ModelError, match="metric 'mine' of federated_evaluation cannot be"):
        fedpriv.simulate(
            population(),
            own,
            mechanism.calibrate(epsilon=4.0, delta=1e-2, rounds=2),
            local=fedpriv.SGD(0.1, epochs=1),
            federated_evaluation=asked,
            out=tmp_path / "run",
        )
    assert list(tmp_path.iterdir()) == []


class OfNumbers(nn.Linear):
    """Its class remembers the largest input of all."""

    most = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            OfNumbers.most = max(self.most, float(x.detach().abs().max()))
        return super().forward(x / self.most)


class OfWords(nn.EmbeddingBag):
    """The same of words."""

    most = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            OfWords.most = max(self.most, int(x.max()))
        return super().forward(x) * self.most


@pytest.mark.parametrize("words", [False, True], ids=["numbers", "words"])
def test_a_model_that_remembers_users_beyond_itself_is_refused(
    words: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = OfWords(9, 3) if words else OfNumbers(5, 3)
    monkeypatch.setattr(type(model), "most", model.most)
    task = fedpriv.Task(model)
    y = np.arange(60) % 3
    x = np.tile(np.arange(5), (60, 1)) if words else np.ones((60, 5), np.float32)
    people = fedpriv.Population.from_arrays(x, y, np.arange(60) % 20, held_out=(x, y))
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    with pytest.raises(ModelError, match="gives the same user another value after others"):
        fedpriv.simulate(
            people,
            task,
            mechanism.calibrate(epsilon=4.0, delta=1e-2, rounds=2),
            local=fedpriv.SGD(0.1, epochs=1),
            federated_evaluation=fedpriv.FederatedEvaluation(8.0, {"loss": {"bound": 9.0}}),
            out=tmp_path / "run",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["on nodes", "on workers"])
def test_it_does_not_reach_nodes(where: str, tmp_path: Path) -> None:
    config = fedpriv.experiment.config.load_config(
        FILE, ["federated_evaluation={noise_multiplier=5.0}"]
    )
    setup = RunSetup.at(config, tmp_path / "run", resume=False)
    with pytest.raises(InvalidValueError, match=f"evaluation is given; {where} it must be"):
        setup.refuse_true_figures(where)


def test_the_same_seed_gives_the_same_answers(tmp_path: Path) -> None:
    one, other = (run(tmp_path / name, ASKED) for name in ("one", "other"))
    assert [r.metrics for r in one.rounds] == [r.metrics for r in other.rounds]
    keys = {SeededEntropy(1).key(f"noise/{name}/2/0") for name in ("run", "run-evaluation")}
    assert len(keys) == 2
