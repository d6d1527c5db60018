"""What a report of a run is made from: what its folder and its ledger hold, and versions."""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedpriv import __version__
from fedpriv.accounting.pricing import LedgerContent
from fedpriv.ledger import Head
from fedpriv.training.rounds import RoundResult

Figures = Mapping[str, float | None]  # by name; None where no user contributed


@dataclass(frozen=True)
class SimulationOnlyRound:
    """True figures of one round of a simulation. Publishing one breaks the users' guarantee."""

    round: int  # number, from 0
    # By vector group, mean norm of updates before clipping, in the units of the clipping norm.
    simulation_only_group_norms: Figures = field(default_factory=dict)
    simulation_only_update_norms: Figures = field(default_factory=dict)  # by layer, mean L2
    simulation_only_clipped: Figures = field(default_factory=dict)  # share of users by group
    # By layer, norm of the clipped sum over the root mean square norm of its noise.
    simulation_only_signal_to_noise: Figures = field(default_factory=dict)
    attempt: int = 0

    @property
    def number(self) -> int:
        """Rounds released so far, this one included."""
        return self.round + 1


@dataclass(frozen=True)
class Verification:
    """What was checked of a ledger before it was reported on."""

    head: Head
    cohorts: bool  # whether every cohort was checked against its commitment
    releases: int  # of the run, whose charges were found in the ledger


@dataclass(frozen=True)
class RunRecord:
    """A run that was read and verified."""

    name: str  # in its ledger
    folder: Path
    plan: str  # text of its resolved plan
    rounds_planned: int
    delta: float
    budget: float | None  # ε
    accountant: str  # of the budget
    ledger: LedgerContent  # what was charged, also by other runs over the same users
    verification: Verification
    rounds: tuple[RoundResult, ...]  # what was released, in order
    simulation_only: tuple[SimulationOnlyRound, ...] = ()  # where the run recorded them


def versions() -> dict[str, str]:
    """Versions of fedpriv, Python and the numerical libraries, by name; none is imported."""
    found = {"fedpriv": __version__, "Python": platform.python_version()}
    for name in ("numpy", "scipy", "torch"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
