"""The content of reports: records of runs and of sites, and versions of software."""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedpriv import __version__
from fedpriv.accounting.pricing import LedgerContent
from fedpriv.audit.verdict import AuditResult
from fedpriv.ledger import Head
from fedpriv.training.rounds import RoundResult, Stop

Figures = Mapping[str, float | None]  # by name; None if no user contributed


@dataclass(frozen=True)
class SimulationOnlyRound:
    """Exact figures of one round of a simulation; publishing one breaks the users' guarantee."""

    round: int  # from 1
    # Mean norm of updates before clipping, in units of the clipping norm, by vector group.
    simulation_only_group_norms: Figures = field(default_factory=dict)
    simulation_only_update_norms: Figures = field(default_factory=dict)  # mean L2 norm by layer
    simulation_only_clipped: Figures = field(default_factory=dict)  # share of users by group
    # Norm of the clipped sum over the root mean square norm of its noise, by layer.
    simulation_only_signal_to_noise: Figures = field(default_factory=dict)
    attempt: int = 0


@dataclass(frozen=True)
class Verification:
    """The checks of a ledger that passed before a report on it."""

    head: Head
    cohorts: bool  # whether every cohort was checked against its commitment
    releases: int  # number of the run's releases; the ledger has a charge for each


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: its reason, last round and results.

    Accuracy, mean loss and figures are those of the last model on the held-out rows, if any. They
    are not private releases, and the guarantee does not cover these rows.
    """

    stop: Stop  # why it ended
    round: int  # the last released round
    # The cost of all charges of the ledger at the end, at `delta`. It is the budget if the run
    # ended early because of its releases, since then the charges are not a bound.
    epsilon: float
    delta: float  # that of the budget
    loss: float | None = None
    accuracy: float | None = None  # None if targets are not classes
    figures: Mapping[str, float] = field(default_factory=dict)  # those of the task, by name
    # If held-out rows have users: `users`, `mean`, `q10`, `q50` and `q90` over users, by figure.
    held_out_users: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Notes for its owner, one sentence each, with a cure. If `stop` is `Stop.TOO_FEW`, the first
    # says why the run ended. Notes with the words "simulation only" are not private.
    warnings: tuple[str, ...] = ()
    # Of the mean of the models of the last third of the planned rounds, on held-out rows.
    mean_accuracy: float | None = None
    mean_loss: float | None = None
    # N' of a projection, whose `epsilon` would hold if that many users were enrolled, and the ε of
    # the enrolled users.
    as_if: int | None = None
    enrolled_epsilon: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run that was read from its folder and verified."""

    name: str  # in its ledger
    folder: Path
    plan: str  # text of its resolved plan
    settings: Mapping[str, object]  # its values under keys "a.b"
    rounds_planned: int
    delta: float
    budget: float | None  # ε
    accountant: str  # of the budget
    ledger: LedgerContent  # all its charges, including other runs over the same users
    verification: Verification
    rounds: tuple[RoundResult, ...]  # the rounds that led to the newest model, in order
    simulation_only: tuple[SimulationOnlyRound, ...] = ()  # empty if the run did not record them
    audit: AuditResult | None = None  # None if the run did not audit itself
    end: RunEnd | None = None  # None: it is running, or was cut short

    @property
    def early_epsilon(self) -> float | None:
        """The ε of a run that its releases ended; the cost of its charges is not a bound."""
        end = self.end
        early = end and end.stop is Stop.TOO_FEW and end.round < self.rounds_planned
        return end.epsilon if end and early else None


class Trouble(StrEnum):
    """A kind of problem at a node of a deployment."""

    UNWILLING = "does not agree"  # to a round, before its cohort is drawn; the node says why
    DECLINED = "declined"  # a request in a round; the node says why
    REFUSED = "answer refused"
    LATE = "late"  # no answer by the end of a round
    NOT_FINITE = "not finite"  # all its users' updates were zero, as NaN and infinite ones count
    UNFINISHED = "unfinished"  # training of some users failed or took too long
    CALL = "call refused"
    ENROLMENT = "enrolment"  # the node has other users, or the file cannot be read
    LEDGER = "ledger"  # it was set back, or the node knows another
    AWAY = "away"
    CERTIFICATE = "certificate"


@dataclass(frozen=True)
class Happening:
    """The last problem of one kind."""

    time: datetime
    why: str


@dataclass(frozen=True)
class SiteRecord:
    """The state of a node. Its numbers reveal who took part: they are secret, for the operator."""

    connected: bool = False
    last_seen: datetime | None = None  # when it last connected or left; None: never
    certificate_end: datetime | None = None
    answered: int = 0  # number of rounds
    troubles: Mapping[Trouble, int] = field(default_factory=dict)  # number of problems
    last: Mapping[Trouble, Happening] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteTable:
    """The state of all nodes of a server since its run began; secret."""

    written: datetime
    server_certificate_end: datetime | None
    sites: Mapping[str, SiteRecord]  # by name of the node


def versions() -> dict[str, str]:
    """Return versions of fedpriv, Python and numerical libraries, by name; imports none of them."""
    by_name = {"fedpriv": __version__, "Python": platform.python_version()}
    for name in ("numpy", "scipy", "torch"):
        with suppress(PackageNotFoundError):
            by_name[name] = version(name)
    return by_name
