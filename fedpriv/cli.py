"""The command line. Each command imports what it runs, so that help and errors come at once.

Commands of other packages, such as those of the server and of nodes, are entry points in the group
`fedpriv.commands`: functions that are given the `typer.Typer` to add their commands to.
"""

import sys
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fedpriv.errors import FedprivError, InvalidValueError, writing
from fedpriv.logs import one_line

FigureFormat = StrEnum("FigureFormat", [("PNG", "png"), ("SVG", "svg")])
Engine = StrEnum("Engine", [("IN_PROCESS", "in-process"), ("FLOWER", "flower")])
Policy = StrEnum(
    "Policy", [("POISSON", "poisson"), ("EVERY_USER", "every-user"), ("FIXED_SIZE", "fixed-size")]
)
Relation = StrEnum(
    "Relation", [("ADD_OR_REMOVE_ONE", "add-or-remove-one"), ("REPLACE_ONE", "replace-one")]
)
ExperimentFile = Annotated[Path, typer.Argument(help="the experiment, TOML", show_default=False)]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="replace a key, e.g. clipping.norm=0.3; may be repeated"),
]
RunFolder = Annotated[
    Path | None, typer.Option("--out", help="folder of the run", show_default="runs/NAME-…")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="go on with the run in --out, or start it there")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


app = typer.Typer(
    help="Federated learning with user-level differential privacy that can be checked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

# Typer publishes the class of all errors of its parser only as a base of this one.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130

ledger_app = typer.Typer(help="Look into, check and copy a privacy ledger.", no_args_is_help=True)

ReadLedgerPath = Annotated[
    Path, typer.Argument(help="the ledger file, or an export of it", show_default=False)
]


@ledger_app.command()
def show(
    ledger: ReadLedgerPath,
    last: Annotated[int | None, typer.Option(min=1, help="only the last so many rows")] = None,
) -> None:
    """Print the charges of a ledger."""
    from fedpriv.report import tables

    tables.print_ledger(ledger, last)


@ledger_app.command()
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


@ledger_app.command()
def export(
    ledger: Annotated[Path, typer.Argument(help="the ledger file", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="file to write", show_default="the terminal")
    ] = None,
) -> None:
    """Write a ledger as JSON lines, for anyone to check; never who took part."""
    from fedpriv.ledger.ledger import Ledger

    with Ledger.open(ledger) as opened:
        if out is None:
            opened.export(sys.stdout)
            return
        with writing(out), out.open("w", encoding="utf-8") as stream:
            opened.export(stream)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="the study, TOML", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="folder of the study", show_default="studies/NAME")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="runs at once", show_default="cores")
    ] = None,
) -> None:
    """Run an experiment under several settings that all cost the same ε, and compare them.

    Runs that are finished in the folder are not run again.
    """
    from fedpriv.run.compare import run_study

    run_study(file, out, workers)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="folder of a run or a study", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="file to write", show_default="report.html in FOLDER")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    figures: Annotated[
        Path | None,
        typer.Option(help="draw a study as PNG and SVG into this folder; no page", metavar="DIR"),
    ] = None,
) -> None:
    """Write one HTML page of a run or a study, which opens offline; ledgers are verified first."""
    from fedpriv.report.studies import write_study_figures
    from fedpriv.run.reader import write_report
    from fedpriv.studies import read_study

    if figures is None:
        print(write_report(folder, out, show=show))  # noqa: T201
        return
    if out or show:
        raise InvalidValueError("--figures writes no page; leave out --out and --open")
    for file in write_study_figures(read_study(folder), figures):
        print(file)  # noqa: T201


Delta = Annotated[
    float | None, typer.Option(help="δ", show_default="largest power of ten below 1/N")
]


@app.command()
def simulate(
    file: ExperimentFile,
    assignments: Assignments = None,
    out: RunFolder = None,
    resume: Resume = False,
    engine: Annotated[Engine, typer.Option(help="where users train")] = Engine.IN_PROCESS,
    workers: Annotated[
        int | None, typer.Option(min=1, help="of the engine flower", show_default="2")
    ] = None,
) -> None:
    """Train across simulated users, and print accuracy beside the (ε, δ) of the ledger."""
    if resume and out is None:
        raise InvalidValueError("--resume needs --out, the folder of the run to go on with")
    given = (file, assignments or [], out)
    if engine is Engine.IN_PROCESS:
        if workers is not None:
            raise InvalidValueError(f"--workers is {workers}; only --engine flower has workers")
        from fedpriv.run.simulate import run_simulation

        run_simulation(*given, resume=resume)
        return
    (simulate_on_ray,) = entry_points(group="fedpriv.engines", name="ray")
    simulate_on_ray.load()(*given, workers or 2, resume=resume)


@app.command()
def plan(file: ExperimentFile, assignments: Assignments = None) -> None:
    """Show what each vector group of a round gets, and what all rounds would cost."""
    from fedpriv.run.commands import show_allocation

    show_allocation(file, assignments or [])


@app.command()
def suggest(
    file: ExperimentFile,
    assignments: Assignments = None,
    ledger: Annotated[
        Path | None, typer.Option(help="ledger to charge", show_default="privacy.ledger")
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds to ask and charge")] = 5,
    quantile: Annotated[float, typer.Option(help="share of users not to be clipped")] = 0.5,
) -> None:
    """Propose clipping norms for each vector group, from private rounds that are charged."""
    from fedpriv.run.commands import suggest_norms

    suggest_norms(file, assignments or [], ledger, rounds, quantile)


@app.command()
def epsilon(
    ledgers: Annotated[
        list[Path],
        typer.Argument(
            help="ledger files, or exports; several add up", show_default=False, metavar="LEDGER"
        ),
    ],
    delta: Delta = None,
    target: Annotated[
        float | None, typer.Option("--epsilon", help="print the δ that holds at this ε instead")
    ] = None,
    accountant: Annotated[str, typer.Option(help="name of an accountant, or all")] = "all",
    as_json: AsJson = False,
) -> None:
    """Print the ε that the releases of ledgers cost, for each run and in all."""
    from fedpriv.accounting import pricing
    from fedpriv.report import tables

    spent = pricing.price(ledgers, delta, target, accountant)
    if as_json:
        tables.write_spending(spent, sys.stdout)
    else:
        tables.print_spending(spent)


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="ε of the privacy budget", show_default=False)],
    delta: Annotated[float, typer.Option(help="δ of the privacy budget", show_default=False)],
    rounds: Annotated[int | None, typer.Option(help="T")] = None,
    sampling_probability: Annotated[float | None, typer.Option(help="q in (0, 1]")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="z: the noise on a sum over its clipping norm")
    ] = None,
    policy: Annotated[Policy, typer.Option(help="how users are sampled")] = Policy.POISSON,
    relation: Annotated[
        Relation | None,
        typer.Option(help="neighbours", show_default="replace-one for fixed-size, else add-or-…"),
    ] = None,
    population: Annotated[int | None, typer.Option(help="N, for fixed-size sampling")] = None,
    accountant: Annotated[str, typer.Option(help="name of an accountant")] = "tight",
    as_json: AsJson = False,
) -> None:
    """Find the noise, the rounds or the sampling within (ε, δ); the other two are given.

    With all three given: how large a share of every round one more sum query may have.
    """
    from fedpriv.accounting.calibration import plan_within
    from fedpriv.ledger.events import NeighbouringRelation, SamplingPolicy
    from fedpriv.report import tables

    if relation is None:
        fixed = policy is Policy.FIXED_SIZE
        relation = Relation.REPLACE_ONE if fixed else Relation.ADD_OR_REMOVE_ONE
    found = plan_within(
        epsilon,
        delta,
        rounds,
        sampling_probability,
        noise_multiplier,
        SamplingPolicy(policy),
        NeighbouringRelation(relation),
        population,
        accountant,
    )
    if as_json:
        tables.write_plan(found, sys.stdout)
    else:
        tables.print_plan(found)


@app.command()
def curves(
    ledger: ReadLedgerPath,
    out: Annotated[Path, typer.Option(help="folder to write to", show_default=False)],
    delta: Delta = None,
    suffix: Annotated[FigureFormat, typer.Option("--format")] = FigureFormat.PNG,
) -> None:
    """Draw ε by rounds, δ by ε and the errors of a test for one user; with CSV."""
    from fedpriv.accounting.pricing import curves_of, default_delta, read_ledgers
    from fedpriv.report.guarantee import write_curves

    ledgers = read_ledgers([ledger])
    found = curves_of(ledgers[0], default_delta(ledgers) if delta is None else delta)
    for file in write_curves(found, out, suffix):
        print(file)  # noqa: T201


app.add_typer(ledger_app, name="ledger")
for _entry in sorted(entry_points(group="fedpriv.commands")):
    _entry.load()(app)


def main() -> None:
    """Run the command line; bad input is one sentence and exit code 2."""
    # Models and populations named package.module:function may lie in the working folder.
    sys.path.append(str(Path.cwd()))
    try:
        code = app(standalone_mode=False)
    except FedprivError as error:
        _refuse(str(error))
    except _UsageError as error:
        _refuse(error.format_message())
    except OSError as error:  # of the system, as when a disk is full
        _refuse(f"{error.filename or 'a file'} cannot be used: {error.strerror or error}")
    if code == _INTERRUPTED:
        print("interrupted; --resume goes on, and so does compare by itself", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _refuse(sentence: str) -> NoReturn:
    # Where a command is missing, its help was printed and there is no sentence.
    if sentence:
        # It may hold words of another machine.
        print(f"error: {one_line(' '.join(sentence.split()))}", file=sys.stderr)  # noqa: T201
    sys.exit(2)
