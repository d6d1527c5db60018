"""δ of one round in closed form, at 60 digits."""

import mpmath

from fedpriv.accounting.round_counts import Direction


def gaussian_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Of a Gaussian of sensitivity/stddev μ (Balle & Wang 2018, Theorem 8)."""
    with mpmath.workdps(60):
        mu, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        upper = mpmath.ncdf(mu / 2 - e / mu)
        return upper - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)


def poisson_delta(q: float, z: float, epsilon: float, direction: Direction) -> mpmath.mpf:
    """E[(1 − e^{ε − L})_+] of a sampled round, from the output where the loss passes ε."""
    with mpmath.workdps(60):
        q, z, e = mpmath.mpf(q), mpmath.mpf(z), mpmath.mpf(epsilon)
        rise = (mpmath.exp(direction * e) - 1 + q) / q
        if rise <= 0:  # every loss is on one side of ε
            return 1 - mpmath.exp(e) if direction is Direction.REMOVE else mpmath.mpf(0)
        x = z**2 * mpmath.log(rise) + mpmath.mpf(1) / 2
        if direction is Direction.REMOVE:
            absent, present = mpmath.ncdf(-x / z), mpmath.ncdf((1 - x) / z)
            return (1 - q) * absent + q * present - mpmath.exp(e) * absent
        absent, present = mpmath.ncdf(x / z), mpmath.ncdf((x - 1) / z)
        return absent - mpmath.exp(e) * ((1 - q) * absent + q * present)


def one_round_delta(q: float, z: float, epsilon: float) -> mpmath.mpf:
    """Of a sampled round in the worse direction."""
    return max(poisson_delta(q, z, epsilon, direction) for direction in Direction)
