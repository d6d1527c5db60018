"""Adaptive clipping norms: where they go, and what counting the clipped costs."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Indicator
from fedpriv.privacy.layout import VectorGroup
from fedpriv.training.plan import AdaptiveClipping


def test_a_step_by_hand() -> None:
    adaptive = AdaptiveClipping(quantile=0.5, learning_rate=0.2)
    # Nobody clipped: the norm is too large. Everybody clipped: too small.
    assert adaptive.step(2.0, 1.0) == pytest.approx(2.0 * math.exp(-0.1))
    assert adaptive.step(2.0, 0.0) == pytest.approx(2.0 * math.exp(0.1))
    assert adaptive.step(2.0, 0.5) == 2.0


def test_noise_moves_a_norm_no_further_than_any_fraction_could() -> None:
    adaptive = AdaptiveClipping(quantile=0.9, learning_rate=1.0)
    assert adaptive.step(1.0, 50.0) == adaptive.step(1.0, 1.0)
    assert adaptive.step(1.0, -50.0) == adaptive.step(1.0, 0.0)
    assert adaptive.step(1e-12, 1.0) == 1e-12
    assert adaptive.step(1e12, 0.0) == 1e12


@pytest.mark.parametrize("start", [1e-3, 1e3])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_norms_converge_to_the_quantile(start: float, quantile: float) -> None:
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0.0, 1.0, 2000))
    adaptive = AdaptiveClipping(quantile=quantile)
    norm = start
    for _ in range(300):
        norm = adaptive.step(norm, float((norms <= norm).mean()) + rng.normal(0.0, 0.02))
    assert norm == pytest.approx(float(np.quantile(norms, quantile)), rel=0.15)


def test_the_group_of_the_indicator_holds_any_of_its_values() -> None:
    for count in range(1, 200):
        groups = tuple(VectorGroup(f"g{i}", (f"t{i}",), 1.0, (1.0,)) for i in range(count))
        indicator = Indicator.of(groups)
        group = indicator.group
        assert indicator.groups == tuple(g.name for g in groups)
        assert 4 * Fraction(group.clipping_norm) ** 2 >= count
        assert group.clipping_norm == pytest.approx(math.sqrt(count) / 2)
        half = Fraction(1, 2) / Fraction(group.granularity)
        assert half.denominator == 1
        assert count * half**2 <= group.squared_bound


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantile", 0.0),
        ("quantile", 1.0),
        ("share", 0.0),
        ("share", math.nan),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
    ],
)
def test_bad_numbers_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=f"{field} of adaptive clipping is"):
        AdaptiveClipping(**{field: value})
