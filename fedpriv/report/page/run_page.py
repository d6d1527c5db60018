"""The page of one run."""

import math

from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.pricing import Cost, cost_of
from fedpriv.accounting.registry import accountant_named
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.budget import merge_equal
from fedpriv.report.page.common import (
    FOOTER,
    assumptions_section,
    ledger_section,
    privacy_sections,
    software_section,
)
from fedpriv.report.page.content import Card, Page, Section
from fedpriv.report.page.norms_charts import clipped_charts, norms_charts
from fedpriv.report.page.record import RunRecord
from fedpriv.report.page.run_charts import accuracy_charts, front_chart
from fedpriv.report.page.words import users_of, warnings
from fedpriv.report.tables import format_epsilon


def page_of_run(record: RunRecord) -> Page:
    """The page of a run: what came out, what it cost, and how both can be checked.

    Raises:
        UnsupportedEventError: the plan's accountant has no analysis of the ledger's events.
    """
    loss = loss_of(record)
    front = front_chart(record)
    sections = [
        _summary(record, loss),
        *([assumptions_section(record, loss)] if loss else []),
        Section(
            "accuracy",
            "How good the model is",
            [] if record.rounds else ["No round was released."],
            charts=accuracy_charts(record),
        ),
    ]
    if front is not None:
        sections.append(Section("front", "Accuracy and privacy", charts=[front]))
    sections += privacy_sections(record, loss, cost_or_reason(record))
    if record.rounds:
        charts = [*norms_charts([record]), *clipped_charts(record)]
        sections.append(Section("norms", "Clipping", charts=charts))
    plan = Section(
        "plan",
        "Resolved plan",
        ["As it was run, with all that was left out filled in; it can be run again."],
        listing=record.plan,
    )
    sections += [ledger_section(record), plan, software_section()]
    return Page(record.name, f"A run on {record.ledger.population}, by fedpriv", sections, FOOTER)


def loss_of(record: RunRecord) -> PrivacyLoss | None:
    """What all charges of a run's ledger cost, by the plan's accountant; None without charges."""
    if not record.ledger.charges:
        return None
    events = merge_equal(record.ledger.events)
    return accountant_named(record.accountant).epsilon(events, record.delta)


def cost_or_reason(record: RunRecord) -> Cost | str:
    """Cost of a run's ledger, or the sentence why it has no curves."""
    try:
        return cost_of(record.ledger, record.delta)
    except (InvalidValueError, UnsupportedEventError) as error:
        return str(error)


def _summary(record: RunRecord, loss: PrivacyLoss | None) -> Section:
    last = next((each for each in reversed(record.rounds) if each.loss is not None), None)
    cards = []
    if last is not None and last.accuracy is not None:
        cards.append(Card("accuracy", f"{last.accuracy:.2%}", "on held-out rows, last model"))
    if last is not None and last.accuracy is None:
        cards.append(Card("loss", f"{last.loss:.4g}", "on held-out rows, last model"))
    cards += [
        Card("user-level ε", format_epsilon(loss.epsilon if loss else 0.0), _epsilon_note(record)),
        Card("δ", f"{record.delta:g}", f"N = {users_of(record.ledger):,} users enrolled"),
        Card("rounds", f"{len(record.rounds):,}", f"of {record.rounds_planned:,} planned"),
    ]
    return Section(
        "summary",
        "Summary",
        [_statement(record, loss)],
        answers=1,
        warnings=warnings(record.delta, record.ledger),
        cards=cards,
    )


def _epsilon_note(record: RunRecord) -> str:
    if len(record.ledger.runs()) < 2:
        return "no budget was set" if record.budget is None else f"budget {record.budget:g}"
    own = merge_equal(record.ledger.runs().get(record.name, []))
    alone = accountant_named(record.accountant).epsilon(own, record.delta).epsilon if own else 0.0
    return f"all runs of the ledger; this run alone {format_epsilon(alone)}"


def _statement(record: RunRecord, loss: PrivacyLoss | None) -> str:
    if loss is None:
        return "Nothing was released, so nobody's data can be in it."
    if math.isinf(loss.epsilon):
        return "No finite ε is proven for what was released: it guarantees nothing to anybody."
    accountant = f"by the {loss.accountant} accountant, {loss.bound}"
    return (
        f"Everything that was released is ({format_epsilon(loss.epsilon)}, {record.delta:g})-"
        f"differentially private for each whole user ({loss.relation} neighbours; {accountant})."
    )
