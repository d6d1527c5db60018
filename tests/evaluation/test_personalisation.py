"""Personal models: users make released models their own, and send nothing of them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import fedpriv
from fedpriv.analytics.survey import collect
from fedpriv.data.population import HELD_OUT_USER, UserStore
from fedpriv.engine.task import Task
from fedpriv.engine.task_checks import check_task
from fedpriv.errors import FedprivError, InvalidValueError, ModelError
from fedpriv.evaluation.federated import UserEvaluation
from fedpriv.evaluation.held_out import evaluate
from fedpriv.evaluation.personalisation import HeldOutUsers, Personalisation
from fedpriv.experiment.build import Method, on_population, settings_of
from fedpriv.experiment.models import build_model
from fedpriv.measures.metrics import metric
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.run import Run
from fedpriv.run.tune import _scorer
from fedpriv.training.local import SGD, AdamW, FedRecon, Scaffold
from fedpriv.training.request import LocalStep, LocalTraining
from tests.commandline import printed, refused

CPU = torch.device("cpu")
SIZES = [4, 1, 0, 9, 2, 6]
HOW = Personalisation(SGD(0.2, steps=5))


def network(*, own: tuple[str, ...] = ()) -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), personal=own)


def store() -> UserStore:
    rng, rows = np.random.default_rng(0), sum(SIZES)
    x, y = rng.normal(size=(rows, 5)).astype(np.float32), rng.integers(0, 3, rows)
    return UserStore({"x": x, "y": y}, np.cumsum([0, *SIZES]), [f"u{k}" for k in range(6)])


def released(task: Task) -> dict[str, np.ndarray]:
    """Parameters that are not those which the model has."""
    rng = np.random.default_rng(1)
    return {
        name: (p + 0.3 * rng.standard_normal(p.shape)).astype(np.float32)
        for name, p in task.parameters().items()
    }


def slowly(
    task: Task,
    model: Mapping[str, np.ndarray],
    fields: Mapping[str, np.ndarray],
    trained: set[str],
    rate: float = 0.2,
    steps: int = 5,
) -> nn.Module:
    """One user's model, by torch alone."""
    own = copy.deepcopy(task.model)
    own.load_state_dict({name: torch.tensor(p) for name, p in model.items()}, strict=False)
    moved = [p for name, p in own.named_parameters() if name in trained]
    optimizer = torch.optim.SGD(moved, lr=rate)
    x, y = torch.from_numpy(fields["x"]), torch.from_numpy(fields["y"])
    for _ in range(steps if len(x) else 0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(own(x), y).backward()
        optimizer.step()
    return own


@pytest.mark.parametrize(
    ("named", "own", "trained"),
    [
        ((), (), {"0.weight", "0.bias", "2.weight", "2.bias"}),
        ((), ("2.*",), {"2.weight", "2.bias"}),
        (("2.bias",), (), {"2.bias"}),
        (("0.*", "2.weight"), ("2.*",), {"0.weight", "0.bias", "2.weight"}),
    ],
)
def test_each_user_trains_what_is_named_from_what_was_released(
    named: tuple[str, ...], own: tuple[str, ...], trained: set[str]
) -> None:
    task, users = network(own=own), store()
    model = released(task)
    found = replace(HOW, parameters=named).models(task, model, users)
    assert list(found) == ["u0", "u1", "u2", "u3", "u4", "u5"]
    for user, tensors in enumerate(found.values()):
        assert set(tensors) == trained
        expected = slowly(task, model, users.examples_of(user), trained).state_dict()
        for name, tensor in tensors.items():
            np.testing.assert_allclose(tensor, expected[name].numpy(), atol=1e-5)


def test_what_a_user_makes_depends_on_its_own_examples_alone() -> None:
    task, users = network(), store()
    model, others = released(task), store()
    others.fields["x"][: users.offsets[3]] = np.nan
    others.fields["x"][users.offsets[4] :] *= 1e30
    found, beside = (HOW.models(task, model, each)["u3"] for each in (users, others))
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, beside[name])


def held_out(users: UserStore) -> dict[str, np.ndarray]:
    """Rows of held-out users, in any order."""
    order = np.random.default_rng(2).permutation(users.rows)
    ids = np.repeat([f"h{k}" for k in range(users.population)], users.sizes)
    return {name: column[order] for name, column in {**users.fields, HELD_OUT_USER: ids}.items()}


def test_a_user_whose_label_is_no_class_keeps_the_model_and_costs_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task, users, how = network(), store(), Personalisation(SGD(0.5, steps=3))
    model = released(task)
    expected = how.models(task, model, users)
    users.fields["y"][users.rows_of(1)] = 77
    found = how.models(task, model, users)
    for number, name in enumerate(expected):
        kept = model if number == 1 else expected[name]
        for tensor, own in found[name].items():
            np.testing.assert_array_equal(own, kept[tensor])
    assert caplog.messages == ["a user keeps the model: training raised IndexError"]


@pytest.mark.parametrize("own", [(), ("2.*",)])
def test_held_out_users_measure_what_they_did_not_train_on(own: tuple[str, ...]) -> None:
    task = network(own=own)
    rows, model = held_out(store()), released(task)
    found = HeldOutUsers(replace(HOW, share=0.4), task, rows, CPU).evaluate(model)
    hits, by_user = [], []
    trained = {"2.weight", "2.bias"} if own else set(task.parameters())
    for user in np.unique(rows[HELD_OUT_USER]):
        of_user = {n: rows[n][rows[HELD_OUT_USER] == user] for n in ("x", "y")}
        size = len(of_user["x"])
        first = [j for j in range(size) if int((j + 1) * 0.4) > int(j * 0.4)]
        rest = [j for j in range(size) if j not in first]
        mine = slowly(task, model, {n: c[first] for n, c in of_user.items()}, trained)
        right = mine(torch.from_numpy(of_user["x"][rest])).argmax(1).numpy() == of_user["y"][rest]
        hits.extend(right)
        by_user.append(right.mean())
    assert found.accuracy == pytest.approx(np.mean(hits))
    spread = found.held_out_users["accuracy"]
    assert spread["users"] == len(by_user) == 5
    assert spread["mean"] == pytest.approx(np.mean(by_user))
    assert found.accuracy != evaluate(task, rows, CPU, model).accuracy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(HOW, share=0.0), "share of personalisation is 0.0"),
        (lambda: replace(HOW, share=1.0), "share of personalisation is 1.0"),
        (
            lambda: Personalisation(Scaffold(0.1, steps=2, control_norm=1.0)),
            "personalisation.local is Scaffold",
        ),
        (
            lambda: Personalisation(FedRecon(0.1, steps=2, personal_steps=1, personal_rate=0.1)),
            "personalisation.local is FedRecon",
        ),
        (
            lambda: Personalisation(SGD(fedpriv.PolynomialDecay(0.1, 0.0, rounds=2), steps=2)),
            "a step needs a number",
        ),
        (lambda: network(own=("3.*",)), "'3.\\*' matches no trainable parameter"),
        (lambda: network(own=("*",)), "personal names all parameters of the model"),
        (
            lambda: HeldOutUsers(HOW, network(), store().fields, CPU),
            "held-out rows have no users",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make: object, message: str) -> None:
    with pytest.raises(FedprivError, match=message):
        make()  # type: ignore[operator]


def test_held_out_users_whose_models_diverge_are_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match=r"personal models is (nan|inf) from the start"):
        HeldOutUsers(Personalisation(SGD(1e38, steps=9)), network(), held_out(store()), CPU)


def test_a_search_scores_personal_models_or_refuses(tmp_path: Path) -> None:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.5))
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-2, rounds=2)
    with pytest.raises(
        InvalidValueError, match="so nothing would be measured; personalisation must"
    ):
        fedpriv.tune(
            people(), network(own=("2.*",)), mechanism, on="public", out=tmp_path, quiet=True
        )
    how, task = Personalisation(SGD(1.0, steps=10)), network(own=("2.*",))
    method = Method(task, mechanism, SGD(0.1, epochs=1), fedpriv.FedAvg(), how)
    config = settings_of("run", people(), method)
    experiment, _ = on_population(config, "run", people(), method=method)
    expected = HeldOutUsers(how, task, people().test, CPU).evaluate(task.parameters())
    assert _scorer("accuracy", experiment)(experiment.initial_state) == expected.accuracy


def test_a_task_sends_what_is_not_personal() -> None:
    task = network(own=("2.*",))
    assert list(task.parameters()) == ["0.weight", "0.bias"]
    assert {*task.trainable()} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {*task.constants(CPU)} == {"2.weight", "2.bias"}
    assert task.evaluated().personal == task.personal == ("2.weight", "2.bias")
    check_task(task, {name: column[:4] for name, column in store().fields.items()})


def people(users: int = 40) -> fedpriv.Population:
    """Users who call the same thing by different names: class (k + user) mod 3."""
    rng = np.random.default_rng(3)
    centres = 2.0 * rng.normal(size=(3, 5))

    def rows(count: int, each: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        owner, kind = np.repeat(np.arange(count), each), rng.integers(0, 3, count * each)
        x = (centres[kind] + rng.normal(size=(count * each, 5))).astype(np.float32)
        return x, (kind + owner) % 3, owner

    x, y, owner = rows(users, 12)
    xt, yt, held = rows(15, 12)
    return fedpriv.Population.from_arrays(
        x, y, owner, held_out=(xt, yt), held_out_users=held + 1000
    )


def simulated(folder: Path, task: Task, local: fedpriv.SGD | FedRecon, **others: object) -> Run:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.5))
    mechanism = mechanism.calibrate(epsilon=100.0, delta=1e-2, rounds=8)
    return fedpriv.simulate(
        people(),
        task,
        mechanism,
        local=local,
        server=fedpriv.FedAvg(),
        out=folder / "run",
        seed=0,
        evaluate_every=8,
        quiet=True,
        **others,
    )


def test_fine_tuned_models_are_measured_beside_the_released_one(tmp_path: Path) -> None:
    how = Personalisation(SGD(1.0, steps=10))
    run = simulated(tmp_path, network(), SGD(0.3, epochs=2), personalisation=how)
    # What one user calls 0, the next calls 1: no model is right about all.
    assert run.accuracy < 0.5
    assert run.figures["personalised_accuracy"] > 0.75
    assert run.figures["personalised_loss"] < run.loss
    spread = run.held_out_users
    assert spread["personalised_accuracy"]["q10"] > spread["accuracy"]["q10"]
    # Both are of the rows on which nobody trained.
    data = people().test
    measured = HeldOutUsers(how, run.task, data, CPU)
    assert len(measured.rows["y"]) == len(data["y"]) // 2
    assert run.accuracy == evaluate(run.task, measured.rows, CPU, run.state.model).accuracy
    assert run.figures["personalised_accuracy"] == measured.evaluate(run.state.model).accuracy
    assert run.rounds[-1].figures == run.figures
    # The plan in its folder says how.
    assert "[personalisation.local]" in (tmp_path / "run" / "plan.toml").read_text()
    other = {"personalisation": replace(how, share=0.4), "resume": True}
    with pytest.raises(InvalidValueError, match=r"\.share is 0\.4, was 0\.5; a run can"):
        simulated(tmp_path, network(), SGD(0.3, epochs=2), **other)


@dataclass(frozen=True)
class InTurn(LocalTraining):
    """With a factor for each step, which no table holds."""

    factors: tuple[float, ...] = (0.0,)

    def direction(self, step: LocalStep) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return step.gradient * self.factors[step.number % len(self.factors)], ()


def test_users_train_as_the_value_says_and_not_as_its_table(tmp_path: Path) -> None:
    how = Personalisation(InTurn(1.0, steps=10, factors=(1.0, 0.5)))
    given = {"personalisation": how, "federated_evaluation": EVALUATION}
    run = simulated(tmp_path, network(), SGD(0.3, epochs=2), **given)
    measured = HeldOutUsers(how, run.task, people().test, CPU)
    assert run.figures["personalised_accuracy"] == measured.evaluate(run.state.model).accuracy
    # By the table's, with a factor of 0, nobody would have made anything of the model.
    assert run.figures["personalised_accuracy"] > run.accuracy + 0.2
    assert run.rounds[-1].metrics["evaluation/accuracy"] > run.accuracy + 0.2


def test_with_personal_parameters_the_figures_are_those_of_personal_models(tmp_path: Path) -> None:
    task, how = network(own=("2.*",)), Personalisation(SGD(1.0, steps=10))
    recon = FedRecon(0.3, steps=6, personal_steps=3, personal_rate=0.5)
    run = simulated(tmp_path, task, recon, personalisation=how)
    assert set(run.state.parameters) == {"0.weight", "0.bias"}
    assert run.accuracy > 0.75
    assert run.figures == {}
    assert run.held_out_users["accuracy"]["users"] == 15


def test_untrained_personal_parameters_are_not_evaluated(tmp_path: Path) -> None:
    recon = FedRecon(0.3, steps=2, personal_steps=1, personal_rate=0.5)
    run = simulated(tmp_path, network(own=("2.*",)), recon)
    assert (run.accuracy, run.loss, run.held_out_users) == (None, None, {})


EVALUATION = fedpriv.FederatedEvaluation(noise_multiplier=0.5, held_out=0.5)


def test_users_are_asked_of_what_they_have_made_of_the_model(tmp_path: Path) -> None:
    how = Personalisation(SGD(1.0, steps=10))
    kept = {"federated_evaluation": EVALUATION}
    plain = simulated(tmp_path / "plain", network(), SGD(0.3, epochs=2), **kept)
    run = simulated(tmp_path, network(), SGD(0.3, epochs=2), personalisation=how, **kept)
    # The same users train on the same rows, and what is released does not depend on the question.
    for name, tensor in plain.state.model.items():
        np.testing.assert_array_equal(tensor, run.state.model[name])
    asked, before = (each.rounds[-1].scalar_metrics["evaluation/accuracy"] for each in (run, plain))
    assert before < 0.5
    users, hits = people().users, []
    model = run.state.model
    for user in range(users.population):
        own = users.examples_of(user)
        kept_rows = np.arange(12) % 2 == 1  # every other row
        mine = slowly(
            run.task,
            model,
            {n: c[~kept_rows] for n, c in own.items()},
            set(run.task.parameters()),
            rate=1.0,
            steps=10,
        )
        scores = mine(torch.from_numpy(own["x"][kept_rows]))
        hits.append((scores.argmax(1).numpy() == own["y"][kept_rows]).mean())
    # The noise has standard deviation 0.5 · 0.5 / 40.
    assert asked == pytest.approx(np.mean(hits), abs=0.03)
    assert plain.epsilon == run.epsilon


def test_one_user_more_adds_what_it_measures_alone_within_the_radius() -> None:
    users, task = store(), network()
    users.fields["x"][users.rows_of(4)] = np.nan
    users.fields["y"][users.rows_of(5)] = 99  # training raises
    sampling = PoissonSampling(users.population, 1.0)
    asked = fedpriv.FederatedEvaluation(noise_multiplier=1.0, held_out=0.5)
    metrics = (metric("accuracy"), metric("loss", bound=3.0))
    evaluation = UserEvaluation(asked, "run", users, task, metrics, HOW)
    survey = replace(evaluation.survey(1, released(task)), sampling=sampling)
    everyone = np.arange(users.population)
    (whole,) = collect(survey, users, everyone)
    clipping = survey.mechanism.clipping
    for user in everyone:
        (others,) = collect(survey, users, np.delete(everyone, user))
        (alone,) = collect(survey, users, everyone[[user]])
        moved = whole.total - others.total
        np.testing.assert_array_equal(moved, alone.total)
        for group, one in zip(clipping.groups, metrics, strict=True):
            (span,) = clipping.spans[group.name]
            assert int(np.sum(moved[span] ** 2)) <= group.squared_bound
            assert group.clipping_norm == one.radius


@pytest.mark.parametrize(
    ("task", "local", "others", "message"),
    [
        (
            network(),
            FedRecon(0.1, steps=2, personal_steps=1, personal_rate=0.1),
            {},
            "local training is FedRecon and the task has no personal parameters",
        ),
        (
            network(own=("2.*",)),
            Scaffold(0.1, epochs=1, control_norm=1.0),
            {},
            "the task has personal parameters and local training is Scaffold",
        ),
        (
            network(own=("2.*",)),
            SGD(0.1, epochs=1),
            {"federated_evaluation": EVALUATION},
            "personalisation must say how users train them before they measure",
        ),
        (
            network(),
            AdamW(0.1, epochs=1),
            {
                "federated_evaluation": replace(EVALUATION, held_out=0.0),
                "personalisation": HOW,
            },
            "held_out of federated_evaluation is 0",
        ),
        (
            network(),
            AdamW(0.1, epochs=1),
            {"personalisation": replace(HOW, parameters=("9.*",))},
            "'9.\\*' matches no trainable parameter",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(
    tmp_path: Path, task: Task, local: SGD, others: dict[str, object], message: str
) -> None:
    with pytest.raises((InvalidValueError, ModelError), match=message):
        simulated(tmp_path, task, local, **others)
    assert not list(tmp_path.rglob("ledger.sqlite"))


def test_metrics_of_untrained_parameters_are_refused(tmp_path: Path) -> None:
    mechanism = fedpriv.Mechanism.poisson(
        q=0.5, clipping=fedpriv.Flat(0.5), metrics={"loss": {"bound": 3.0}}
    ).calibrate(epsilon=8.0, delta=1e-2, rounds=2)
    with pytest.raises(InvalidValueError, match=r"metrics\.report asks for 'loss'"):
        fedpriv.simulate(
            people(),
            network(own=("2.*",)),
            mechanism,
            local=SGD(0.1, epochs=1),
            out=tmp_path / "run",
            quiet=True,
        )


FILE = """
name = "recon"
rounds = 2
seed = 0
data = { name = "tests.evaluation.test_personalisation:people" }
privacy = { epsilon = 8.0, delta = 1e-2, sampling_probability = 0.5 }

[model]
name = "mlp"
options = { inputs = 5, hidden = 4, classes = 3 }
personal = ["3.*"]

[local]
algorithm = "fedrecon"
learning_rate = 0.1
steps = 4
options = { personal_steps = 2, personal_rate = 0.1 }

[personalisation]
share = 0.25
local = { steps = 3, learning_rate = 0.2 }
"""


def test_a_file_says_it_all(tmp_path: Path) -> None:
    file = tmp_path / "recon.toml"
    file.write_text(FILE, encoding="utf-8")
    assert "accuracy of 15 held-out users" in printed("simulate", file, "--out", tmp_path / "run")
    model = load_file(tmp_path / "run" / "model.safetensors")
    begun = build_model("mlp", {"inputs": 5, "hidden": 4, "classes": 3}, 0).state_dict()
    assert model.keys() == begun.keys()
    moved = {name for name, tensor in begun.items() if np.any(model[name] != tensor.numpy())}
    assert moved == {"1.weight", "1.bias"}


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("personalisation.share=1.0", "personalisation.share is 1.0"),
        ("model.personal=['4.*']", "'4.*' matches no trainable parameter; they are"),
        ("privacy.unit=example", "model.personal is given and privacy.unit is 'example'"),
        ("personalisation.local.algorithm=fedrecon", "personal_steps"),
        ("local.options.personal_steps=4", "personal_steps is 4 of 4 steps"),
    ],
)
def test_a_file_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, assignment: str, sentence: str
) -> None:
    file = tmp_path / "recon.toml"
    file.write_text(FILE, encoding="utf-8")
    assert sentence in refused("simulate", file, "--set", assignment, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_arms_of_a_comparison_may_differ_in_what_is_personal(tmp_path: Path) -> None:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.5))
    recon = FedRecon(0.3, steps=6, personal_steps=3, personal_rate=0.5)
    study = fedpriv.compare(
        people(),
        network(),
        mechanism.calibrate(epsilon=100.0, delta=1e-2, rounds=4),
        {"one-model": {}, "personal-head": {"task": network(own=("2.*",)), "local": recon}},
        local=SGD(0.3, epochs=2),
        seeds=1,
        personalisation=Personalisation(SGD(1.0, steps=10)),
        out=tmp_path / "study",
        quiet=True,
    )
    one, personal = study.runs
    assert (one.arm, personal.arm) == ("one-model", "personal-head")
    assert one.accuracy < 0.5 < one.figures["personalised_accuracy"]
    assert personal.accuracy > 0.5
    assert personal.held_out_users["accuracy"]["users"] == 15
