"""Commands that look into a privacy ledger, check it and copy it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import InvalidValueError

app = typer.Typer(help="Look into, check and copy a privacy ledger.", no_args_is_help=True)

LedgerPath = Annotated[Path, typer.Argument(help="the ledger file", show_default=False)]
ReadLedgerPath = Annotated[
    Path, typer.Argument(help="the ledger file, or an export of it", show_default=False)
]


@app.command()
def show(
    ledger: ReadLedgerPath,
    last: Annotated[int | None, typer.Option(min=1, help="only the last so many rows")] = None,
) -> None:
    """Print the charges of a ledger."""
    from fedpriv.report import tables

    tables.print_ledger(ledger, last)


@app.command()
def verify(
    ledger: ReadLedgerPath,
    participation: Annotated[
        Path | None, typer.Option(help="record of who took part, to check the commitments too")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="COUNT:HASH, a head that this ledger once had")
    ] = None,
) -> None:
    """Check the hash chain of a ledger; exit code 2 and the first bad row if it is broken."""
    from fedpriv.report import tables

    tables.print_verification(ledger, participation, head)


@app.command()
def export(
    ledger: LedgerPath,
    out: Annotated[
        Path | None, typer.Option(help="file to write", show_default="the terminal")
    ] = None,
) -> None:
    """Write a ledger as JSON lines, for anyone to check; never who took part."""
    from fedpriv.accounting.ledger import Ledger

    with Ledger.open(ledger) as opened:
        if out is None:
            opened.export(sys.stdout)
            return
        try:
            with out.open("w", encoding="utf-8") as stream:
                opened.export(stream)
        except OSError as error:
            raise InvalidValueError(f"{out} cannot be written: {error.strerror}") from error
