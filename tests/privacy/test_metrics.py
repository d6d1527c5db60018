"""Metrics: bounded vectors, their groups, and what a release says of them."""

import math

import numpy as np
import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianQuery, Metric
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import SeededEntropy

ACCURACY = Metric("accuracy", centre=0.5, radius=0.5)
COUNTS = Metric("counts", (3,), radius=2.0)


def query() -> GaussianQuery:
    layout = Layout(("w", ACCURACY.tensor, COUNTS.tensor), ((2,), (), (3,)))
    groups = (*flat(Layout(("w",), ((2,),)), 1.0), ACCURACY.group, COUNTS.group)
    return GaussianQuery(Clipping(layout, groups), (0.0, 0.0, 0.0), 4.0)


def test_the_average_of_a_metric_is_that_of_the_cohort_if_it_has_the_expected_size() -> None:
    of = query()
    clipping = of.clipping
    total = np.zeros(clipping.layout.dimension, np.int64)
    for accuracy in (0.2, 0.4, 0.9, 1.0):
        sent = {
            "w": np.zeros(2),
            ACCURACY.tensor: np.array(accuracy - ACCURACY.centre),
            COUNTS.tensor: np.array([1.0, 0.0, 10.0]),
        }
        total += clipping.contribution(sent)
    average, _ = of.noised_average(total, SeededEntropy(0), "test")
    released = clipping.layout.unflatten(average)
    accuracy = float(released[ACCURACY.tensor]) + ACCURACY.centre
    # Of four users, each truncated towards the centre by less than a step.
    assert abs(accuracy - 0.625) < ACCURACY.group.granularity
    counts = float(np.linalg.norm(released[COUNTS.tensor]))
    assert 2.0 * (1 - 2.0**-19) <= counts <= 2.0


def test_the_group_of_a_metric_is_all_of_it_within_its_radius() -> None:
    for metric in (ACCURACY, COUNTS):
        group = metric.group
        assert (group.name, group.tensors, group.scales) == (
            metric.tensor,
            (metric.tensor,),
            (1.0,),
        )
        assert group.clipping_norm == metric.radius


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name of a metric is ''"),
        ({"name": "a", "radius": 0.0}, "clipping_norm of group 'metrics/a' is 0.0"),
        ({"name": "a", "radius": math.nan}, "clipping_norm of group 'metrics/a' is nan"),
        ({"name": "a", "centre": math.inf}, "has centre inf"),
        ({"name": "a", "options": (1.0, math.nan)}, "must be finite"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Metric(**arguments)
