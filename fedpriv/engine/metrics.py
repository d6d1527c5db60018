"""Metrics that the engine can compute, and how to ask for them.

| name                | a user's vector                                                  | shape |
| ------------------- | ---------------------------------------------------------------- | ----- |
| loss                | mean loss of its examples, at most the bound                     | ()    |
| accuracy            | share of its examples, and positions in them, of the right class | ()    |
| examples            | number of its examples, at most the cap                          | ()    |
| label-counts        | number of its examples of each class                             | (K,)  |
| update-norms:GROUP  | per threshold, 1 if the group's norm is not above it, else 0     | (k,)  |
| batch-norm          | how far what normalisations see is from their running statistics | (2C,) |
| module:function     | mean over its examples of a function of outputs and targets      | any   |

All are measured at the round's initial parameters, in evaluation mode, on all of a user's examples,
whatever number of them it trains on. A user without examples contributes nothing, and so does one
for whom a metric raises or is not finite; it then does not contribute an update either. A loss that
is not finite counts as the bound, and a target that is no class is in no count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fedpriv.engine.metric_kinds import UPDATE_NORMS
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.importing import check_options
from fedpriv.privacy.metrics import Metric

_UPWARD = 1.0 + 2.0**-50  # on radii that are met exactly, for the rounding of the root


def metric(name: str, **numbers: float | Sequence[float]) -> Metric:
    """A metric with the bounds that follow from a few numbers.

    | name               | numbers                                                              |
    | ------------------ | -------------------------------------------------------------------- |
    | loss               | `bound`: the largest mean loss that is told apart                    |
    | accuracy           | none                                                                 |
    | examples           | `cap`: the largest number that is told apart                         |
    | label-counts       | `classes`; `bound` on the L2 norm of a user's counts                 |
    | update-norms:GROUP | `thresholds`: norms of the part of that vector group before clipping |
    | batch-norm         | `channels` of all layers together; `bound` on the vector's L2 norm   |
    | module:function    | `radius`, and `shape` (a number) and `centre` (zero) if they differ  |

    >>> metric("loss", bound=5.0)
    Metric(name='loss', shape=(), centre=2.5, radius=2.5, options=())

    Raises:
        InvalidValueError: the name or a number is unknown, absent or out of range.
    """
    make = _maker(name)
    check_options(
        f"metric {name!r}", partial(make, name), numbers, InvalidValueError, noun="number"
    )
    return make(name, **numbers)


def _maker(name: str) -> Callable[..., Metric]:
    """The function below that makes metrics of a name."""
    if name in _MAKERS:
        return _MAKERS[name]
    kind, _, rest = name.partition(":")
    if not rest:
        known = [*_MAKERS, f"{UPDATE_NORMS}:GROUP", "module:function"]
        raise InvalidValueError(f"unknown metric {name!r}; {known_names(name, known)}")
    return _update_norms if kind == UPDATE_NORMS else _own


def _loss(name: str, bound: float) -> Metric:
    _check_positive(name, "bound", bound)
    return Metric(name, centre=bound / 2.0, radius=bound / 2.0)


def _accuracy(name: str) -> Metric:
    return Metric(name, centre=0.5, radius=0.5)


def _examples(name: str, cap: float) -> Metric:
    _check_positive(name, "cap", cap)
    return Metric(name, centre=cap / 2.0, radius=cap / 2.0, options=(float(cap),))


def _label_counts(name: str, classes: float, bound: float) -> Metric:
    _check_positive(name, "bound", bound)
    return Metric(name, (_count(name, "classes", classes),), radius=bound)


def _update_norms(name: str, thresholds: Sequence[float]) -> Metric:
    if not isinstance(thresholds, Sequence) or not thresholds:
        raise InvalidValueError(
            f"thresholds of metric {name!r} are {thresholds!r}; there must be at least one"
        )
    for threshold in thresholds:
        _check_positive(name, "a threshold", threshold)
    radius = math.sqrt(len(thresholds)) / 2.0 * _UPWARD
    return Metric(name, (len(thresholds),), 0.5, radius, tuple(map(float, thresholds)))


def _batch_norm(name: str, channels: float, bound: float) -> Metric:
    _check_positive(name, "bound", bound)
    return Metric(name, (2 * _count(name, "channels", channels),), radius=bound)


def _own(name: str, radius: float, centre: float = 0.0, shape: Sequence[float] = ()) -> Metric:
    _check_positive(name, "radius", radius)
    if not isinstance(shape, Sequence) or not isinstance(centre, int | float):
        raise InvalidValueError(
            f"metric {name!r} has centre {centre!r} and shape {shape!r}; they must be a number and "
            "a list"
        )
    axes = tuple(_count(name, "an axis of the shape", axis) for axis in shape)
    return Metric(name, axes, centre, radius)


_MAKERS: Mapping[str, Callable[..., Metric]] = {
    "loss": _loss,
    "accuracy": _accuracy,
    "examples": _examples,
    "label-counts": _label_counts,
    "batch-norm": _batch_norm,
}


def _check_positive(name: str, what: str, value: object) -> None:
    if not (isinstance(value, int | float) and 0.0 < value < math.inf):
        raise InvalidValueError(
            f"{what} of metric {name!r} is {value!r}; it must be a positive number"
        )


def _count(name: str, what: str, value: float) -> int:
    if not isinstance(value, int) or value < 1:
        raise InvalidValueError(
            f"{what} of metric {name!r} is {value!r}; it must be a whole number of at least 1"
        )
    return value
