"""Refusing metrics that cannot be computed, before anybody's data are touched."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.clipping import sent
from fedpriv.engine.measuring import Measuring, kind_of, measured_group, values_of_examples
from fedpriv.engine.task import Task
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, known_names
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.metrics import PREFIX, Metric


def check_metrics(
    task: Task,
    metrics: Sequence[Metric],
    clipping: Clipping,
    examples: Mapping[str, npt.NDArray[np.generic]],
) -> None:
    """Refuse metrics that cannot be computed before anybody's data are touched.

    Args:
        task: the task.
        metrics: those that a round asks for.
        clipping: how contributions of a round are made.
        examples: at least one row of public, held-out or blank data.

    Raises:
        InvalidValueError: a metric is unknown, or its shape or options do not fit.
        ModelError: a metric cannot be computed.
    """
    # Two rows: a function that averages over them is found out.
    x, y = (
        torch.from_numpy(np.repeat(examples[field][:1], 2, axis=0))
        for field in (task.inputs, task.targets)
    )
    for one in metrics:
        _check_place(one, clipping)
        if measured_group(one) is not None:
            _check_update_norms(one, clipping)
            continue
        if one.name == "examples" and len(one.options) != 1:
            raise InvalidValueError(
                f"metric 'examples' has options {one.options}; there must be one, the cap"
            )
        kind = kind_of(task, one)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                values_of_examples(Measuring.of(task, {}), x, y, [(kind, one)])
        except FedprivError:
            raise
        except Exception as error:
            raise ModelError(f"metric {one.name!r} cannot be computed: {error}") from error


def _check_place(one: Metric, clipping: Clipping) -> None:
    layout = clipping.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if shapes.get(one.tensor) != one.shape:
        raise InvalidValueError(
            f"metric {one.name!r} has shape {one.shape}; contributions have "
            f"{shapes.get(one.tensor, 'no place')} for it"
        )


def _check_update_norms(one: Metric, clipping: Clipping) -> None:
    if one.shape != (len(one.options),):
        raise InvalidValueError(
            f"metric {one.name!r} has shape {one.shape} for {len(one.options)} thresholds; it "
            "must have one component for each"
        )
    group = measured_group(one)
    known = [g.name for g in sent(clipping) if not g.name.startswith(PREFIX)]
    if group not in known:
        raise InvalidValueError(
            f"metric {one.name!r} is of vector group {group!r}; {known_names(str(group), known)}"
        )
