"""`fedpriv plan`: what every vector group of a round gets, before anything is spent.

`fedpriv suggest`: clipping norms to begin with, from private rounds that are charged.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.build import Experiment, simulated
from fedpriv.config import load_config
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.report.tables import format_epsilon
from fedpriv.run.folder import RunFolder
from fedpriv.training.norm_search import NormQuantile, find_quantiles
from fedpriv.training.plan import TrainingPlan


@dataclass(frozen=True)
class GroupRow:
    """One vector group of a round.

    Attributes:
        name: how the ledger calls it.
        tensors: names of its tensors.
        dimension: number of components d.
        sensitivity: how far one user moves the group's sum: S_g, or 2·S_g under a floor.
        noise_stddev: σ_g on the sum, in the units of the clipped vector.
        share: ω_g, the part of the round's privacy that the group takes.
        signal_to_noise: norm of the sum over noise norm σ_g·√d, if every user of an expected cohort
            contributes the most it may, and all in one direction.
    """

    name: str
    tensors: tuple[str, ...]
    dimension: int
    sensitivity: float
    noise_stddev: float
    share: float
    signal_to_noise: float


def group_rows(plan: TrainingPlan) -> tuple[GroupRow, ...]:
    """All vector groups of the first round, in the order of the ledger."""
    mechanism = plan.mechanism
    clipping = mechanism.clipping
    rows = []
    for group, event, share, users in zip(
        clipping.groups, mechanism.event.queries, plan.shares, mechanism.query.divisors, strict=True
    ):
        dimension = group.dimension(clipping.layout)
        noise = event.noise_stddev * math.sqrt(dimension)
        rows.append(
            GroupRow(
                name=group.name,
                tensors=group.tensors,
                dimension=dimension,
                sensitivity=event.clipping_norm,
                noise_stddev=event.noise_stddev,
                share=share,
                signal_to_noise=users * group.clipping_norm / noise if noise else math.inf,
            )
        )
    return tuple(rows)


def show_allocation(file: Path, assignments: list[str]) -> None:
    """Print how a round of an experiment is released and what all rounds cost; spend nothing.

    Args:
        file: the experiment, TOML.
        assignments: "a.b=value" overrides.

    Raises:
        FedprivError: something is wrong with the input; the message says what.
    """
    experiment, _ = simulated(load_config(file, assignments), "plan")
    console = Console(markup=False, emoji=False)
    console.print(_noise_table(experiment.plan))
    for line in _facts(experiment):
        console.print(line, highlight=False)


def _noise_table(plan: TrainingPlan) -> Table:
    table = Table(title=f"One round: {len(plan.shares)} vector groups, one sample, one charge")
    table.add_column("group", no_wrap=True)
    table.add_column("tensors", overflow="fold")
    for column in ("d", "S", "σ", "share", "signal/noise"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in group_rows(plan):
        table.add_row(
            row.name,
            ", ".join(t for t in row.tensors if t != row.name),
            f"{row.dimension:,}",
            f"{row.sensitivity:.4g}",
            f"{row.noise_stddev:.4g}",
            f"{row.share:.1%}",
            f"{row.signal_to_noise:.3g}",
        )
    return table


def _facts(experiment: Experiment) -> list[str]:
    plan, privacy = experiment.plan, experiment.config.privacy
    sampling, event = plan.sampling, plan.mechanism.event
    loss = epsilon_of([replace(event, count=plan.rounds)], privacy.delta, privacy.accountant)
    facts = [
        f"z = {plan.noise_multiplier:.6g} of the whole round, q = "
        f"{sampling.sampling_probability:g} of N = {sampling.population} users, expected cohort "
        f"{sampling.expected_cohort_size:g}",
        f"{plan.rounds} rounds cost ε = {format_epsilon(loss.epsilon)} at δ = {privacy.delta:g}: "
        f"{loss.assumptions}",
        "S is how far one user moves the sum of a group, σ the noise on it. Signal/noise compares "
        "the most that an expected cohort can add up to with the norm of the noise.",
    ]
    if plan.averaging.total_weight is not None:
        facts.append(
            "The weights of all enrolled users are taken to add up to "
            f"{plan.averaging.total_weight:g} × the largest weight, a public constant."
        )
    return [*facts, "Nothing was spent."]


def suggest_norms(
    file: Path, assignments: list[str], ledger: Path | None, rounds: int, quantile: float
) -> None:
    """Ask users of an experiment about their update norms, and propose clipping norms.

    Args:
        file: the experiment, TOML.
        assignments: "a.b=value" overrides.
        ledger: what to charge; None: the shared ledger that the experiment names.
        rounds: how many rounds to ask and charge.
        quantile: share of users that are not to be clipped.

    Raises:
        FedprivError: something is wrong with the input, or the budget would be passed.
    """
    config = load_config(file, assignments)
    charged = ledger or (Path(config.privacy.ledger) if config.privacy.ledger else None)
    if charged is None:
        raise InvalidValueError(
            "no ledger is named; what asking costs must be charged where training will be: give "
            "--ledger, and the same file as privacy.ledger of the experiment"
        )
    if rounds < 1:
        raise InvalidValueError(f"rounds is {rounds}; it must be at least 1")
    run = f"{config.name}-suggest-{os.urandom(4).hex()}"
    experiment, transport = simulated(config, run)
    plan = replace(experiment.plan, rounds=rounds)
    console = Console(markup=False, emoji=False)
    participation = RunFolder(charged.parent).participation_of(charged)
    population = experiment.plan.population
    known: tuple[NormQuantile, ...] = ()
    with PrivacyRecords.open(charged, participation, population, experiment.budget) as records:
        asked = find_quantiles(
            plan,
            experiment.initial_state,
            quantile,
            transport,
            records,
            experiment.entropy,
        )
        for result, found in asked:
            known = found
            console.print(f"round {result.number} of {rounds}: charge {result.charge[:12]}")
        loss = epsilon_of(records.ledger.spent(), config.privacy.delta, config.privacy.accountant)
    console.print(_norms_table(known, plan.clipping_norms, quantile))
    console.print(
        f"The ledger {charged} now stands at ε = {format_epsilon(loss.epsilon)} at "
        f"δ = {config.privacy.delta:g}; train with privacy.ledger set to it.",
        highlight=False,
    )


def _norms_table(
    known: tuple[NormQuantile, ...], present: tuple[float, ...], quantile: float
) -> Table:
    table = Table(title=f"Norms that about {quantile:.0%} of users stay within")
    table.add_column("group", overflow="fold")
    for column in ("suggested S", "likely between", "± share of users", "S in the file"):
        table.add_column(column, justify="right", no_wrap=True)
    for each, norm in zip(known, present, strict=True):
        table.add_row(
            each.group,
            f"{each.estimate:.3g}",
            f"{each.low:.3g} and {each.high:.3g}",
            f"{each.noise_stddev:.2g}",
            f"{norm:.3g}",
        )
    return table
