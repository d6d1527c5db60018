"""Asking for metrics: bounds from few numbers, and refusal of what cannot be computed."""

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.engine.measuring import check_metrics
from fedpriv.engine.task import Task, cross_entropy, squared_error
from fedpriv.errors import FedprivError, InvalidValueError, ModelError
from fedpriv.measures.metrics import metric, own_metrics
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, flat

BLANK = {"x": np.zeros((1, 6), np.float32), "y": np.zeros(1, np.int64)}


def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    probabilities = outputs.softmax(1)
    return -(probabilities * probabilities.log()).sum(1)


def averaging(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return entropy(outputs, targets).mean(0, keepdim=True)


def raising(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such thing")


def make_task(**changes: object) -> Task:
    own = {"own": entropy, "averaging": averaging, "raising": raising}
    return Task(nn.Linear(6, 3), cross_entropy, metrics=own, **changes)


def clipping_for(task: Task, *metrics: Metric) -> Clipping:
    """As a plan makes it: the update flat, a group for each metric, and an indicator."""
    layout = Layout.of(task.parameters())
    update = flat(layout, 1.0)
    indicator = Indicator.of(update)
    names = (*layout.names, *(m.tensor for m in metrics), indicator.tensor)
    shapes = (*layout.shapes, *(m.shape for m in metrics), (1,))
    groups = (*update, *(m.group for m in metrics), indicator.group)
    return Clipping(Layout(names, shapes), groups, indicator)


def check(task: Task, *metrics: Metric) -> None:
    check_metrics(task, metrics, clipping_for(task, *metrics), BLANK)


@pytest.mark.parametrize(
    ("made", "shape", "low", "high"),
    [
        (metric("loss", bound=5.0), (), 0.0, 5.0),
        (metric("accuracy"), (), 0.0, 1.0),
        (metric("examples", cap=300), (), 0.0, 300.0),
        (metric("label-counts", classes=10, bound=40.0), (10,), -40.0, 40.0),
        (metric("batch-norm", channels=7, bound=3.0), (14,), -3.0, 3.0),
        (metric("package.module:function", radius=2.0), (), -2.0, 2.0),
        (metric("a:b", radius=2.0, centre=1.0, shape=[2, 3]), (2, 3), -1.0, 3.0),
    ],
    ids=lambda value: value.name if isinstance(value, Metric) else "",
)
def test_bounds_follow_from_the_numbers(
    made: Metric, shape: tuple[int, ...], low: float, high: float
) -> None:
    assert made.shape == shape
    assert (made.centre - made.radius, made.centre + made.radius) == (low, high)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_any_norm_indicator_fits_the_radius(count: int) -> None:
    made = metric("update-norms:update", thresholds=[2.0**i for i in range(count)])
    assert made.shape == (count,)
    assert count / 4 <= made.radius**2 <= count / 4 * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("los", {}, "unknown metric 'los'"),
        ("update-norms", {"thresholds": [1.0]}, "did you mean 'update-norms:GROUP'"),
        ("loss", {}, "needs the option 'bound'"),
        ("loss", {"bund": 1.0}, "no option 'bund'"),
        ("loss", {"bound": 0.0}, "bound of metric 'loss' is 0.0"),
        ("loss", {"bound": float("inf")}, "positive"),
        ("loss", {"bound": "5"}, "is '5'"),
        ("examples", {"cap": -1}, "cap .* is -1"),
        ("label-counts", {"classes": 2.5, "bound": 1.0}, "classes .* is 2.5"),
        ("batch-norm", {"channels": 0, "bound": 1.0}, "channels .* is 0"),
        ("update-norms:update", {"thresholds": []}, "at least one"),
        ("update-norms:update", {"thresholds": 3.0}, "is 3.0; it must be a list"),
        ("update-norms:update", {"thresholds": [1.0, -1.0]}, "is -1.0; it must be positive"),
        ("a:b", {"radius": 1.0, "shape": [0]}, "shape .* is 0; it must be a whole"),
        ("a:b", {"radius": 1.0, "shape": 3}, "is 3; it must be a list"),
        ("a:b", {"radius": 1.0, "centre": "0"}, "centre .* is '0'"),
    ],
)
def test_bad_numbers_are_refused(name: str, numbers: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        metric(name, **numbers)


def test_good_metrics_pass() -> None:
    task = make_task()
    check(
        task,
        metric("loss", bound=5.0),
        metric("accuracy"),
        metric("examples", cap=10),
        metric("label-counts", classes=3, bound=5.0),
        metric("update-norms:update", thresholds=[0.1, 1.0]),
        Metric("own"),
    )


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (Metric("los"), InvalidValueError, "unknown metric 'los'"),
        (Metric("os:getcwd"), InvalidValueError, "unknown metric 'os:getcwd'"),
        (Metric("loss", (2,)), InvalidValueError, r"gives shape \[2\] for 2 .* must be \[2, 2\]"),
        (Metric("examples"), InvalidValueError, r"options \(\); it must have one, the cap"),
        (Metric("averaging"), InvalidValueError, r"gives shape \[1\] for 2 examples"),
        (Metric("raising"), ModelError, "'raising' cannot be computed: no such thing"),
        (Metric("batch-norm", (4,)), InvalidValueError, "needs a model with batch normalisation"),
        (
            metric("update-norms:updat", thresholds=[1.0]),
            InvalidValueError,
            "did you mean 'update'",
        ),
        (
            metric("update-norms:unclipped", thresholds=[1.0]),
            InvalidValueError,
            "group 'unclipped'",
        ),
        (
            Metric("update-norms:update", (2,), options=(1.0,)),
            InvalidValueError,
            r"shape \(2,\) for 1 thresholds",
        ),
    ],
)
def test_metrics_that_cannot_be_computed_are_refused(
    asked: Metric, error: type[FedprivError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(make_task(), asked)


@pytest.mark.parametrize("name", ["accuracy", "loss", "batch-norm"])
def test_an_own_metric_must_not_be_named_as_one_that_is_built_in(name: str) -> None:
    task = Task(nn.Linear(6, 3), cross_entropy, metrics={name: entropy})
    with pytest.raises(InvalidValueError, match=f"'{name}' is built in; the task's own metric"):
        check(task, Metric(name))


@pytest.mark.parametrize("name", ["accuracy", "label-counts"])
def test_classes_must_be_integers(name: str) -> None:
    task = Task(nn.Linear(6, 6), squared_error, targets="x")
    asked = Metric(name, () if name == "accuracy" else (3,))
    with pytest.raises(InvalidValueError, match=r"targets (are|of) torch\.float32"):
        check(task, asked)


def test_accuracy_needs_scores() -> None:
    task = Task(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), squared_error)
    with pytest.raises(
        InvalidValueError,
        match=r"scores with one more axis; targets are .* and outputs \[2\]",
    ):
        check(task, metric("accuracy"))


def test_metrics_without_a_place_in_contributions_are_refused() -> None:
    task = make_task()
    with pytest.raises(InvalidValueError, match="no place for it"):
        check_metrics(task, [metric("accuracy")], clipping_for(task), BLANK)


def test_checking_leaves_model_and_generator_alone() -> None:
    task = Task(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), cross_entropy)
    before, state = task.parameters(), torch.random.get_rng_state()
    check(task, metric("loss", bound=1.0))
    assert torch.equal(state, torch.random.get_rng_state())
    assert task.model.training
    for name, parameter in task.parameters().items():
        np.testing.assert_array_equal(parameter, before[name])


def test_own_metrics_are_imported_by_name_and_nothing_else_is() -> None:
    names = ["loss", "update-norms:update", "fedpriv.engine.task:squared_error"]
    assert own_metrics(names) == {"fedpriv.engine.task:squared_error": squared_error}
    for name in ("nowhere:metric", "fedpriv.experiment.models:none"):
        with pytest.raises(ModelError, match=f"metric '{name}' cannot be imported"):
            own_metrics([name])
