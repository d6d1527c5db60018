"""`fedpriv plan` and `fedpriv suggest`: what a round would release, and clipping norms to try."""

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.build import simulated
from fedpriv.config import load_config
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.report.tables import Column, Table, format_epsilon, print_table
from fedpriv.run.folder import RunFolder
from fedpriv.training.norm_search import NormQuantile, find_quantiles
from fedpriv.training.plan import TrainingPlan


def show_allocation(file: Path, assignments: list[str]) -> None:
    """Print how a round of an experiment is released and what all rounds cost; spend nothing."""
    experiment, _ = simulated(load_config(file, assignments), "plan")
    plan, privacy = experiment.plan, experiment.config.privacy
    console = Console(markup=False, emoji=False)
    title = f"One round: {len(plan.shares)} vector groups, one sample, one charge"
    names = ("group", "tensors", "d", "S", "σ", "share", "signal/noise")
    _print(console, title, names, _group_rows(plan))
    event = replace(plan.mechanism.event, count=plan.rounds)
    loss = epsilon_of([event], privacy.delta, privacy.accountant)
    sampling, weight = plan.sampling, plan.averaging.total_weight
    facts = [
        f"z = {plan.noise_multiplier:.6g} of the whole round, q = "
        f"{sampling.sampling_probability:g} of N = {sampling.population} users, expected cohort "
        f"{sampling.expected_cohort_size:g}",
        f"{plan.rounds} rounds cost ε = {format_epsilon(loss.epsilon)} at δ = {privacy.delta:g}: "
        f"{loss.assumptions}",
        "S is how far one user moves the sum of a group, σ the noise on it. Signal/noise compares "
        "the most that an expected cohort can add up to with the norm of the noise.",
    ]
    if weight is not None:
        facts.append(
            f"The weights of all enrolled users are taken to add up to {weight:g} × the largest "
            "weight, a public constant."
        )
    for line in (*facts, "Nothing was spent."):
        console.print(line, highlight=False)


def _group_rows(plan: TrainingPlan) -> Iterable[list[str]]:
    """A row for each vector group of the first round, in the order of the ledger."""
    mechanism = plan.mechanism
    groups, queries = mechanism.clipping.groups, mechanism.event.queries
    rows = zip(groups, queries, plan.shares, mechanism.query.divisors, strict=True)
    for group, query, share, users in rows:
        dimension = group.dimension(mechanism.clipping.layout)
        noise = query.noise_stddev * math.sqrt(dimension)
        # If every user of an expected cohort contributes the most it may, all in one direction.
        signal_to_noise = users * group.clipping_norm / noise if noise else math.inf
        yield [
            group.name,
            ", ".join(tensor for tensor in group.tensors if tensor != group.name),
            f"{dimension:,}",
            f"{query.clipping_norm:.4g}",
            f"{query.noise_stddev:.4g}",
            f"{share:.1%}",
            f"{signal_to_noise:.3g}",
        ]


def suggest_norms(
    file: Path, assignments: list[str], ledger: Path | None, rounds: int, quantile: float
) -> None:
    """Ask users of an experiment about their update norms, and propose clipping norms.

    Each of the rounds is charged to the ledger, by default the shared one of the experiment.
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
    experiment, transport = simulated(config, f"{config.name}-suggest-{os.urandom(4).hex()}")
    plan = replace(experiment.plan, rounds=rounds)
    console = Console(markup=False, emoji=False)
    record = RunFolder(charged.parent).participation_of(charged)
    known: tuple[NormQuantile, ...] = ()
    with PrivacyRecords.open(charged, record, plan.population, experiment.budget) as records:
        state, entropy = experiment.initial_state, experiment.entropy
        for result, found in find_quantiles(plan, state, quantile, transport, records, entropy):
            known = found
            console.print(f"round {result.number} of {rounds}: charge {result.charge[:12]}")
        loss = epsilon_of(records.ledger.spent(), config.privacy.delta, config.privacy.accountant)
    names = ("group", "suggested S", "likely between", "± share of users", "S in the file")
    rows = (
        [
            each.group,
            f"{each.estimate:.3g}",
            f"{each.low:.3g} and {each.high:.3g}",
            f"{each.noise_stddev:.2g}",
            f"{norm:.3g}",
        ]
        for each, norm in zip(known, plan.clipping_norms, strict=True)
    )
    title = f"Norms that about {quantile:.0%} of users stay within"
    _print(console, title, names, rows)
    console.print(
        f"The ledger {charged} now stands at ε = {format_epsilon(loss.epsilon)} at "
        f"δ = {config.privacy.delta:g}; train with privacy.ledger set to it.",
        highlight=False,
    )


def _print(console: Console, title: str, names: Iterable[str], rows: Iterable[list[str]]) -> None:
    """Print a table with names on the left, which may be folded, and numbers on the right."""
    text = {"group", "tensors"}
    columns = [Column(name, "text" if name in text else "number") for name in names]
    print_table(Table(title, columns, list(rows)), console, box.HEAVY_HEAD)
