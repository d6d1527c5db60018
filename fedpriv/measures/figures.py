"""Figures of a model on held-out rows, by name, or functions of outputs and targets.

A figure is a `Sums` of examples, which takes memory that does not grow with the rows, or a function
of all outputs and targets, which are then collected. Targets that a task ignores count in none.
Figures are of rows that belong to no enrolled user: they are not private statements.

Where targets [n, …] are classes, outputs are scores [n, K, …], with one more axis; every position
counts as a row of its own. One score is the logit of class 1, beside 0 for class 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.errors import InvalidValueError, ModelError, known_names
from fedpriv.support.checks import is_whole, plain_numbers
from fedpriv.support.importing import call_imported, check_options, import_function, raised_with

FigureFunction = Callable[[Tensor, Tensor], float | Tensor | Mapping[str, float | Tensor]]
"""Maps outputs and targets of held-out rows [n, …], on the CPU, to a number, or some by name."""
ALWAYS = ("accuracy", "loss")  # what is measured without being asked for
# Which way is better, of those and of `FIGURES`.
BETTER: Mapping[str, Literal["larger", "smaller"]] = {
    **dict.fromkeys(("accuracy", "auc", "balanced-accuracy", "f1"), "larger"),
    **dict.fromkeys(("precision", "r2", "recall", "top-k"), "larger"),
    **dict.fromkeys(("brier", "calibration-error", "loss", "mae", "perplexity", "rmse"), "smaller"),
}


class Seen(NamedTuple):
    """A model's outputs for some rows."""

    outputs: Tensor  # [n, …]
    targets: Tensor  # [n, …]
    counts: Tensor  # of the same shape: whether each target counts
    losses: Tensor  # [n], of the task; those of targets that do not count are 0 in the mean
    # By layer that normalises with running statistics, of each of its calls: [n, 2·channels].
    moments: Mapping[str, Sequence[Tensor]] = {}


@dataclass(frozen=True)
class Sums:
    """A figure that is computed from sums over rows."""

    of_rows: Callable[[Seen], Tensor]  # [n, k], float64
    finish: Callable[[Tensor], Tensor]  # sums [U, k] → figures [U]; NaN where there are none


Figure = Sums | FigureFunction


def figure_of(name: str, what: object) -> Figure:
    """The figure that is called `name`: a function, or what a configuration says of one.

    That is a name of `FIGURES` or "package.module:function", or a table with one of these as
    `figure` and options beside it. InvalidValueError or ModelError if it cannot be made.
    """
    if isinstance(what, Sums):
        return what
    if isinstance(what, str):
        what = {"figure": what}
    if not isinstance(what, Mapping):
        if callable(what):
            return cast(FigureFunction, what)
        raise InvalidValueError(
            f"figure {name!r} is {what!r}; it must be a name, a table or a function"
        )
    options = {key: value for key, value in what.items() if key != "figure"}
    kind, called = what.get("figure"), f"figure {name!r}"
    if not isinstance(kind, str):
        raise InvalidValueError(f"{called} is {dict(what)!r}; its key figure must be a name")
    if kind in FIGURES:
        make = FIGURES[kind]
        check_options(called, make, options, InvalidValueError)
        return call_imported(called, make, options, InvalidValueError, raised_with)
    if ":" not in kind:
        known = known_names(kind, FIGURES)
        raise InvalidValueError(
            f"{called} is {kind!r}, which is unknown; {known}, or package.module:function"
        )
    function = cast(FigureFunction, import_function(called, kind, ModelError))
    return partial(function, **options) if options else function


def losses(seen: Seen) -> Tensor:
    """By row, the loss and the share of its targets that count: [n, 2]."""
    counts = seen.counts.double()
    shares = counts if counts.dim() == 1 else counts.flatten(1).mean(1)
    return torch.stack([torch.where(shares > 0.0, seen.losses.double(), 0.0), shares], 1)


def hits(seen: Seen) -> Tensor:
    """By row, targets that have the largest score, none of them NaN, and all that count: [n, 2]."""
    scores = _classified(seen, "accuracy")
    right = (scores.argmax(-1) == seen.targets) & ~scores.isnan().any(-1)
    return _per_row(right[..., None], seen.counts)


def are_classes(seen: Seen) -> bool:
    """Whether accuracy is defined: targets are classes with scores, or 0 and 1 with one score."""
    outputs, targets = seen.outputs, seen.targets
    if targets.dtype.is_floating_point or outputs.dim() != targets.dim() + 1:
        return False
    binary = (targets == 0) | (targets == 1) | ~seen.counts
    return outputs.shape[1] > 1 or bool(binary.all())


def _classified(seen: Seen, what: str) -> Tensor:
    """Scores of each target, [n, …, K], with K ≥ 2."""
    if seen.targets.dtype.is_floating_point or seen.outputs.dim() != seen.targets.dim() + 1:
        raise InvalidValueError(
            f"{what} needs targets that are classes, and scores of them with one axis more; "
            f"targets are {seen.targets.dtype} {list(seen.targets.shape)} and outputs "
            f"{list(seen.outputs.shape)}"
        )
    scores = seen.outputs.movedim(1, -1)
    return torch.cat([torch.zeros_like(scores), scores], -1) if scores.shape[-1] == 1 else scores


def _per_row(values: Tensor, counts: Tensor) -> Tensor:
    """By row, sums of values [n, …, k] over targets that count, and how many do: [n, k + 1]."""
    weights = counts.double()[..., None]
    # Not a product with zero, which would keep NaN.
    each = torch.where(counts[..., None], values.double(), 0.0)
    both = torch.cat([each, weights], -1)
    return both.reshape(len(both), -1, both.shape[-1]).sum(1)


def _mean(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1]


LOSS, ACCURACY = Sums(losses, _mean), Sums(hits, _mean)


def _mean_of(of_targets: Callable[[Seen], Tensor], then: Callable[[Tensor], Tensor]) -> Sums:
    """A figure that is a function of the mean of `of_targets`, [n, …], over targets."""
    return Sums(
        lambda seen: _per_row(of_targets(seen)[..., None], seen.counts),
        lambda sums: then(_mean(sums)),
    )


def _top_k(k: int = 5) -> Sums:
    k = plain_numbers(k)
    if not is_whole(k):
        raise InvalidValueError(f"k of top-k is {k!r}; it must be a whole number of at least 1")

    def hits(seen: Seen) -> Tensor:
        scores = _classified(seen, "top-k")
        if k > scores.shape[-1]:
            raise InvalidValueError(f"k of top-k is {k}; there are {scores.shape[-1]} classes")
        found = (scores.topk(k, -1).indices == seen.targets[..., None]).any(-1)
        return found & ~scores.isnan().any(-1)  # which would be the largest

    return _mean_of(hits, lambda mean: mean)


def _perplexity() -> Sums:
    def losses(seen: Seen) -> Tensor:
        scores = _classified(seen, "perplexity").movedim(-1, 1)
        classes = torch.where(seen.counts, seen.targets.long(), 0)
        return functional.cross_entropy(scores, classes, reduction="none")

    return _mean_of(losses, torch.exp)


def _errors(seen: Seen, what: str) -> Tensor:
    # Shapes that differ would be broadcast, [n, 1] − [n] to [n, n].
    if seen.outputs.shape != seen.targets.shape:
        raise InvalidValueError(
            f"{what} needs outputs like targets; outputs are {list(seen.outputs.shape)} and "
            f"targets {list(seen.targets.shape)}"
        )
    return seen.outputs.double() - seen.targets.double()


def _mae() -> Sums:
    return _mean_of(lambda seen: _errors(seen, "mae").abs(), lambda mean: mean)


def _rmse() -> Sums:
    return _mean_of(lambda seen: _errors(seen, "rmse").square(), torch.sqrt)


def _r2() -> Sums:
    """1 − Σ (output − target)²/Σ (target − mean)², the mean over the columns of a target."""

    def sums_of(seen: Seen) -> Tensor:
        errors, y = _errors(seen, "r2"), seen.targets.double()
        errors, y = (t.reshape(len(t), -1) for t in (errors, y))
        return torch.cat([errors.square(), y, y.square(), torch.ones_like(y[:, :1])], 1)

    def finish(sums: Tensor) -> Tensor:
        errors, y, squares = sums[:, :-1].chunk(3, 1)
        return (1.0 - errors / (squares - y.square() / sums[:, -1:])).mean(1)

    return Sums(sums_of, finish)


def _of_classes(
    name: str, value: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Sums]:
    """A figure of each class, by how often it was right, chosen and there: the mean, or of one."""

    def make(label: int | None = None) -> Sums:
        label = plain_numbers(label)
        if label is not None and label != 0 and not is_whole(label):
            raise InvalidValueError(f"label of {name} is {label!r}; it must be a class, from 0")

        def of_rows(seen: Seen) -> Tensor:
            scores = _classified(seen, name)
            count = scores.shape[-1]
            if label is not None and label >= count:
                raise InvalidValueError(f"label of {name} is {label}; there are {count} classes")
            true = functional.one_hot(
                torch.where(seen.counts, seen.targets.long(), 0), count
            ).bool()
            chosen = functional.one_hot(scores.argmax(-1), count).bool()
            chosen &= ~scores.isnan().any(-1, keepdim=True)
            return _per_row(torch.cat([true & chosen, chosen, true], -1), seen.counts)

        def finish(sums: Tensor) -> Tensor:
            values = value(*sums[:, :-1].chunk(3, 1))
            return values.nanmean(1) if label is None else values[:, label]

        return Sums(of_rows, finish)

    return make


def _share(part: Tensor, whole: Tensor, exists: Tensor) -> Tensor:
    """part/whole, 0 where the whole is; NaN where the class does not exist."""
    return torch.where(exists > 0.0, part / whole.clamp(min=1.0), torch.nan)


def _brier() -> Sums:
    """Brier 1950: the sum over classes of (probability − 1[it is the class])², in [0, 2]."""

    def scores(seen: Seen) -> Tensor:
        probabilities = _classified(seen, "brier").double().softmax(-1)
        classes = torch.where(seen.counts, seen.targets.long(), 0)
        right = functional.one_hot(classes, probabilities.shape[-1])
        return (probabilities - right).square().sum(-1)

    return _mean_of(scores, lambda mean: mean)


def _calibration_error(bins: int = 15) -> Sums:
    """Expected calibration error of Guo et al. 2017, equation 3.

    Targets are put into bins (m − 1, m]/M of the largest probability. The error is the sum over
    bins of |right − sum of largest probabilities|, over the number of targets.
    """
    bins = plain_numbers(bins)
    if not is_whole(bins):
        raise InvalidValueError(
            f"bins of calibration-error is {bins!r}; it must be a whole number of at least 1"
        )

    def gaps(seen: Seen) -> Tensor:
        probabilities = _classified(seen, "calibration-error").double().softmax(-1)
        confidence, found = probabilities.max(-1)
        places = (confidence * bins).ceil().long().clamp(1, bins) - 1
        gap = (found == seen.targets).double() - confidence
        within = functional.one_hot(places, bins).bool()
        return _per_row(torch.where(within, gap[..., None], 0.0), seen.counts)

    return Sums(gaps, lambda sums: sums[:, :-1].abs().sum(1) / sums[:, -1])


def _auc() -> FigureFunction:
    """Area under the receiver operating characteristic: binary, or the mean of one against rest.

    Of scores [n], [n, 1] or [n, 2] for classes 0 and 1. Of more, the mean over classes that some
    rows have and others do not, of the area by the class's probability.
    """

    def auc(outputs: Tensor, targets: Tensor) -> float:
        outputs, right = outputs.double(), targets.long()
        if outputs.dim() == targets.dim() + 1 and outputs.shape[1] == 1:
            outputs = outputs[:, 0]
        if outputs.dim() == targets.dim() + 1:
            scores = outputs.movedim(1, -1)
            if scores.shape[-1] > 2:
                found = scores.reshape(-1, scores.shape[-1]).softmax(1).unbind(1)
                one = right.flatten()
                areas = [_area(each, one == number) for number, each in enumerate(found)]
                known = [area for area in areas if not math.isnan(area)]
                return sum(known) / len(known) if known else math.nan
            outputs = scores[..., 1] - scores[..., 0]
        if outputs.shape != targets.shape:
            raise InvalidValueError(
                f"auc needs a score of each target, or of each class; outputs are "
                f"{list(outputs.shape)} and targets {list(targets.shape)}"
            )
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise InvalidValueError("auc of one score, or of two, needs targets 0 and 1")
        return _area(outputs.flatten(), right.flatten() == 1)

    return auc


def _area(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative that are in order; ties count half.

    It is (R − n₁(n₁ + 1)/2)/(n₁·n₀), with R the sum of ranks of the positives (Hanley & McNeil
    1982); NaN if there are no pairs, or a score is NaN.
    """
    n1 = int(positive.sum())
    pairs = n1 * (len(positive) - n1)
    if not pairs or bool(scores.isnan().any()):
        return math.nan
    _, places, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2.0  # of equal scores, their mean
    return float(ranks[places[positive.numpy()]].sum() - n1 * (n1 + 1) / 2.0) / pairs


FIGURES: Mapping[str, Callable[..., Figure]] = {
    "auc": _auc,
    "balanced-accuracy": partial(
        _of_classes("balanced-accuracy", lambda right, _, true: _share(right, true, true)), None
    ),
    "brier": _brier,
    "calibration-error": _calibration_error,
    "f1": _of_classes(
        "f1", lambda right, chosen, true: _share(2 * right, chosen + true, chosen + true)
    ),
    "mae": _mae,
    "perplexity": _perplexity,
    "precision": _of_classes(
        "precision", lambda right, chosen, true: _share(right, chosen, chosen + true)
    ),
    "r2": _r2,
    "recall": _of_classes("recall", lambda right, chosen, true: _share(right, true, chosen + true)),
    "rmse": _rmse,
    "top-k": _top_k,
}


@dataclass(frozen=True)
class Collected:
    """Outputs and targets that count, on the CPU, and the number of each one's user."""

    outputs: Tensor  # [n, …]; [n, K] of classes, also where a row has several targets
    targets: Tensor  # [n, …]; [n] of classes
    owners: Tensor  # [n]

    @classmethod
    def of(cls, seen: Seen, owners: Tensor) -> Self:
        """Those of some rows, of which targets that are classes become rows of their own."""
        outputs, targets, counts = (t.cpu() for t in seen[:3])
        owners = owners.cpu()
        if not targets.dtype.is_floating_point and targets.dim() > 0:
            if outputs.dim() == targets.dim() + 1:
                outputs = outputs.movedim(1, -1)
            if outputs.shape[: targets.dim()] == targets.shape:
                each = owners.view(-1, *[1] * (targets.dim() - 1)).expand_as(targets)
                return cls(outputs[counts], targets[counts], each[counts])
        known = counts.flatten(1).any(1) if counts.dim() > 1 else counts
        return cls(outputs[known], targets[known], owners[known])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of several parts."""
        names = ("outputs", "targets", "owners")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def values(self, function: FigureFunction) -> dict[str, float]:
        """A figure of all rows, under "", or its numbers by name; raises what the function raises.

        Without rows it is NaN.
        """
        value = function(self.outputs, self.targets) if len(self.targets) else math.nan
        numbers = value if isinstance(value, Mapping) else {"": value}
        return {str(name): float(number) for name, number in numbers.items()}

    def by_user(self, function: FigureFunction, users: int) -> npt.NDArray[np.float64]:
        """A figure of each user's alone, [U]; NaN where it cannot be computed."""
        order = torch.argsort(self.owners, stable=True)
        sizes = torch.bincount(self.owners, minlength=users).tolist()
        values = np.full(users, math.nan)
        for user, rows in enumerate(torch.split(order, sizes)):
            # A figure may need more than one user has, such as rows of both classes.
            with suppress(Exception):
                own = Collected(self.outputs[rows], self.targets[rows], self.owners[rows])
                values[user] = own.values(function)[""]
        return values


def spread_over_users(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """How a figure differs among users, [U]: over those for whom it is a number.

    Their number `users`, the mean, and the quantiles 10%, 50% and 90%, interpolated linearly.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return {"users": 0.0, **dict.fromkeys(("mean", "q10", "q50", "q90"), math.nan)}
    low, median, high = np.quantile(known, [0.1, 0.5, 0.9]).tolist()
    return {
        "users": float(len(known)),
        "mean": float(known.mean()),
        "q10": low,
        "q50": median,
        "q90": high,
    }
