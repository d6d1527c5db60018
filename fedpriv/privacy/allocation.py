"""How much of a round's privacy each vector group gets, and the noise that follows from it."""

import math
from collections.abc import Mapping

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import Layout


def proportional_shares(groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    """ω_g = 1/G: each group pays the same, so σ_g = z·√G·S_g."""
    return (1.0 / len(groups),) * len(groups)


def dimension_shares(layout: Layout, groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    """ω_g = d_g/D, so σ_g = z·S_g·√(D/d_g): noise in proportion to the largest RMS component."""
    return tuple(group.dimension(layout) / layout.dimension for group in groups)


def given_shares(
    groups: tuple[VectorGroup, ...], weights: Mapping[str, float]
) -> tuple[float, ...]:
    """ω_g in proportion to positive weights, one per group name.

    Raises:
        InvalidValueError: a group has no weight, a weight no group, or a weight is not positive.
    """
    names = [group.name for group in groups]
    if set(names) != set(weights):
        odd = sorted(set(names) ^ set(weights))
        raise InvalidValueError(f"weights and groups differ in {odd}; each of {names} needs one")
    for name, weight in weights.items():
        if not (weight > 0.0 and math.isfinite(weight)):
            raise InvalidValueError(f"weight of group {name!r} is {weight}; it must be positive")
    total = math.fsum(weights.values())
    return tuple(weights[name] / total for name in names)


def noise_stddevs(
    groups: tuple[VectorGroup, ...], noise_multiplier: float, shares: tuple[float, ...]
) -> tuple[float, ...]:
    """σ_g = z·S_g/√ω_g, under which the round's effective noise multiplier is z.

    By equation (1) of McMahan et al. 2018, z_eff = (Σ (S_g/σ_g)²)^(−1/2) = z·(Σ ω_g)^(−1/2) = z.
    The result is rounded up, so that the effective multiplier is never below z.

    Args:
        groups: the vector groups.
        noise_multiplier: z ≥ 0, the noise multiplier wanted of the whole round.
        shares: ω_g > 0, summing to 1 up to rounding.

    Raises:
        InvalidValueError: z is negative or not finite, or the shares are illegal.
    """
    if not (noise_multiplier >= 0.0 and math.isfinite(noise_multiplier)):
        raise InvalidValueError(
            f"noise_multiplier is {noise_multiplier}; it must be finite and not negative"
        )
    sums_to_one = math.isclose(math.fsum(shares), 1.0, rel_tol=1e-9)
    if len(shares) != len(groups) or min(shares) <= 0.0 or not sums_to_one:
        raise InvalidValueError(
            f"noise shares are {shares}; there must be {len(groups)} positive ones that sum to 1"
        )
    # One part in 2^40 covers the roundings here and in the effective multiplier.
    upward = noise_multiplier * (1.0 + 2.0**-40)
    return tuple(
        upward * group.clipping_norm * math.sqrt(math.fsum(shares) / share)
        for group, share in zip(groups, shares, strict=True)
    )
