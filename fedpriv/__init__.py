"""Federated learning with user-level differential privacy that can be checked.

    people = fedpriv.Population.from_arrays(x, y, user_ids, held_out=(xt, yt))
    mechanism = fedpriv.Mechanism.poisson(q=0.1, clipping=fedpriv.Flat(0.5))
    mechanism = mechanism.calibrate(epsilon=2, delta=1e-5, rounds=100)
    task = fedpriv.Task(model, loss="cross-entropy")
    run = fedpriv.simulate(people, task, mechanism, local=fedpriv.SGD(0.5, epochs=1))
    run.epsilon, run.delta, run.accuracy, run.rounds, run.model, run.to_pandas(), run.report()

`simulate`, `compare` and `tune` run experiments, and `load_model` loads what they released; the
other names are values that these take or return. Names load on first use: importing fedpriv loads
neither torch nor numpy.
"""

import sys
from functools import cache
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


def __getattr__(name: str) -> object:
    if name in __all__:
        value: object = getattr(import_module(_modules()[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fedpriv' has no attribute {name!r}")


@cache
def _modules() -> dict[str, str]:
    """Return the module of each name, as the imports under TYPE_CHECKING state it."""
    import ast  # noqa: PLC0415 - these two take longer than the rest of this module
    import inspect  # noqa: PLC0415

    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
