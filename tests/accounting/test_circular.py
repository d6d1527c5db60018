"""Transforms and their powers against wider arithmetic, and the bounds on their errors."""

import math

import mpmath
import numpy as np
import pytest
from scipy.fft import irfft, rfft

from fedpriv.accounting.pld import fft as circular

INDEX = np.arange(-20, 21)
MASS = np.exp(-(INDEX**2) / 50)


def test_sums_are_convolutions_on_a_circle() -> None:
    first, second = np.array([0.2, 0.5, 0.3]), np.array([0.1, 0.9])
    indices = [np.array([-1, 0, 7]), np.array([0, 3])]
    mass, origin, error = circular.circular_sum(indices, [first, second], [2, 1], 16, math.inf)
    exact = np.zeros(16)
    for i, a in zip(indices[0], first, strict=True):
        for j, b in zip(indices[0], first, strict=True):
            for k, c in zip(indices[1], second, strict=True):
                exact[(i + j + k - origin) % 16] += a * b * c
    assert (np.abs(mass - exact) <= error + 1e-15 * exact).all()
    assert error < 1e-16


@pytest.mark.parametrize("count", [1, 100, 100_000])
def test_rounding_is_within_its_bound(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Double precision against the widest type, on the same circle.
    size = 8192
    results = []
    for cheap_size in (0, size):
        monkeypatch.setattr(circular, "_CHEAP_SIZE", cheap_size)
        total = MASS.sum()
        results.append(circular.circular_sum([INDEX], [MASS / total], [count], size, math.inf))
    (double, origin, bound), (wide, same, _) = results
    assert origin == same
    assert 0 < float(np.linalg.norm(double - wide)) <= bound
    assert bound <= 1e-12 * count


def adversarial(size: int) -> dict[str, np.ndarray]:
    """Inputs on which rounding errors of a transform pile up, or hide."""
    rng = np.random.default_rng(7)
    k = np.arange(size)
    return {
        "noise": rng.standard_normal(size),
        "positive": rng.exponential(size=size),
        "one": np.where(k == 1, 1.0, 0.0),
        "last": np.where(k == size - 1, 1 / 3, 0.0),
        "constant": np.full(size, 0.1),
        "alternating": np.where(k % 2 == 0, 0.1, -0.1),
        "wave": np.cos(2 * np.pi * 3 * k / size + 0.3),
        "chirp": np.cos(np.pi * k * k / size),
        "steep": np.exp(-0.7 * np.minimum(k, 300)),
        "huge beside tiny": np.where(k == size // 3, 1e9, rng.random(size)),
    }


def half_norm(transform: np.ndarray) -> float:
    """Euclidean norm of a whole transform, of which half is given."""
    squares = np.abs(transform.astype(np.clongdouble)) ** 2
    return float(np.sqrt(2 * squares[1:-1].sum() + squares[0] + squares[-1]))


@pytest.mark.parametrize("size", [2, 4, 8, 64, 4096, 1 << 17])
def test_transforms_in_double_precision_are_within_their_bound(size: int) -> None:
    for x in adversarial(size).values():
        wide = rfft(x.astype(np.longdouble))
        allowed = circular.transform_error(np.float64, size)
        assert half_norm(rfft(x) - wide) <= allowed * half_norm(wide)
        back = irfft(wide.astype(np.complex128), size)
        exact = irfft(wide.astype(np.complex128).astype(np.clongdouble), size)
        error = np.linalg.norm((back - exact).astype(np.float64))
        assert error <= allowed * np.linalg.norm(exact.astype(np.float64))


@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_transforms_in_the_widest_type_are_within_their_bound(size: int) -> None:
    with mpmath.workdps(40):
        roots = [mpmath.expjpi(mpmath.mpf(-2 * k) / size) for k in range(size)]
        for name, x in adversarial(size).items():
            values = [mpmath.mpf(float(each)) for each in x]
            exact = [
                mpmath.fdot(values, (roots[j * k % size] for k in range(size)))
                for j in range(size // 2 + 1)
            ]
            found = rfft(x.astype(np.longdouble))
            gaps = np.array(
                [
                    float(abs(as_mpmath(f.real) + 1j * as_mpmath(f.imag) - e))
                    for f, e in zip(found, exact, strict=True)
                ]
            )
            assert half_norm(gaps) <= circular.transform_error(np.longdouble, size) * half_norm(
                found
            ), name


def as_mpmath(x: np.longdouble) -> mpmath.mpf:
    """Exactly, as two doubles."""
    high = float(x)
    return mpmath.mpf(high) + mpmath.mpf(float(x - np.longdouble(high)))


def test_the_bound_is_not_far_from_what_happens() -> None:
    # A bound a hundred times as large would hide a wrong transform.
    x = adversarial(4096)["noise"]
    wide = rfft(x.astype(np.longdouble))
    assert half_norm(rfft(x) - wide) > 1e-3 * circular.transform_error(
        np.float64, 4096
    ) * half_norm(wide)
