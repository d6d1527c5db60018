"""`fedpriv suggest`: clipping norms to begin with, from private rounds that are charged."""

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.config import load_config
from fedpriv.errors import InvalidValueError
from fedpriv.experiment import simulated
from fedpriv.federated.books import Books
from fedpriv.federated.quantiles import NormQuantile, find_quantiles
from fedpriv.report.tables import format_epsilon

from .folder import RunFolder


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
    with Books.open(charged, participation, population, experiment.budget) as books:
        asked = find_quantiles(
            plan,
            experiment.initial_state,
            quantile,
            transport,
            books,
            experiment.entropy,
        )
        for report, found in asked:
            known = found
            console.print(f"round {report.round + 1} of {rounds}: charge {report.charge_hash[:12]}")
        loss = epsilon_of(books.ledger.spent(), config.privacy.delta, config.privacy.accountant)
    console.print(_table(known, plan.clipping_norms, quantile))
    console.print(
        f"The ledger {charged} now stands at ε = {format_epsilon(loss.epsilon)} at "
        f"δ = {config.privacy.delta:g}; train with privacy.ledger set to it.",
        highlight=False,
    )


def _table(known: tuple[NormQuantile, ...], present: tuple[float, ...], quantile: float) -> Table:
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
