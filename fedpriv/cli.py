"""The command line: the one module of the library that reaches clients/ and server/, lazily."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import FedprivError, InvalidValueError

app = typer.Typer(
    help="Federated learning with user-level differential privacy that can be checked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
ledger_app = typer.Typer(help="Look into, check and copy a privacy ledger.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")

LedgerPath = Annotated[Path, typer.Argument(help="the ledger file", show_default=False)]


@app.command()
def simulate(
    file: Annotated[Path, typer.Argument(help="the experiment, TOML", show_default=False)],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="replace a key, e.g. clipping.norm=0.3; may be repeated"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run [default: runs/NAME-…]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in --out, or start it there")
    ] = False,
) -> None:
    """Train across simulated users, and print accuracy beside the (ε, δ) of the ledger."""
    from fedpriv.server.simulation import run_simulation

    if resume and out is None:
        raise InvalidValueError("--resume needs --out, the folder of the run to go on with")
    run_simulation(file, assignments or [], out, resume=resume)


@app.command()
def epsilon(
    ledger: LedgerPath,
    delta: Annotated[
        float | None, typer.Option(help="δ [default: largest power of ten below 1/N]")
    ] = None,
    accountant: Annotated[str, typer.Option(help="name of an accountant, or all")] = "all",
) -> None:
    """Print the ε that the releases of a ledger cost, for each run and in all."""
    from fedpriv.report import tables

    tables.print_epsilon(ledger, delta, accountant)


@ledger_app.command()
def show(
    ledger: LedgerPath,
    last: Annotated[int | None, typer.Option(min=1, help="only the last so many rows")] = None,
) -> None:
    """Print the charges of a ledger."""
    from fedpriv.report import tables

    tables.print_ledger(ledger, last)


@ledger_app.command()
def verify(
    ledger: LedgerPath,
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


@ledger_app.command()
def export(
    ledger: LedgerPath,
    out: Annotated[Path | None, typer.Option(help="file to write [default: the terminal]")] = None,
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


def main() -> None:
    """Run the command line; an error of ours is one sentence and exit code 2."""
    # Models and populations named package.module:function may lie in the working folder.
    sys.path.append(str(Path.cwd()))
    try:
        app()
    except FedprivError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint", file=sys.stderr)  # noqa: T201
        sys.exit(130)
