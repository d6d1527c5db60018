"""What a report of a run is made from: what its folder and its ledger hold, and versions."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedpriv import __version__
from fedpriv.accounting.pricing import LedgerContent
from fedpriv.ledger.ledger import Head
from fedpriv.training.rounds import RoundResult

Figures = Mapping[str, float | None]
"""Numbers by name; None where nobody contributed."""


@dataclass(frozen=True)
class SimulationOnlyRound:
    """True figures of one round of a simulation. Publishing one breaks the users' guarantee.

    A figure is None in a round to which nobody contributed.

    Attributes:
        round: number of the round, from 0.
        simulation_only_group_norms: mean norm of users' updates before clipping, by vector group,
            in the units of its clipping norm.
        simulation_only_update_norms: mean L2 norm of users' updates before clipping, by layer.
        simulation_only_clipped: share of users that were clipped, by vector group.
        simulation_only_signal_to_noise: norm of the sum of clipped updates over the root mean
            square norm of its noise, by layer.
        attempt: number of the attempt, from 0.
    """

    round: int
    simulation_only_group_norms: Figures = field(default_factory=dict)
    simulation_only_update_norms: Figures = field(default_factory=dict)
    simulation_only_clipped: Figures = field(default_factory=dict)
    simulation_only_signal_to_noise: Figures = field(default_factory=dict)
    attempt: int = 0

    @property
    def number(self) -> int:
        """Rounds released so far, this one included."""
        return self.round + 1


@dataclass(frozen=True)
class Verification:
    """What was checked of a ledger before anything was said of it.

    Attributes:
        head: the end of its hash chain.
        cohorts: whether every cohort was held against its commitment.
        releases: releases of the run whose charges were found in the ledger.
    """

    head: Head
    cohorts: bool
    releases: int


@dataclass(frozen=True)
class RunRecord:
    """A run, read and believed.

    Attributes:
        name: of the run in its ledger.
        folder: where it lies.
        plan: text of its resolved plan.
        rounds_planned: T of the plan.
        delta: δ of the plan.
        budget: ε of the plan; None if it had no budget.
        accountant: by whose ε the plan was held against its budget.
        ledger: what was charged, also by other runs over the same users.
        verification: what was checked of the ledger.
        rounds: what was released, in order.
        simulation_only: true figures of rounds, where the run recorded them.
    """

    name: str
    folder: Path
    plan: str
    rounds_planned: int
    delta: float
    budget: float | None
    accountant: str
    ledger: LedgerContent
    verification: Verification
    rounds: tuple[RoundResult, ...]
    simulation_only: tuple[SimulationOnlyRound, ...] = ()


def versions() -> dict[str, str]:
    """Versions of fedpriv, Python and the numerical libraries, by name; none is imported."""
    found = {"fedpriv": __version__, "Python": platform.python_version()}
    for name in ("numpy", "scipy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
