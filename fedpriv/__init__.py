"""Federated learning with user-level differential privacy that can be checked.

    people = fedpriv.Population.from_arrays(x, y, user_ids, held_out=(xt, yt))
    mechanism = fedpriv.Mechanism.poisson(q=0.1, clipping=fedpriv.Flat(0.5))
    mechanism = mechanism.calibrate(epsilon=2, delta=1e-5, rounds=100)
    task = fedpriv.Task(model, loss="cross-entropy")
    run = fedpriv.simulate(people, task, mechanism, local=fedpriv.SGD(0.5, epochs=1))
    run.epsilon, run.delta, run.accuracy, run.rounds, run.model, run.to_pandas(), run.report()

`simulate`, `compare` and `tune` run experiments, and `load_model` loads what they released; the
other names are values that they take or return. Names load on first use: importing fedpriv loads
neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpriv.accounting.accountants import epsilon
    from fedpriv.audit.verdict import Audit, AuditResult
    from fedpriv.data.population import Population
    from fedpriv.engine.adapters import merge_adapters, with_adapters
    from fedpriv.engine.task import Task
    from fedpriv.engine.transport import Engine
    from fedpriv.evaluation.federated import FederatedEvaluation
    from fedpriv.evaluation.personalisation import Personalisation
    from fedpriv.experiment.grouping import Flat, Grouped, Joint, Part, PerLayer
    from fedpriv.experiment.mechanism import (
        BandedNoise,
        BandedPoisson,
        BufferedNoise,
        EveryUser,
        FixedSize,
        Mechanism,
        Poisson,
        PoissonExamples,
        RandomAllocation,
        Separated,
    )
    from fedpriv.experiment.trackers import (
        EndedRun,
        MLflow,
        StartedRun,
        TensorBoard,
        Tracker,
        WandB,
    )
    from fedpriv.privacy.gaussian_mechanism import Averaging
    from fedpriv.run.compare import Comparison, compare
    from fedpriv.run.export import load_model
    from fedpriv.run.folder import draw
    from fedpriv.run.run import Run
    from fedpriv.run.simulate import simulate
    from fedpriv.run.tune import Tuning, tune
    from fedpriv.training.local import SGD, AdamW, FedRecon, Scaffold
    from fedpriv.training.optimizers import (
        CosineDecay,
        ExponentialDecay,
        FedAdagrad,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedYogi,
        PolynomialDecay,
        PowerDecay,
        StepDecay,
    )
    from fedpriv.training.plan import AdaptiveClipping
    from fedpriv.training.rounds import RoundResult

__version__ = "0.1.0"
# fmt: off
__all__ = [
    "SGD", "AdamW", "AdaptiveClipping", "Audit", "AuditResult", "Averaging", "BandedNoise",
    "BandedPoisson", "BufferedNoise", "Comparison", "CosineDecay", "EndedRun", "Engine",
    "EveryUser", "ExponentialDecay", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedRecon",
    "FedYogi", "FederatedEvaluation", "FixedSize", "Flat", "Grouped", "Joint", "MLflow",
    "Mechanism", "Part", "PerLayer", "Personalisation", "Poisson", "PoissonExamples",
    "PolynomialDecay", "Population", "PowerDecay", "RandomAllocation",
    "RoundResult", "Run", "Scaffold", "Separated", "StartedRun", "StepDecay",
    "Task", "TensorBoard", "Tracker", "Tuning", "WandB", "__version__", "compare", "draw",
    "epsilon", "load_model", "merge_adapters", "simulate", "tune", "with_adapters",
]
# fmt: on

_NAMES_IN = {
    "accounting.accountants": "epsilon",
    "audit.verdict": "Audit AuditResult",
    "data.population": "Population",
    "engine.adapters": "merge_adapters with_adapters",
    "engine.task": "Task",
    "engine.transport": "Engine",
    "evaluation.federated": "FederatedEvaluation",
    "evaluation.personalisation": "Personalisation",
    "training.local": "SGD AdamW FedRecon Scaffold",
    "experiment.grouping": "Flat Grouped Joint Part PerLayer",
    "experiment.mechanism": (
        "BandedNoise BandedPoisson BufferedNoise EveryUser FixedSize Mechanism Poisson "
        "PoissonExamples RandomAllocation Separated"
    ),
    "privacy.gaussian_mechanism": "Averaging",
    "run.compare": "Comparison compare",
    "run.export": "load_model",
    "run.folder": "draw",
    "run.run": "Run",
    "run.simulate": "simulate",
    "run.tune": "Tuning tune",
    "experiment.trackers": "EndedRun MLflow StartedRun TensorBoard Tracker WandB",
    "training.optimizers": (
        "CosineDecay ExponentialDecay FedAdagrad FedAdam FedAvg FedAvgM FedYogi PolynomialDecay "
        "PowerDecay StepDecay"
    ),
    "training.plan": "AdaptiveClipping",
    "training.rounds": "RoundResult",
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES_IN.items():
        if name in names.split():
            value: object = getattr(import_module(f"fedpriv.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'fedpriv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
