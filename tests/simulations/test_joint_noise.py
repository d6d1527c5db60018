"""What joint clipping saves: the example of two vectors, and that it is never behind separate."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.experiment.grouping import proportional_shares
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianQuery, noise_stddevs, sensitivities
from fedpriv.privacy.layout import Layout, VectorGroup, joint, per_layer
from simulations.joint_noise import BOUNDS, CLIPPINGS, LAYOUT, NOISE_MULTIPLIER, noises

THREE = Layout(("a", "b", "c"), ((2,), (3,), (1,)))
norms = st.floats(1e-3, 1e3)


def average(layout: Layout, groups: tuple[VectorGroup, ...]) -> GaussianQuery:
    clipping = Clipping(layout, groups)
    stddevs = noise_stddevs(sensitivities(clipping), 1.3, proportional_shares(groups))
    return GaussianQuery(clipping, stddevs)


def test_joint_clipping_needs_half_the_variance_of_separate_clipping() -> None:
    flat, separate, joint_ = noises()
    assert (flat.clipping, separate.clipping, joint_.clipping) == ("flat", "separate", "joint")
    assert [n.clipped for n in (flat, separate, joint_)] == [False] * 3
    for tensor, bound in BOUNDS.items():
        assert joint_.variances[tensor] == pytest.approx((NOISE_MULTIPLIER * bound) ** 2)
        assert separate.variances[tensor] == pytest.approx(2.0 * joint_.variances[tensor])
        assert flat.variances[tensor] == pytest.approx((NOISE_MULTIPLIER * BOUNDS["v1"]) ** 2)


def test_all_of_them_cost_the_same() -> None:
    for groups in CLIPPINGS.values():
        events = average(LAYOUT, groups).events
        multiplier = math.fsum((e.clipping_norm / e.noise_stddev) ** 2 for e in events) ** -0.5
        assert multiplier == pytest.approx(1.3)


@given(
    st.tuples(norms, norms, norms),
    hnp.arrays(np.float64, THREE.dimension, elements=st.floats(-1.0, 1.0)),
    norms,
)
def test_with_the_noise_of_separate_clipping_joint_clipping_clips_nobody_else(
    bounds: tuple[float, float, float], direction: np.ndarray, length: float
) -> None:
    by_tensor = dict(zip(THREE.names, bounds, strict=True))
    separate = average(THREE, per_layer(THREE, {name: (name,) for name in THREE.names}, by_tensor))
    together = average(THREE, joint(THREE, math.sqrt(3.0), by_tensor))
    assert together.tensor_stddevs == pytest.approx(separate.tensor_stddevs, rel=1e-9)
    user = THREE.unflatten(direction * length)
    if all(np.linalg.norm(user[name]) <= by_tensor[name] for name in THREE.names):
        clipping = together.clipping
        kept = clipping.in_units(clipping.contribution(user))
        steps = clipping.in_units(np.ones(THREE.dimension))
        assert np.all(np.abs(kept - THREE.flatten(user)) <= 3.0 * steps)
