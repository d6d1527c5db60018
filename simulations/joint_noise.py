"""Noise of separate and of joint clipping if each user has one of two vectors: the paper's example.

    python -m simulations.joint_noise

v_1 is bounded by a large norm and v_2 by a small one, and each user has only one of them that is
not zero (McMahan et al. 2018, section 3). None of the three clippings changes such a user, and all
have the same noise multiplier, so the same ε. They differ in the variance of the noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from fedpriv.experiment.grouping import proportional_shares
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianQuery, noise_stddevs, sensitivities
from fedpriv.privacy.layout import Layout, Tensors, VectorGroup, flat, joint, per_layer

LAYOUT = Layout(("v1", "v2"), ((100,), (100,)))
BOUNDS = {"v1": 10.0, "v2": 0.1}
NOISE_MULTIPLIER = 1.0
CLIPPINGS: dict[str, tuple[VectorGroup, ...]] = {
    "flat": flat(LAYOUT, max(BOUNDS.values())),
    "separate": per_layer(LAYOUT, {"v1": ("v1",), "v2": ("v2",)}, BOUNDS),
    "joint": joint(LAYOUT, 1.0, BOUNDS),
}


@dataclass(frozen=True)
class Noise:
    """The effect of one clipping on a sum over users."""

    clipping: str  # its name
    variances: dict[str, float]  # of the noise on each component of a tensor, by tensor
    clipped: bool  # whether a user at one of the bounds is clipped


def noises() -> Iterator[Noise]:
    """Yield the noise of each clipping, from its query."""
    for name, groups in CLIPPINGS.items():
        clipping = Clipping(LAYOUT, groups)
        shares = proportional_shares(groups)
        stddevs = noise_stddevs(sensitivities(clipping), NOISE_MULTIPLIER, shares)
        by_tensor = GaussianQuery(clipping, stddevs).tensor_stddevs
        yield Noise(
            name,
            {tensor: by_tensor[tensor] ** 2 for tensor in LAYOUT.names},
            any(_changes(clipping, user) for user in extreme_users()),
        )


def extreme_users() -> Iterator[Tensors]:
    """Yield the longest users: at one bound, and zero in the other vector."""
    for tensor, bound in BOUNDS.items():
        user = {name: np.zeros(100) for name in LAYOUT.names}
        user[tensor][0] = bound
        yield user


def _changes(clipping: Clipping, user: Tensors) -> bool:
    released = clipping.in_units(clipping.contribution(user))
    steps = clipping.in_units(np.ones(LAYOUT.dimension))
    return bool(np.any(np.abs(released - LAYOUT.flatten(user)) > 2.0 * steps))


def main() -> None:
    """Print the table."""
    table = Table(title=f"variance of the noise on a component, z = {NOISE_MULTIPLIER:g}")
    for column in ("clipping", *(f"{t}, norm ≤ {b:g}" for t, b in BOUNDS.items()), "clips"):
        table.add_column(column, justify="left" if column == "clipping" else "right")
    for noise in noises():
        values = (f"{variance:.4g}" for variance in noise.variances.values())
        table.add_row(noise.clipping, *values, "yes" if noise.clipped else "nobody")
    Console().print(table)


if __name__ == "__main__":
    main()
