"""Tasks by name: what a server describes, its nodes build again."""

from collections.abc import Iterable, Mapping

from fedpriv.engine.metric_kinds import own_metrics
from fedpriv.engine.task import Task
from fedpriv.losses import find_loss
from fedpriv.models import build_model


def build_task(
    model: str,
    options: Mapping[str, object],
    seed: int,
    loss: str,
    metrics: Iterable[str] = (),
) -> Task:
    """The task of these names, with equal initial and frozen parameters wherever it is built.

    Args:
        model: one of `MODELS`, or the import path of a function that returns a module.
        options: arguments of that function.
        seed: of the parameters.
        loss: one of `LOSSES`, or an import path.
        metrics: names of metrics; those that are import paths become the task's own.

    Raises:
        ModelError: a name is unknown, or what it names cannot be used.
        InvalidValueError: an option does not fit.
        OSError: the model's function raises it.
    """
    return Task(build_model(model, options, seed), find_loss(loss), metrics=own_metrics(metrics))
