"""The public names, and the examples in docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.errors import InvalidValueError

PACKAGES = [
    "fedpriv",
    "fedpriv.accounting",
    "fedpriv.analytics",
    "fedpriv.data",
    "fedpriv.ledger",
]
MODULES = [
    info.name
    for info in pkgutil.walk_packages(fedpriv.__path__, "fedpriv.")
    if not info.name.startswith(("fedpriv.clients", "fedpriv.server"))
    and info.name != "fedpriv.privacy.clipping_triton"  # imported where there is Triton alone
]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_exist_once_and_are_documented(name: str) -> None:
    package = importlib.import_module(name)
    assert len(package.__all__) == len(set(package.__all__))
    for public in package.__all__:
        value = getattr(package, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"
            assert value.__module__.startswith(f"{name}."), f"{public} is not of {name}"


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_imports_is_what_it_publishes(name: str) -> None:
    package = importlib.import_module(name)
    imported = {
        public
        for public, value in vars(package).items()
        if not public.startswith("_")
        and not inspect.ismodule(value)
        and str(getattr(value, "__module__", "")).startswith("fedpriv")
    }
    assert imported <= set(package.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_there_are_examples() -> None:
    found = [doctest.DocTestFinder().find(importlib.import_module(name)) for name in MODULES]
    assert sum(len(each.examples) for examples in found for each in examples) >= 10


FACE = """
    AdamW AdaptiveClipping Audit AuditResult Averaging BandedNoise BandedPoisson BufferedNoise
    Comparison CosineDecay EndedRun Engine EveryUser ExponentialDecay FedAdagrad FixedSize
    RandomAllocation Separated FedAdam FedAvg FedAvgM FedRecon FedYogi FederatedEvaluation Flat
    Grouped Joint MLflow Mechanism Part PerLayer Personalisation Poisson PoissonExamples
    PolynomialDecay Population PowerDecay RoundResult Run SGD Scaffold StartedRun
    StepDecay Task TensorBoard Tracker Tuning WandB __version__ compare draw epsilon
    load_model merge_adapters simulate tune with_adapters
"""


def test_the_face_is_these_names_and_each_is_found() -> None:
    assert set(fedpriv.__all__) == set(FACE.split())
    assert set(fedpriv.__all__) <= set(dir(fedpriv))
    for name in fedpriv.__all__:
        assert getattr(fedpriv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedpriv.simulat  # noqa: B018


def test_each_name_of_the_face_has_one_stability() -> None:
    page = (Path(__file__).parents[1] / "docs" / "stability.md").read_text(encoding="utf-8")
    table = page.partition("| stability |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(fedpriv.__all__)


X = np.zeros((4, 2), np.float32)
MODEL = torch.nn.Linear(2, 2)
Y = np.arange(4) % 2
LISTS = {"x": [1.0], "y": [0]}
PEOPLE = fedpriv.Population.from_arrays(X, Y, np.arange(4), held_out=(X, Y))
MECHANISM = fedpriv.Mechanism.poisson().with_noise(1.0, epsilon=1.0, delta=1e-3)
BUDGETED = fedpriv.Mechanism.poisson().calibrate(epsilon=1.0, delta=1e-3, rounds=1)
TASK = fedpriv.Task(MODEL)
PART = fedpriv.Part(["*"], fedpriv.Flat(1.0))


def named(name: object) -> fedpriv.Population:
    return fedpriv.Population.from_arrays(X, Y, np.arange(4), held_out=(X, Y), name=name)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fedpriv.simulate(PEOPLE, MODEL, MECHANISM), "task is of the type Linear"),
        (lambda: fedpriv.simulate(TASK, PEOPLE, MECHANISM), "population is of the type Task"),
        (lambda: fedpriv.simulate(PEOPLE, TASK, MECHANISM, server="fedavg"), "or None"),
        (lambda: fedpriv.simulate(PEOPLE, TASK, MECHANISM, local=0.1), "local is of the type fl"),
        (lambda: fedpriv.simulate(PEOPLE, TASK, MECHANISM, audit=5), "audit is of the type int"),
        (lambda: fedpriv.tune(PEOPLE, MODEL, MECHANISM, on="public"), "of the type Task"),
        (lambda: fedpriv.compare(PEOPLE, MODEL, MECHANISM, {"a": {}}), "of the type Task"),
        (lambda: fedpriv.compare(PEOPLE, TASK, MECHANISM, {"a": {"local": 1}}), "type LocalTr"),
        (lambda: fedpriv.compare(TASK, PEOPLE, MECHANISM, {"a": {}}), "type Population"),
        (lambda: fedpriv.Population(3, PEOPLE.users, PEOPLE.test), "name is of the type int"),
        (lambda: named(None), "name is None"),
        (lambda: named(object()), "name is of the type object"),
        (
            lambda: fedpriv.simulate(PEOPLE, TASK, MECHANISM, rounds=1, ledger=""),
            "settings: privacy.ledger: '' is not a path",
        ),
        (
            lambda: fedpriv.tune(PEOPLE, TASK, BUDGETED, on="public", ledger=""),
            "settings: privacy.ledger: '' is not a path",
        ),
        (lambda: fedpriv.Population("a", None, PEOPLE.test), "users is None"),
        (lambda: fedpriv.Population("a", PEOPLE.users, None), "test is None"),
        (
            lambda: fedpriv.Population("a", PEOPLE.users, LISTS),
            "test field 'x' is of the type list",
        ),
        (lambda: fedpriv.Task("mlp"), "model is of the type str"),
        (lambda: fedpriv.Task(MODEL, inputs=[3]), "a name is 3"),
        (lambda: fedpriv.Task(MODEL, metrics={3: len}), "a name is 3"),
        (lambda: fedpriv.Task(MODEL, metrics={"a": 3}), "metric 'a' is 3"),
        (lambda: fedpriv.with_adapters(MODEL, 1, layers=3), "layers is of the type int"),
        (lambda: fedpriv.with_adapters(MODEL, 1, seed=2**64), "seed is 18446744073709551616"),
        (lambda: fedpriv.Task(None), "model is None"),
        (lambda: fedpriv.epsilon("ledger.sqlite", delta=1e-3), "an event is of the type str"),
        (lambda: fedpriv.epsilon(3, delta=1e-3), "events is of the type int"),
        (lambda: fedpriv.accounting.delta([3], 1.0), "an event is of the type int"),
        (lambda: fedpriv.accounting.delta([], "1"), "epsilon is '1'"),
        (lambda: fedpriv.accounting.delta([], 10**400), "epsilon is a whole number of 1329 bits"),
        (lambda: fedpriv.epsilon([], 10**400), "delta is a whole number of 1329 bits"),
        (lambda: fedpriv.Mechanism.poisson(accountant="tigth"), "did you mean 'tight'?"),
        (
            lambda: fedpriv.Mechanism.poisson(unit="microbatch", microbatch="2"),
            "microbatch is '2'",
        ),
        (
            lambda: fedpriv.Mechanism.poisson().calibrate(epsilon=1, delta=0.1, users="5000"),
            "users is '5000'",
        ),
        (lambda: fedpriv.Mechanism.poisson(clipping=0.5), "type ClippingPolicy"),
        (lambda: fedpriv.Mechanism.poisson().calibrate(epsilon=1, delta=0.1, rounds=1.5), "is 1.5"),
        (lambda: fedpriv.Mechanism.poisson(q="a"), "is 'a'; it must be a number"),
        (lambda: fedpriv.PoissonExamples(0.5, 0), "examples_per_user is 0"),
        (lambda: fedpriv.PoissonExamples(0.5, 10**9), "examples_per_user is 1000000000"),
        (lambda: fedpriv.FixedSize(0), "cohort_size is 0"),
        (lambda: fedpriv.RandomAllocation(0), "has 0 rounds"),
        (lambda: fedpriv.Separated(4, 5), "separation of the schedule is 5"),
        (lambda: fedpriv.BandedPoisson(0.0, 4, 2), "is 0.0; it must be in"),
        (lambda: fedpriv.Flat(0), "the clipping norm is 0"),
        (lambda: fedpriv.Flat("a"), "the clipping norm is 'a'"),
        (lambda: fedpriv.PerLayer(float("nan")), "the clipping norm is nan"),
        (lambda: fedpriv.Joint(float("inf")), "the clipping norm is inf"),
        (lambda: fedpriv.Part(None, fedpriv.Flat(1.0)), "tensors is None"),
        (lambda: fedpriv.Part(3, fedpriv.Flat(1.0)), "tensors is of the type int"),
        (lambda: fedpriv.Part([3], fedpriv.Flat(1.0)), "one of tensors is of the type int"),
        (lambda: fedpriv.Grouped(None), "parts is None"),
        (lambda: fedpriv.Grouped([]), "parts is of the type list"),
        (lambda: fedpriv.Grouped({"a": 1}), "part 'a' is of the type int"),
        (lambda: fedpriv.Grouped({1: PART}), "a name of parts is of the type int"),
        (lambda: fedpriv.merge_adapters(3), "model is of the type int"),
        (lambda: fedpriv.compare(PEOPLE, TASK, MECHANISM, None), "arms is None"),
        (lambda: fedpriv.compare(PEOPLE, TASK, MECHANISM, ["a"]), "arms is of the type list"),
        (lambda: fedpriv.compare(PEOPLE, TASK, MECHANISM, {"a": None}), "arm 'a' is None"),
        (
            lambda: fedpriv.compare(PEOPLE, TASK, MECHANISM, {"a": {}}, accuracies=0.9),
            "accuracies is of the type float",
        ),
        (
            lambda: fedpriv.compare(PEOPLE, TASK, MECHANISM, {"a": {}}, out=3),
            "out is of the type i",
        ),
        (lambda: fedpriv.tune(PEOPLE, TASK, MECHANISM, on="public", out=3), "out is of the type i"),
        (
            lambda: fedpriv.Mechanism.poisson(metrics={"accuracy": None}),
            "metric 'accuracy' is None",
        ),
        (lambda: fedpriv.Mechanism.poisson(metrics=[3]), "a name of metrics is of the type int"),
        (lambda: fedpriv.Mechanism.poisson(accountant=None), "accountant is None"),
        (lambda: fedpriv.epsilon([], 1e-3, None), "accountant is None"),
        (lambda: fedpriv.Mechanism.poisson(averaging=0), "averaging is of the type int"),
        (
            lambda: fedpriv.EveryUser(X).of(3, "user"),
            "relation is of the type ndarray",
        ),
        (lambda: fedpriv.Part("conv*", fedpriv.Flat(1.0)), "they must be a list of globs"),
        (lambda: fedpriv.SGD("a", steps=1), "learning_rate is 'a'"),
        (lambda: fedpriv.SGD(0.1, epochs=1.5), "epochs is 1.5"),
        (lambda: fedpriv.SGD(0.1, steps=True), "steps is True"),
        (lambda: fedpriv.SGD(0.1, steps=1, momentum="a"), "momentum is 'a'"),
        (lambda: fedpriv.SGD(0.1, steps=1, proximal="a"), "proximal is 'a'"),
        (lambda: fedpriv.AdamW(0.1, steps=1, beta2=None), "beta2 is None"),
        (lambda: fedpriv.AdamW(0.1, steps=1, epsilon=""), "epsilon of AdamW is ''"),
        (lambda: fedpriv.Scaffold(0.1, steps=1, control_norm="a"), "control_norm is 'a'"),
        (lambda: fedpriv.FedAvg("a"), "learning_rate is 'a'"),
        (lambda: fedpriv.FedAdam(tau=None), "tau is None"),
        (lambda: fedpriv.StepDecay(0.1, 0.5, 1.5), "rounds of the schedule is 1.5"),
        (lambda: fedpriv.StepDecay("a", 0.5, 2), "start of the schedule is 'a'"),
    ],
)
def test_what_is_no_legal_value_is_refused_where_it_is_given(call, sentence) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(sentence)):
        call()
