"""Sections that pages of runs and of studies share."""

from fedpriv import __version__
from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.pricing import Cost
from fedpriv.report.page.content import Column, Section, Table
from fedpriv.report.page.privacy_charts import accountants_table, epsilon_chart, trade_off_chart
from fedpriv.report.page.record import RunRecord
from fedpriv.report.page.words import Assumption, assumptions
from fedpriv.report.versions import versions

FOOTER = (
    f"Written by fedpriv {__version__}. Everything on this page was released by the run and is "
    "covered by its (ε, δ), but for accuracy and loss on held-out rows, and for what is marked as "
    "simulation only."
)


def privacy_sections(
    record: RunRecord, loss: PrivacyLoss | None, cost: Cost | str, of: str = "", number: int = 0
) -> list[Section]:
    """ε of a run's ledger by every accountant, and the trade-off function.

    Args:
        record: the run.
        loss: what its ledger costs; None if nothing was charged.
        cost: of its ledger, or the sentence why it has no curves.
        of: whose ledgers these are, if the page has several kinds.
        number: of the kind.
    """
    end, counted = (f"-{number}", f" ({number + 1})") if number else ("", "")
    notes = [f"Of {of}."] if of else []
    if loss is None:
        nothing = "Nothing was charged, so nothing was released: ε = 0."
        return [Section(f"privacy{end}", "Privacy", [*notes, nothing])]
    if isinstance(cost, str):
        why = f"No curve is drawn: {cost}."
        return [Section(f"privacy{end}", "Privacy", notes, warnings=[why])]
    columns = tuple(
        Column(name, number=name.startswith("ε"))
        for name in ("accountant", "what ε is", "ε, lower end", "ε")
    )
    charges = len(record.ledger.charges)
    caption = f"All {charges} charges of the ledger at δ = {cost.delta:g}"
    table = Table(caption, columns, accountants_table(cost))
    return [
        Section(
            f"epsilon{end}",
            f"ε by round{counted}",
            notes,
            tables=[table],
            charts=[epsilon_chart(cost, f"epsilon{end}")],
            linked=number == 0,
        ),
        Section(
            f"trade-off{end}",
            f"What an attacker can tell{counted}",
            notes,
            charts=[trade_off_chart(cost, f"trade-off{end}")],
            linked=number == 0,
        ),
    ]


def assumptions_section(record: RunRecord, loss: PrivacyLoss) -> Section:
    """What the ε of a run's ledger rests on."""
    return Section("assumptions", "What ε says", words=assumptions(loss, record.ledger))


def ledger_section(record: RunRecord) -> Section:
    """What was checked of the ledger."""
    checked = record.verification
    cohorts = (
        "Each cohort that was written down fits the commitment in its charge."
        if checked.cohorts
        else "Not checked: the record of who took part is not here, as is right in a copy."
    )
    words = [
        Assumption("Hash chain", f"Intact: {checked.head.count} charges, none altered."),
        Assumption("Cohorts", cohorts),
        Assumption(
            "Releases",
            f"All {checked.releases} releases of this run have their charge in the ledger.",
        ),
        Assumption("Population", record.ledger.population),
        Assumption("Runs in the ledger", ", ".join(record.ledger.runs()) or "none"),
        Assumption("Head", f"{checked.head.count}:{checked.head.hash}"),
        Assumption(
            "Check it yourself",
            f"fedpriv ledger verify {record.ledger.path.name} "
            f"--head {checked.head.count}:{checked.head.hash}",
        ),
    ]
    return Section("ledger", "Ledger verification", words=words)


def software_section() -> Section:
    """The versions that wrote the page; those of a run are in its plan."""
    words = [Assumption(name, number) for name, number in versions().items()]
    note = (
        "With these versions the ledger was verified and priced and this page was written. Those "
        "that a run began with are in the head of its plan."
    )
    return Section("software", "Software", [note], words=words)
