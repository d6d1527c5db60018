"""Figures on held-out rows against scikit-learn, and slow obvious code."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn import metrics as known
from torch import Tensor, nn

from fedpriv.data.population import HELD_OUT_USER
from fedpriv.engine.task import Task, squared_error
from fedpriv.errors import FedprivError, InvalidValueError, ModelError
from fedpriv.evaluation.held_out import check_held_out, evaluate
from fedpriv.measures.figures import ALWAYS, BETTER, FIGURES

CPU = torch.device("cpu")
ROWS = 4567  # more than are evaluated at once
RNG = np.random.default_rng(0)
SCORES = np.round(RNG.standard_normal((ROWS, 4)), 1).astype(np.float32)  # with ties
CLASSES = RNG.integers(0, 4, ROWS)


def found(x: np.ndarray, y: np.ndarray, figure: object, loss: object = None) -> float:
    """A figure of a model whose outputs are its inputs."""
    default = squared_error if y.dtype.kind == "f" else "cross-entropy"
    task = Task(nn.Identity(), loss or default, figures={"it": figure})
    evaluation = evaluate(task, {"x": x, "y": y}, CPU, {})
    assert not evaluation.failed
    return evaluation.figures["it"]


def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is of no interest."""
    return outputs[:, 0] + targets


def calibration_error(scores: np.ndarray, y: np.ndarray, bins: int) -> float:
    """By a loop over bins of (m − 1, m]/bins."""
    probabilities = softmax(scores.astype(np.float64), 1)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == y
    total = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return total / len(y)


def of_choices(score: Callable[..., float], **options: object) -> Callable[..., float]:
    """scikit-learn's score of the classes with the largest scores."""
    return lambda x, y: score(y, x.argmax(1), **options)


MACRO = {"average": "macro", "zero_division": 0.0}
SECOND = {"average": "macro", "labels": [2]}
OF_CLASSES: dict[str, tuple[object, Callable[[np.ndarray, np.ndarray], float]]] = {
    "top-1": ({"figure": "top-k", "k": 1}, lambda x, y: np.mean(x.argmax(1) == y)),
    "top-2": (
        {"figure": "top-k", "k": 2},
        lambda x, y: known.top_k_accuracy_score(y, x, k=2, labels=range(4)),
    ),
    "perplexity": (
        "perplexity",
        lambda x, y: math.exp(known.log_loss(y, softmax(x.astype(float), 1), labels=range(4))),
    ),
    "auc": (
        "auc",
        lambda x, y: known.roc_auc_score(
            y, softmax(x.astype(float), 1), multi_class="ovr", average="macro"
        ),
    ),
    "calibration-error": ("calibration-error", lambda x, y: calibration_error(x, y, 15)),
    "of 4 bins": (
        {"figure": "calibration-error", "bins": 4},
        lambda x, y: calibration_error(x, y, 4),
    ),
    "balanced-accuracy": ("balanced-accuracy", of_choices(known.balanced_accuracy_score)),
    "precision": ("precision", of_choices(known.precision_score, **MACRO)),
    "recall": ("recall", of_choices(known.recall_score, **MACRO)),
    "f1": ("f1", of_choices(known.f1_score, **MACRO)),
    "precision of 2": (
        {"figure": "precision", "label": 2},
        of_choices(known.precision_score, **SECOND),
    ),
    "recall of 2": ({"figure": "recall", "label": 2}, of_choices(known.recall_score, **SECOND)),
    "f1 of 2": ({"figure": "f1", "label": 2}, of_choices(known.f1_score, **SECOND)),
    "own": (
        lambda outputs, targets: (outputs.argmax(1) - targets).double().abs().mean(),
        lambda x, y: known.mean_absolute_error(y, x.argmax(1)),
    ),
}


@pytest.fixture(params=OF_CLASSES)
def of_classes(
    request: pytest.FixtureRequest,
) -> tuple[object, Callable[[np.ndarray, np.ndarray], float]]:
    # Among equal scores the choice is free: ties are for ranks alone.
    return OF_CLASSES[request.param]


def untied(name: object, scores: np.ndarray) -> np.ndarray:
    noise = 0.0 if name == "auc" else 1e-3
    return (scores + noise * np.random.default_rng(1).random(scores.shape)).astype(np.float32)


def test_figures_of_classes(of_classes: tuple[object, Callable[..., float]]) -> None:
    figure, expected = of_classes
    scores = untied(figure, SCORES)
    value = found(scores, CLASSES, figure)
    assert value == pytest.approx(expected(scores, CLASSES), rel=1e-5)


def test_positions_that_count_are_rows_of_their_own(
    of_classes: tuple[object, Callable[..., float]],
) -> None:
    figure, expected = of_classes
    scores = untied(figure, SCORES)[:4560].reshape(1520, 3, 4)
    y = CLASSES[:4560].reshape(1520, 3).copy()
    y[np.random.default_rng(2).random(y.shape) < 0.3] = -100
    y[5] = -100
    value = found(np.ascontiguousarray(scores.swapaxes(1, 2)), y, figure)
    assert value == pytest.approx(expected(scores[y >= 0], y[y >= 0]), rel=1e-5)


def test_classes_that_nobody_has_or_chooses_do_not_count() -> None:
    x = np.eye(4, dtype=np.float32)[[0, 0, 1, 1]]
    y = np.array([0, 1, 1, 2])  # 3 is neither there nor chosen, 2 is never chosen
    for name, score in {
        "precision": known.precision_score,
        "recall": known.recall_score,
        "f1": known.f1_score,
    }.items():
        assert found(x, y, name) == pytest.approx(score(y, x.argmax(1), **MACRO))
        assert math.isnan(found(x, y, {"figure": name, "label": 3}))
        assert found(x, y, {"figure": name, "label": 2}) == 0.0
    balanced = known.balanced_accuracy_score(y, x.argmax(1))
    assert found(x, y, "balanced-accuracy") == pytest.approx(balanced)


@pytest.mark.parametrize("outputs", [(ROWS,), (ROWS, 1)])
@pytest.mark.parametrize("targets", [(ROWS,), (ROWS, 1)])
@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int32, np.int64, np.float32])
def test_one_logit_is_measured_as_two_scores(
    outputs: tuple[int, ...], targets: tuple[int, ...], kind: type
) -> None:
    logits, y = untied("one", SCORES[:, 0]), CLASSES % 2
    names = ["auc", "balanced-accuracy", "calibration-error", "perplexity"]
    figures = {name: name for name in names} | {"f1": {"figure": "f1", "label": 1}}
    rows = {"x": logits.reshape(outputs), "y": y.reshape(targets).astype(kind)}
    task = Task(nn.Identity(), "binary-cross-entropy", figures=figures)
    if outputs == (ROWS,) and targets == (ROWS, 1):
        with pytest.raises(ModelError, match="under binary-cross-entropy they must have the same"):
            evaluate(task, rows, CPU, {})
        return
    evaluation = evaluate(task, rows, CPU, {})
    share, chosen = 1 / (1 + np.exp(-logits.astype(float))), logits > 0
    loss = known.log_loss(y, share)
    assert not evaluation.failed
    assert evaluation.loss == pytest.approx(loss, rel=1e-5)
    assert evaluation.accuracy == pytest.approx(known.accuracy_score(y, chosen))
    assert evaluation.figures == pytest.approx(
        {
            "auc": known.roc_auc_score(y, logits),
            "balanced-accuracy": known.balanced_accuracy_score(y, chosen),
            "calibration-error": calibration_error(np.stack([0 * logits, logits], 1), y, 15),
            "perplexity": math.exp(loss),
            "f1": known.f1_score(y, chosen),
        },
        rel=1e-4,
    )


def test_several_labels_of_a_row_are_measured_each_by_itself() -> None:
    logits, y = untied("many", SCORES), (CLASSES[:, None] == np.arange(4)).astype(np.float32)
    figures = {"auc": "auc", "f1": {"figure": "f1", "label": 1}}
    task = Task(nn.Identity(), "binary-cross-entropy", figures=figures)
    evaluation = evaluate(task, {"x": logits, "y": y}, CPU, {})
    assert evaluation.accuracy == pytest.approx(np.mean((logits > 0) == y))
    assert evaluation.figures["f1"] == pytest.approx(known.f1_score(y.ravel(), logits.ravel() > 0))
    assert evaluation.figures["auc"] == pytest.approx(
        known.roc_auc_score(y.ravel(), logits.ravel())
    )


def test_accuracy_of_one_score_is_of_classes_0_and_1_alone() -> None:
    logits, y = SCORES[:, :1], CLASSES % 2
    task = Task(nn.Identity(), first_output)  # a loss of one's own
    accuracy = evaluate(task, {"x": logits, "y": y}, CPU, {}).accuracy
    assert accuracy == pytest.approx(known.accuracy_score(y, logits[:, 0] > 0))
    assert evaluate(task, {"x": logits, "y": CLASSES}, CPU, {}).accuracy is None  # counts
    late = np.concatenate([y[:-1], [2]])  # in the last of several pieces
    assert evaluate(task, {"x": logits, "y": late}, CPU, {}).accuracy is None


def test_an_infinite_logit_chooses_a_class_and_nan_none() -> None:
    x = np.array([[np.inf], [-np.inf], [np.nan], [np.inf]], np.float32)
    task = Task(nn.Identity(), first_output)
    assert evaluate(task, {"x": x, "y": np.array([1, 0, 0, 0])}, CPU, {}).accuracy == 0.5


def test_one_score_has_no_cross_entropy() -> None:
    rows = {"x": SCORES[:8, :1], "y": CLASSES[:8] % 2}
    for y in (rows["y"], rows["y"].astype(np.float32)[:, None]):
        with pytest.raises(ModelError, match="one score; cross-entropy needs a score of"):
            check_held_out(Task(nn.Identity(), "cross-entropy"), {**rows, "y": y}, CPU)


def test_scores_that_are_no_numbers_are_never_right() -> None:
    x = np.full((3, 4), np.nan, np.float32)
    x[1, 1:], x[2] = 0.0, (0.0, 1.0, 0.0, 0.0)
    task = Task(nn.Identity(), figures={"first": {"figure": "top-k", "k": 1}})
    evaluation = evaluate(task, {"x": x, "y": np.array([0, 0, 1])}, CPU, {})
    assert evaluation.accuracy == evaluation.figures["first"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("mae", known.mean_absolute_error),
        ("rmse", known.root_mean_squared_error),
        ("r2", known.r2_score),
    ],
)
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2)])
def test_figures_of_numbers(
    figure: str, expected: Callable[..., float], shape: tuple[int, ...]
) -> None:
    x, y = (RNG.standard_normal(shape).astype(np.float32) for _ in range(2))
    rows = [column.astype(np.float64) for column in (y, x)]
    if figure != "r2":  # which is the mean over columns
        rows = [column.ravel() for column in rows]
    assert found(x, y, figure) == pytest.approx(expected(*rows), rel=1e-6)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_the_area_of_two_classes(kind: type) -> None:
    y, score = RNG.integers(0, 2, ROWS), SCORES[:, 0]
    area = known.roc_auc_score(y, score)
    assert found(score[:, None], y.astype(kind), "auc", first_output) == pytest.approx(area)
    both = np.stack([-score, score], 1)
    assert found(both, y, "auc") == pytest.approx(area)
    assert found(score, y.astype(np.float32), "auc") == pytest.approx(area)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=20))
def test_the_area_is_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a, one in rows if one for b, other in rows if not other]
    scores = torch.tensor([float(score) for score, _ in rows])
    value = FIGURES["auc"]()(scores, torch.tensor([float(one) for _, one in rows]))
    assert math.isnan(value) if not pairs else value == pytest.approx(np.mean(pairs))


def owners_of(rows: int, users: int) -> np.ndarray:
    return np.array([f"person {n}" for n in np.random.default_rng(4).integers(0, users, rows)])


@pytest.mark.parametrize("name", ["accuracy", "loss", "auc", "calibration-error", "own"])
def test_figures_by_user_are_those_of_each_users_rows_alone(name: str) -> None:
    own = {"own": lambda outputs, targets: float((outputs.argmax(1) == targets).sum())}
    figures = {n: own.get(n, n) for n in ("auc", "calibration-error", "own")}
    task, owners = Task(nn.Identity(), "cross-entropy", figures=figures), owners_of(ROWS, 30)
    rows = {"x": SCORES, "y": CLASSES}
    whole = evaluate(task, {**rows, HELD_OUT_USER: owners}, CPU, {})
    values = []
    for user in np.unique(owners):
        alone = evaluate(task, {n: column[owners == user] for n, column in rows.items()}, CPU, {})
        assert alone.held_out_users == {}
        values.append({"accuracy": alone.accuracy, "loss": alone.loss, **alone.figures}[name])
    told = whole.held_out_users[name]
    assert told["users"] == 30
    assert told["mean"] == pytest.approx(np.mean(values))
    for key, share in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9)):
        assert told[key] == pytest.approx(np.quantile(values, share))
    assert told["q10"] < told["q50"] < told["q90"]
    without = evaluate(task, rows, CPU, {})
    assert without.figures == pytest.approx(whole.figures)
    assert (without.loss, without.accuracy) == pytest.approx((whole.loss, whole.accuracy))


def test_users_for_whom_a_figure_is_no_number_are_left_out() -> None:
    x, y = np.array([0.5, 2.0, 1.0, 3.0], np.float32), np.array([0, 1, 1, 1], np.float32)
    task = Task(nn.Identity(), squared_error, figures={"auc": "auc"})
    rows = {"x": x, "y": y, HELD_OUT_USER: np.array([7, 7, 9, 9])}
    told = evaluate(task, rows, CPU, {}).held_out_users
    assert told["auc"] == {"users": 1, "mean": 1.0, "q10": 1.0, "q50": 1.0, "q90": 1.0}
    assert told["loss"]["users"] == 2
    assert "accuracy" not in told


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"a": "acu"}, "figure 'a' is 'acu', which is unknown"),
        ({"a": {"figure": "top-k", "kk": 3}}, "no option 'kk'"),
        ({"a": {"figure": "top-k", "k": 0}}, "k of top-k is 0"),
        ({"a": {"figure": "f1", "label": -1}}, "label of f1 is -1"),
        ({"a": {"figure": "balanced-accuracy", "label": 1}}, "'a' takes no options"),
        ({"a": {"figure": "calibration-error", "bins": 2.5}}, "bins .* is 2.5"),
        ({"a": {"k": 2}}, "its key figure must be a name"),
        ({"a": 3}, "figure 'a' is 3"),
        ({"a": "nowhere:auc"}, "figure 'a' cannot be imported"),
        ({"loss": "auc"}, "figure 'loss' is always measured"),
    ],
)
def test_figures_that_cannot_be_made_are_refused(figures: dict[str, object], message: str) -> None:
    with pytest.raises(FedprivError, match=message):
        Task(nn.Identity(), "cross-entropy", figures=figures)


def test_it_is_known_which_way_each_is_better() -> None:
    assert BETTER.keys() == {*ALWAYS, *FIGURES} - {"confusion"}  # which is no single number


def test_what_is_measured_in_any_case_may_be_named() -> None:
    named = {"loss": "loss", "accuracy": "accuracy"}
    assert Task(nn.Identity(), "cross-entropy", figures=named).figures == {}


def raising(outputs: Tensor, targets: Tensor) -> float:
    raise RuntimeError("no such thing")


def spoilt(outputs: Tensor, targets: Tensor) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        (raising, "figure 'it' cannot be computed on the held-out rows: no such thing"),
        (spoilt, "figure 'it' of the 40 held-out rows is nan at the initial parameters"),
        ({"figure": "top-k", "k": 5}, "k of top-k is 5"),
        ({"figure": "f1", "label": 4}, "label of f1 is 4"),
        ("mae", "mae needs outputs like targets; outputs are"),
    ],
)
def test_figures_that_cannot_be_computed_are_refused_by_name(figure: object, message: str) -> None:
    task = Task(nn.Identity(), "cross-entropy", figures={"it": figure})
    rows = {"x": SCORES[:40], "y": CLASSES[:40]}
    with pytest.raises(ModelError, match=message):
        check_held_out(task, rows, CPU)
    # Of a run that has spent already, it is no number, and the others stand.
    found = evaluate(task, rows, CPU, {})
    assert math.isnan(found.figures["it"])
    assert math.isfinite(found.loss)


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    x, y = np.ones((5, 1), np.float32), np.ones(5, np.float32)
    task = Task(nn.Identity(), first_output, figures={"mae": "mae"})
    assert (
        "outputs are [5, 1] and targets [5]"
        in evaluate(task, {"x": x, "y": y}, CPU, {}).failed["mae"]
    )


def test_the_value_of_an_unknown_kind_is_named() -> None:
    with pytest.raises(InvalidValueError, match="figure 'a' is None"):
        Task(nn.Identity(), "cross-entropy", figures={"a": None})


@pytest.mark.parametrize("single", [False, True])
def test_the_confusion_matrix_is_that_of_scikit_learn(single) -> None:
    x, y, count = (SCORES[:, :1], CLASSES % 2, 2) if single else (SCORES, CLASSES, 4)
    loss = "binary-cross-entropy" if single else "cross-entropy"
    task = Task(nn.Identity(), loss, figures={"matrix": "confusion"})
    figures = evaluate(task, {"x": x, "y": y}, CPU, {}).figures
    chosen = (x[:, 0] > 0.0).astype(int) if single else x.argmax(1)
    expected = known.confusion_matrix(y, chosen, labels=range(count))
    assert figures == {
        f"matrix: {true} as {taken}": expected[true, taken]
        for true in range(count)
        for taken in range(count)
    }


def test_the_confusion_of_many_classes_or_of_numbers_is_refused() -> None:
    for x, y, loss in (
        (np.zeros((4, 21), np.float32), np.arange(4), "cross-entropy"),
        (np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32), "mse"),
    ):
        task = Task(nn.Identity(), loss, figures={"matrix": "confusion"})
        with pytest.raises(ModelError, match=r"'matrix'.*confusion"):
            check_held_out(task, {"x": x, "y": y}, CPU)
