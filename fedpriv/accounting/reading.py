"""ε and δ read off a composition of losses, with every error on the safe side."""

import math

import numpy as np

from fedpriv.accounting.fft import Composition
from fedpriv.accounting.rounds import Vector
from fedpriv.accounting.tilt import conversion


def epsilon_above(c: Composition, delta: float) -> float:
    """An ε ≥ 0 at which the divergence is surely at most δ."""
    finite = delta - c.infinite
    if finite <= 0:
        return math.inf
    log_mgf = c.log_mgf + c.mass_error
    chernoff = (log_mgf - math.log(finite) - conversion(c.tilt)) / c.tilt
    losses = _losses(c)
    surely = np.log(np.maximum(c.divergence, 0.0) + c.excess) + log_mgf - c.tilt * losses
    good = np.flatnonzero(surely <= math.log(finite))
    if len(good) == 0:
        return max(0.0, chernoff + c.slack)
    epsilon = float(losses[good[0]])
    if good[0] > 0:
        k = int(good[0]) - 1
        target = finite - c.excess * _exp(log_mgf - c.tilt * losses[k])
        epsilon = _crossing(c, k, target, log_mgf)
    return max(0.0, min(chernoff, epsilon) + c.slack)


def epsilon_below(c: Composition, delta: float) -> float:
    """An ε ≥ 0 at which the divergence is surely at least δ, or 0."""
    log_mgf = c.log_mgf - c.mass_error
    losses = _losses(c)
    sure = np.maximum(c.divergence - c.deficit, 1e-300)
    good = np.flatnonzero(np.log(sure) + log_mgf - c.tilt * losses >= math.log(delta))
    if len(good) == 0:
        return 0.0
    k = min(int(good[-1]), len(losses) - 2)
    target = delta + c.deficit * _exp(log_mgf - c.tilt * losses[k])
    return max(0.0, _crossing(c, k, target, log_mgf) - c.slack)


def delta_above(c: Composition, epsilon: float) -> float:
    """A bound that the divergence at ε surely does not pass."""
    log_mgf = c.log_mgf + c.mass_error
    at = epsilon - c.slack
    log_chernoff = log_mgf - c.tilt * at - conversion(c.tilt)
    finite = math.exp(min(0.0, log_chernoff))
    place = (at - c.start) / c.step
    if 0 <= place < len(c.divergence) - 1:
        wrong = c.excess * _exp(log_mgf - c.tilt * at)
        finite = min(finite, _divergence(c, int(place), at, log_mgf) + wrong)
    return min(1.0, finite + c.infinite)


def delta_below(c: Composition, epsilon: float) -> float:
    """A bound that the divergence at ε surely passes."""
    log_mgf = c.log_mgf - c.mass_error
    at = max(epsilon + c.slack, c.start)
    place = (at - c.start) / c.step
    if not place < len(c.divergence) - 1:
        return 0.0
    wrong = c.deficit * _exp(log_mgf - c.tilt * at)
    return max(0.0, _divergence(c, int(place), at, log_mgf) - wrong)


def _losses(c: Composition) -> Vector:
    return c.start + c.step * np.arange(len(c.divergence), dtype=np.float64)


def _ends(c: Composition, k: int, log_mgf: float) -> tuple[float, float, float]:
    """s = s_{k+1}, P(S > s_k) and the divergence at s, without tilt."""
    s = c.start + c.step * (k + 1)
    survival = float(c.survival[k]) * _exp(log_mgf - c.tilt * (s - c.step))
    return s, survival, float(c.divergence[k + 1]) * _exp(log_mgf - c.tilt * s)


def _divergence(c: Composition, k: int, epsilon: float, log_mgf: float) -> float:
    """E[(1 − e^{ε − S})_+] for ε in [s_k, s_{k+1}], where P(S > u) is constant."""
    s, survival, divergence = _ends(c, k, log_mgf)
    return divergence * math.exp(epsilon - s) - survival * math.expm1(epsilon - s)


def _crossing(c: Composition, k: int, target: float, log_mgf: float) -> float:
    """The ε in [s_k, s_{k+1}] with that divergence, or the nearer end."""
    s, survival, divergence = _ends(c, k, log_mgf)
    share = (target - divergence) / max(survival - divergence, 1e-300)
    if share >= -math.expm1(-c.step):
        return s - c.step
    return s + math.log1p(-max(share, 0.0))


def _exp(x: float) -> float:
    """e^x, or a number too large to matter."""
    return math.exp(min(x, 700.0))
