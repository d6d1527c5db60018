"""The public names, and the examples in docstrings."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import fedpriv

PACKAGES = [
    "fedpriv",
    "fedpriv.accounting",
    "fedpriv.analytics",
    "fedpriv.data",
    "fedpriv.engine",
    "fedpriv.ledger",
    "fedpriv.training",
    "fedpriv.privacy",
]
MODULES = [
    info.name
    for info in pkgutil.walk_packages(fedpriv.__path__, "fedpriv.")
    if not info.name.startswith(("fedpriv.clients", "fedpriv.server"))
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
    Comparison CosineDecay EndedRun EveryUser ExponentialDecay FedAdagrad FixedSize
    RandomAllocation Separated FedAdam FedAvg FedAvgM FedRecon FedYogi FederatedEvaluation Flat
    Grouped Joint MLflow Mechanism Part PerLayer Personalisation Poisson PoissonExamples
    PolynomialDecay Population PowerDecay Projection RoundResult Run SGD Scaffold StartedRun
    StepDecay Stopping Task TensorBoard Tracker Tuning WandB __version__ compare epsilon
    merge_adapters simulate tune with_adapters
"""


def test_the_face_is_these_names_and_each_is_found() -> None:
    assert set(fedpriv.__all__) == set(FACE.split())
    assert set(fedpriv.__all__) <= set(dir(fedpriv))
    for name in fedpriv.__all__:
        assert getattr(fedpriv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedpriv.simulat  # noqa: B018
