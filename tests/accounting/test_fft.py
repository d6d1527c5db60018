"""The tilted transform against direct convolution, and its bounds on its own errors."""

import math

import numpy as np
import pytest
from scipy.special import logsumexp

from fedpriv.accounting.pld import fft
from fedpriv.accounting.pld.fft import FftWindow, compose_atoms
from fedpriv.accounting.pld.lattice import LossAtoms

STEP = 0.1


def atoms(offset: float, index: list[int], mass: list[float], infinite: float = 0.0) -> LossAtoms:
    return LossAtoms(offset, np.array(index), np.array(mass), np.full(len(index), 1e-15), infinite)


COIN = atoms(0.02, [-3, 1, 2, 9], [0.3, 0.45, 0.2, 0.05])
RARE = atoms(-0.001, [-1, 0, 40, 300], [0.01, 0.989898, 1e-4, 2e-6], infinite=1e-13)
SPREAD = atoms(0.0, list(range(-20, 21)), list(np.exp(-(np.arange(-20, 21) ** 2) / 50) / 12.533))


def convolved(parts: list[tuple[LossAtoms, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Losses and masses of the sum, by convolving one round after the other."""
    mass, first, offset = np.ones(1), 0, 0.0
    for part, count in parts:
        dense = np.zeros(part.index.max() - part.index.min() + 1)
        dense[part.index - part.index.min()] = part.mass
        for _ in range(count):
            mass = np.convolve(mass, dense)
        first += count * int(part.index.min())
        offset += count * part.offset
    return offset + STEP * (first + np.arange(len(mass))), mass


def divergence(losses: np.ndarray, mass: np.ndarray, epsilon: float) -> float:
    return float(mass @ -np.expm1(np.minimum(epsilon - losses, 0.0)))


@pytest.mark.parametrize(
    ("parts", "tilt"),
    [
        ([(COIN, 1)], 0.3),
        ([(COIN, 1)], 6.0),
        ([(COIN, 60)], 0.3),
        ([(COIN, 60)], 6.0),
        ([(RARE, 50)], 0.1),
        ([(RARE, 50)], 0.4),
        ([(SPREAD, 30)], 2.0),
        ([(COIN, 7), (RARE, 20), (SPREAD, 3)], 0.3),
    ],
)
def test_composition_is_direct_convolution(parts: list[tuple[LossAtoms, int]], tilt: float) -> None:
    composition = compose_atoms(parts, FftWindow(STEP, tilt, 1.0, 1.0, 30.0, 14.0))
    losses, mass = convolved(parts)
    log_mgf = float(logsumexp(tilt * losses, b=mass))
    assert composition.log_mgf == pytest.approx(log_mgf, rel=1e-12, abs=1e-12)
    total = sum(count for _, count in parts)
    assert composition.infinite == pytest.approx(sum(n * p.infinite for p, n in parts), abs=1e-300)
    assert total * 1e-15 * 0.99 <= composition.slack <= 1e-11
    for k in range(0, len(composition.divergence), max(1, len(composition.divergence) // 40)):
        epsilon = composition.start + STEP * k
        scale = math.exp(tilt * epsilon - log_mgf)
        exact = divergence(losses, mass, epsilon - 1e-12) * scale
        assert exact <= composition.divergence[k] + composition.excess + 1e-9 * exact
        exact = divergence(losses, mass, epsilon + 1e-12) * scale
        assert exact >= composition.divergence[k] - composition.deficit - 1e-9 * exact
        survival = float(mass[losses > epsilon + STEP / 2].sum()) * scale
        assert composition.survival[k] == pytest.approx(survival, rel=1e-6, abs=1e-9)


def test_the_tilt_keeps_tiny_probabilities() -> None:
    # At this ε the answer is 1e-25, far below the rounding of probabilities near 1.
    parts = [(COIN, 60)]
    losses, mass = convolved(parts)
    composition = compose_atoms(parts, FftWindow(STEP, 4.0, 1.0, 1.0, 30.0, 14.0))
    k = int(np.argmax(losses > 45.0))
    exact = divergence(losses, mass, float(losses[k]))
    assert exact < 1e-25
    at = round((losses[k] - composition.start) / STEP)
    value = composition.divergence[at] * math.exp(composition.log_mgf - 4.0 * losses[k])
    assert value == pytest.approx(exact, rel=1e-6)


def test_what_wraps_around_is_bounded() -> None:
    # A window much too shallow: the transform is visibly wrong, and says so.
    parts = [(COIN, 60)]
    losses, mass = convolved(parts)
    composition = compose_atoms(parts, FftWindow(STEP, 0.5, 0.5, 0.5, 1.0, 1.0))
    errors = []
    for k in range(len(composition.divergence)):
        epsilon = composition.start + STEP * k
        scale = math.exp(0.5 * epsilon - composition.log_mgf)
        errors.append(composition.divergence[k] - divergence(losses, mass, epsilon) * scale)
    assert max(np.abs(errors)) > 1e-6
    assert max(errors) <= composition.deficit
    assert -min(errors) <= composition.excess


def test_too_many_points_leave_the_moment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, window = [(COIN, 60), (RARE, 5)], FftWindow(STEP, 0.3, 1.0, 1.0, 30.0, 14.0)
    whole = compose_atoms(parts, window)
    monkeypatch.setattr(fft, "_LARGEST_SIZE", 64)
    none = compose_atoms(parts, window)
    assert len(none.survival) == len(none.divergence) == 0
    assert (none.log_mgf, none.infinite) == (whole.log_mgf, whole.infinite)
    assert 65e-12 <= none.mass_error <= whole.mass_error
    assert none.slack >= 65 * 0.99e-15


def test_sizes_are_powers_of_two() -> None:
    for depth in (2.0, 5.0, 30.0, 80.0):
        composition = compose_atoms([(COIN, 60)], FftWindow(STEP, 0.5, 0.5, 0.5, depth, 1.0))
        assert len(composition.survival).bit_count() == 1


def test_weight_norm_bounds_every_phase() -> None:
    for step in (1e-3, 0.1, 2.0):
        for tilt in (1e-3, 0.5, 7.0, 1e4):
            bound = fft._weight_norm(step, tilt)
            for phase in (1e-6, 0.3, 0.9):
                u = step * (phase + np.arange(int(min(1e6, 40 / tilt / step + 2))))
                weights = np.exp(-tilt * u) * -np.expm1(-u)
                assert math.sqrt(float(weights @ weights)) <= bound
