"""Figures of a model on held-out rows, by name, or functions of outputs and targets.

A figure is either a `Sums` over rows, which needs the same memory for any number of rows, or a
function of all outputs and targets, which are then collected. Figures leave out targets that a task
ignores. The rows belong to no enrolled user, so figures are exact, and are not private releases.

If targets [n, …] are classes, outputs are scores [n, K, …], with one more axis; every position
counts as a separate row. A single score is the logit of class 1, and class 0 has the score 0.
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
from fedpriv.support.checks import check_range, is_whole, plain_numbers, require
from fedpriv.support.importing import call_imported, import_function, raised_with

FigureFunction = Callable[
    [Tensor, Tensor], float | Tensor | Mapping[str | tuple[int, ...], float | Tensor]
]
"""Maps outputs and targets of held-out rows [n, …], on the CPU, to a number or numbers by name.

A name may be a tuple of class numbers, which are shown as names.
"""
SCORES_FIRST = (
    "scores of classes must be on axis 1, before the axes of targets, as outputs.movedim(-1, 1) "
    "puts those of a sequence"
)
_MOST_CONFUSED = 20  # classes of a confusion matrix
ALWAYS = ("accuracy", "loss")  # figures that are always measured
# Whether a larger or a smaller number is better, for `ALWAYS` and `FIGURES`.
BETTER: Mapping[str, Literal["larger", "smaller"]] = {
    **dict.fromkeys(("accuracy", "auc", "balanced-accuracy", "f1"), "larger"),
    **dict.fromkeys(("precision", "r2", "recall", "top-k"), "larger"),
    **dict.fromkeys(("calibration-error", "loss", "mae", "perplexity", "rmse"), "smaller"),
}


class Seen(NamedTuple):
    """A model's outputs for some rows."""

    outputs: Tensor  # [n, …]
    targets: Tensor  # [n, …]
    counts: Tensor  # of the same shape: whether each target counts
    losses: Tensor  # [n], the task's losses: means over a row's targets, where ignored ones are 0
    # By name of a layer that normalises with running statistics: [n, 2·channels] for each call.
    moments: Mapping[str, Sequence[Tensor]] = {}


@dataclass(frozen=True)
class Sums:
    """A figure that is computed from sums over rows."""

    of_rows: Callable[[Seen], Tensor]  # [n, k], float64
    finish: Callable[[Tensor], Tensor]  # sums [U, k] → figures [U]; NaN for users without rows


Figure = Sums | FigureFunction


def figure_of(name: str, spec: object) -> Figure:
    """Return the figure that a configuration names `name` and describes by `spec`.

    `spec` is a figure, a name in `FIGURES`, a "package.module:function", or a table with one of the
    latter two as `figure` and options as other keys. InvalidValueError if it is none of these or
    its options are wrong; ModelError if the function cannot be imported.
    """
    if isinstance(spec, Sums):
        return spec
    if isinstance(spec, str):
        spec = {"figure": spec}
    if not isinstance(spec, Mapping):
        if callable(spec):
            return cast(FigureFunction, spec)
        limit = "it must be a name, a table or a function"
        raise InvalidValueError(f"figure {name!r} is {spec!r}; {limit}")
    options = {key: value for key, value in spec.items() if key != "figure"}
    kind, what = spec.get("figure"), f"figure {name!r}"
    if not isinstance(kind, str):
        raise InvalidValueError(f"{what} is {dict(spec)!r}; its key figure must be a name")
    if kind in FIGURES:
        return call_imported(what, FIGURES[kind], options, InvalidValueError, raised_with)
    if ":" not in kind:
        hint = f"{known_names(kind, FIGURES)}, or package.module:function"
        raise InvalidValueError(f"{what} is {kind!r}, which is unknown; {hint}")
    function = cast(FigureFunction, import_function(what, kind, ModelError))
    return partial(function, **options) if options else function


def losses(view: Seen) -> Tensor:
    """Return each row's loss, and the share of its targets that count: [n, 2]."""
    counts = view.counts.double()
    shares = counts if counts.dim() == 1 else counts.flatten(1).mean(1)
    return torch.stack([torch.where(shares > 0.0, view.losses.double(), 0.0), shares], 1)


def hits(view: Seen) -> Tensor:
    """Return each row's number of correctly classified targets, and of targets that count: [n, 2].

    A target with NaN among its scores is not classified correctly.
    """
    scores = _classified(view, "accuracy")
    is_right = (scores.argmax(-1) == view.targets) & ~scores.isnan().any(-1)
    return per_row(is_right[..., None], view.counts)


def are_classes(view: Seen) -> bool:
    """Return whether targets are classes with scores, or 0 and 1 with a single score."""
    outputs, targets = view.outputs, view.targets
    if not _have_scores(outputs, targets):
        return False
    binary = (targets == 0) | (targets == 1) | ~view.counts
    return outputs.shape[1] > 1 or bool(binary.all())


def _have_scores(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets [n, …] may be classes, with scores [n, K, …]."""
    return (
        not targets.dtype.is_floating_point
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[2:] == targets.shape[1:]
    )


def _check_scores(outputs: Tensor, targets: Tensor, what: str) -> None:
    if not _have_scores(outputs, targets):
        axes = f"; {SCORES_FIRST}" if outputs.dim() == targets.dim() + 1 else ""
        raise InvalidValueError(
            f"{what} needs targets that are classes, and scores with one more axis; "
            f"targets are {targets.dtype} {list(targets.shape)} and outputs {list(outputs.shape)}"
            f"{axes}"
        )


def _classified(view: Seen, what: str) -> Tensor:
    """Return the scores of each target, [n, …, K] with K ≥ 2."""
    _check_scores(view.outputs, view.targets, what)
    scores = view.outputs.movedim(1, -1)
    return torch.cat([torch.zeros_like(scores), scores], -1) if scores.shape[-1] == 1 else scores


def _classes(view: Seen) -> Tensor:
    """Return targets that are classes as int64, [n, …]; targets that do not count become 0."""
    return torch.where(view.counts, view.targets.long(), 0)


def per_row(values: Tensor, counts: Tensor) -> Tensor:
    """Return each row's sums over targets that count, and their number: [n, …, k] → [n, k+1]."""
    weights = counts.double()[..., None]
    masked = torch.where(counts[..., None], values.double(), 0.0)  # a product would keep NaN
    terms = torch.cat([masked, weights], -1)
    return terms.reshape(len(terms), -1, terms.shape[-1]).sum(1)


def _mean(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1]


LOSS, ACCURACY = Sums(losses, _mean), Sums(hits, _mean)


def _mean_of(
    of_targets: Callable[[Seen], Tensor], then: Callable[[Tensor], Tensor] = lambda mean: mean
) -> Sums:
    """Return the figure `then(mean)` for the mean of `of_targets`, [n, …], over targets."""
    return Sums(
        lambda view: per_row(of_targets(view)[..., None], view.counts),
        lambda sums: then(_mean(sums)),
    )


def _top_k(k: int = 5) -> Sums:
    k = plain_numbers(k)
    check_range("k of top-k", k, "whole")

    def hits(view: Seen) -> Tensor:
        scores = _classified(view, "top-k")
        if k > scores.shape[-1]:
            raise InvalidValueError(f"k of top-k is {k}; there are {scores.shape[-1]} classes")
        is_right = (scores.topk(k, -1).indices == view.targets[..., None]).any(-1)
        return is_right & ~scores.isnan().any(-1)  # topk takes NaN for the largest

    return _mean_of(hits)


def _perplexity() -> Sums:
    def losses(view: Seen) -> Tensor:
        scores = _classified(view, "perplexity").movedim(-1, 1)
        return functional.cross_entropy(scores, _classes(view), reduction="none")

    return _mean_of(losses, torch.exp)


def _errors(view: Seen, what: str) -> Tensor:
    # torch would broadcast different shapes, such as [n, 1] − [n] to [n, n].
    if view.outputs.shape != view.targets.shape:
        raise InvalidValueError(
            f"{what} needs outputs like targets; outputs are {list(view.outputs.shape)} and "
            f"targets {list(view.targets.shape)}"
        )
    return view.outputs.double() - view.targets.double()


def _r2() -> Sums:
    """Return R² = 1 − Σ (output − target)²/Σ (target − mean)², averaged over columns of targets."""

    def sums_of(view: Seen) -> Tensor:
        errors, y = _errors(view, "r2"), view.targets.double()
        errors, y = (t.reshape(len(t), -1) for t in (errors, y))
        return torch.cat([errors.square(), y, y.square(), torch.ones_like(y[:, :1])], 1)

    def finish(sums: Tensor) -> Tensor:
        errors, y, squares = sums[:, :-1].chunk(3, 1)
        return (1.0 - errors / (squares - y.square() / sums[:, -1:])).mean(1)

    return Sums(sums_of, finish)


def _of_classes(
    name: str, value: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Sums]:
    """Return a factory of figures: the mean of `value` over classes, or its value for one class.

    The arguments of `value`, each [U, K], count by class the correct predictions, all predictions
    and the targets.
    """

    def make(label: int | None = None) -> Sums:
        label = plain_numbers(label)
        if label is not None and label != 0 and not is_whole(label):
            raise InvalidValueError(f"label of {name} is {label!r}; it must be a class, from 0")

        def of_rows(view: Seen) -> Tensor:
            scores = _classified(view, name)
            count = scores.shape[-1]
            if label is not None and label >= count:
                raise InvalidValueError(f"label of {name} is {label}; there are {count} classes")
            labels = functional.one_hot(_classes(view), count).bool()
            guesses = functional.one_hot(scores.argmax(-1), count).bool()
            guesses &= ~scores.isnan().any(-1, keepdim=True)
            return per_row(torch.cat([labels & guesses, guesses, labels], -1), view.counts)

        def finish(sums: Tensor) -> Tensor:
            values = value(*sums[:, :-1].chunk(3, 1))
            return values.nanmean(1) if label is None else values[:, label]

        return Sums(of_rows, finish)

    return make


def _share(part: Tensor, whole: Tensor, exists: Tensor) -> Tensor:
    """Return part/whole; 0 if whole is 0, and NaN if the class does not exist."""
    return torch.where(exists > 0.0, part / whole.clamp(min=1.0), torch.nan)


def _calibration_error(bins: int = 15) -> Sums:
    """Return the expected calibration error of Guo et al. 2017, equation 3.

    Bin m of M holds the targets whose largest probability is in ((m − 1)/M, m/M]. The error is the
    sum over bins of |number of correct predictions − Σ largest probabilities|, divided by the
    number of targets.
    """
    bins = plain_numbers(bins)
    check_range("bins of calibration-error", bins, "whole")

    def gaps(view: Seen) -> Tensor:
        confidence, predicted = _classified(view, "calibration-error").double().softmax(-1).max(-1)
        places = (confidence * bins).ceil().long().clamp(1, bins) - 1
        gap = (predicted == view.targets).double() - confidence
        in_bin = functional.one_hot(places, bins).bool()
        return per_row(torch.where(in_bin, gap[..., None], 0.0), view.counts)

    return Sums(gaps, lambda sums: sums[:, :-1].abs().sum(1) / sums[:, -1])


def _auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the receiver operating characteristic.

    Targets are 0 and 1 with scores [n], [n, 1] or [n, 2]. With more classes it is the mean, over
    classes that some but not all rows have, of the area for a class's probability against the rest.
    """
    outputs, classes = outputs.double(), targets.long().flatten()
    if outputs.dim() == targets.dim() + 1 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    if outputs.dim() == targets.dim() + 1:
        scores = outputs.movedim(1, -1)
        if scores.shape[-1] > 2:
            probabilities = scores.reshape(-1, scores.shape[-1]).softmax(1).unbind(1)
            areas = [_area(p, classes == number) for number, p in enumerate(probabilities)]
            numbers = [area for area in areas if not math.isnan(area)]
            return sum(numbers) / len(numbers) if numbers else math.nan
        outputs = scores[..., 1] - scores[..., 0]
    if outputs.shape != targets.shape:
        raise InvalidValueError(
            f"auc needs a score of each target, or of each class; outputs are "
            f"{list(outputs.shape)} and targets {list(targets.shape)}"
        )
    are_binary = bool(((targets == 0) | (targets == 1)).all())
    require(are_binary, "auc of one score, or of two, needs targets 0 and 1")
    return _area(outputs.flatten(), classes == 1)


def _area(scores: Tensor, positive: Tensor) -> float:
    """Return the share of pairs of a positive and a negative row in the right order; ties are ½.

    It is (R − n₁(n₁ + 1)/2)/(n₁·n₀), with R the sum of the ranks of positives (Hanley & McNeil
    1982); NaN if there are no pairs or a score is NaN.
    """
    n1 = int(positive.sum())
    pairs = n1 * (len(positive) - n1)
    if not pairs or bool(scores.isnan().any()):
        return math.nan
    _, places, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2.0  # equal scores share their mean rank
    return float(ranks[places[positive.numpy()]].sum() - n1 * (n1 + 1) / 2.0) / pairs


def class_name(number: int, classes: Sequence[str]) -> str:
    """Return a class's name in `classes`, "class 3" if the name is empty, "3" without names."""
    if not classes:
        return str(number)
    return (classes[number] if 0 <= number < len(classes) else "") or f"class {number}"


def _confusion(outputs: Tensor, targets: Tensor) -> dict[str | tuple[int, ...], float]:
    """Return the number of targets of each class that are predicted as each class, as "2 as 3"."""
    _check_scores(outputs, targets, "confusion")
    scores = outputs.movedim(1, -1).flatten(0, -2)
    single, count = scores.shape[-1] == 1, max(2, scores.shape[-1])
    if count > _MOST_CONFUSED:
        raise InvalidValueError(
            f"confusion has {count} classes; there must be at most {_MOST_CONFUSED}"
        )
    guesses = (scores[:, 0] > 0.0).long() if single else scores.argmax(-1)
    pairs = torch.bincount(targets.flatten().long() * count + guesses, minlength=count**2)
    names = ((label, guess) for label in range(count) for guess in range(count))
    return dict(zip(names, pairs.tolist(), strict=True))


FIGURES: Mapping[str, Callable[..., Figure]] = {
    "auc": lambda: _auc,
    "balanced-accuracy": partial(
        _of_classes("balanced-accuracy", lambda hit, _, labels: _share(hit, labels, labels)), None
    ),
    "calibration-error": _calibration_error,
    "confusion": lambda: _confusion,
    "f1": _of_classes(
        "f1", lambda hit, guesses, labels: _share(2 * hit, guesses + labels, guesses + labels)
    ),
    "mae": lambda: _mean_of(lambda view: _errors(view, "mae").abs()),
    "perplexity": _perplexity,
    "precision": _of_classes(
        "precision", lambda hit, guesses, labels: _share(hit, guesses, guesses + labels)
    ),
    "r2": _r2,
    "recall": _of_classes(
        "recall", lambda hit, guesses, labels: _share(hit, labels, guesses + labels)
    ),
    "rmse": lambda: _mean_of(lambda view: _errors(view, "rmse").square(), torch.sqrt),
    "top-k": _top_k,
}


@dataclass(frozen=True)
class Collected:
    """Outputs and targets that count, on the CPU, and the user of each row."""

    outputs: Tensor  # [n, …]; [n, K] if targets are classes
    targets: Tensor  # [n, …]; [n] if they are classes
    owners: Tensor  # [n], numbers of users

    @classmethod
    def of(cls, view: Seen, owners: Tensor) -> Self:
        """Collect rows [n]; every target that is a class becomes a separate row."""
        outputs, targets, counts = (t.cpu() for t in view[:3])
        owners = owners.cpu()
        if not targets.dtype.is_floating_point and targets.dim() > 0:
            if outputs.dim() == targets.dim() + 1:
                outputs = outputs.movedim(1, -1)
            if outputs.shape[: targets.dim()] == targets.shape:
                owners = owners.view(-1, *[1] * (targets.dim() - 1)).expand_as(targets)
                return cls(outputs[counts], targets[counts], owners[counts])
        rows = counts.flatten(1).any(1) if counts.dim() > 1 else counts
        return cls(outputs[rows], targets[rows], owners[rows])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate parts."""
        names = ("outputs", "targets", "owners")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def values(self, function: FigureFunction, classes: Sequence[str] = ()) -> dict[str, float]:
        """Return a figure of all rows under the name "", or its numbers by name.

        Without rows it is NaN. Errors of the function propagate. `classes` are as for `class_name`.
        """
        value = function(self.outputs, self.targets) if len(self.targets) else math.nan
        numbers = value if isinstance(value, Mapping) else {"": value}
        return {
            " as ".join(class_name(label, classes) for label in name)
            if isinstance(name, tuple)
            else str(name): float(number)
            for name, number in numbers.items()
        }

    def by_user(self, function: FigureFunction, users: int) -> npt.NDArray[np.float64]:
        """Return a figure of each user's rows, [U]; NaN if it cannot be computed."""
        order = torch.argsort(self.owners, stable=True)
        sizes = torch.bincount(self.owners, minlength=users).tolist()
        values = np.full(users, math.nan)
        for user, rows in enumerate(torch.split(order, sizes)):
            # A figure may need more than a user has, such as rows of both classes.
            with suppress(Exception):
                user_rows = Collected(self.outputs[rows], self.targets[rows], self.owners[rows])
                values[user] = user_rows.values(function)[""]
        return values


def spread_over_users(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return statistics of a figure, [U], over the users with a value other than NaN.

    They are the number of `users`, the `mean`, and the quantiles 10%, 50% and 90%, interpolated
    linearly (`q10`, `q50`, `q90`).
    """
    numbers = values[~np.isnan(values)]
    statistics = [math.nan] * 4
    if len(numbers):
        statistics = [float(numbers.mean()), *np.quantile(numbers, [0.1, 0.5, 0.9]).tolist()]
    names = ("mean", "q10", "q50", "q90")
    return {"users": float(len(numbers)), **dict(zip(names, statistics, strict=True))}
