"""The command line. Each command imports its modules when it runs, so help and errors are fast.

Other packages, such as those of the server and of nodes, add commands through entry points in the
group `fedpriv.commands`: functions that add commands to the `typer.Typer` that they get.
"""

import io
import re
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import typer

from fedpriv import __version__
from fedpriv.errors import (
    FedprivError,
    InvalidValueError,
    RefutedError,
    RunError,
    TooFewUsersError,
    UnreachableError,
    sentence_of,
)
from fedpriv.experiment.bundled import NAMES, experiment_file
from fedpriv.support.disk import lacks_room, write_new
from fedpriv.support.logs import one_line


def _option(text: str, *names: str, default: str | None = None, **settings: Any) -> Any:
    return typer.Option(*names, help=text, show_default=default or True, **settings)


def _file_of(context: typer.Context, name: Path) -> Path:
    """Return the experiment's file; invalid settings are refused before a command imports torch."""
    from fedpriv.experiment.config import load_config

    # Options are read before arguments.
    load_config(file := experiment_file(name), context.params.get("assignments") or [])
    return file


def _ledger_of(path: Path) -> Path:
    """Return the path of a ledger, given as a file or as the folder of a run.

    The ledger of a run is in its folder, unless the run shares the ledger with other runs.
    """
    inside, plan = path / "ledger.sqlite", path / "plan.toml"
    if inside.is_file() or not plan.is_file():
        return inside if inside.is_file() else path
    from fedpriv.experiment.config import load_config

    shared = load_config(plan).privacy.ledger
    return Path(shared) if shared else inside


ExperimentFile = Annotated[
    Path,
    typer.Argument(
        help=f"the experiment, TOML, or one that comes with fedpriv: {', '.join(NAMES)}",
        callback=_file_of,
    ),
]
Assignments = Annotated[
    list[str] | None, _option("replace a key, e.g. clipping.norm=0.3; may be repeated", "--set")
]
OutFolder = Annotated[Path | None, _option("folder of the run", "--out", default="runs/NAME-…")]
Resume = Annotated[bool, _option("continue the run in --out, or start it there", "--resume")]
KeepGoing = Annotated[bool, _option("continue even if too few users count", "--keep-going")]
AsJson = Annotated[bool, _option("print one JSON object", "--json")]
LedgerPath = Annotated[
    Path,
    typer.Argument(
        help="the ledger file, the folder of its run, or an export of it", callback=_ledger_of
    ),
]
_Policy = Literal["poisson", "every-user", "fixed-size"]
Delta = Annotated[float | None, _option("δ", default="largest power of ten below 1/N")]

app = typer.Typer(
    help="Federated learning with user-level differential privacy that can be checked.",
    no_args_is_help=True,
    suggest_commands=False,  # its parser does so too
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
_TRAIN, _PRICE = "Train and compare", "Check and price"  # groups of commands
ledger_app = typer.Typer(
    help="Look into, check, copy and restore a privacy ledger.",
    no_args_is_help=True,
    suggest_commands=False,
)

# Typer publishes the class of all errors of its parser only as a base of this one.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130
_CONTINUE = {"simulate": "--resume", "serve": "--resume", "compare": "the same command"}


def _print_version(requested: bool) -> None:  # noqa: FBT001
    if requested:
        typer.echo(f"fedpriv {__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


@ledger_app.command()
def show(
    ledger: LedgerPath,
    last: Annotated[int | None, _option("print only this many last rows", min=1)] = None,
) -> None:
    """Print the charges of a ledger."""
    from fedpriv.report import tables

    tables.print_ledger(ledger, last)


@ledger_app.command()
def verify(
    ledger: LedgerPath,
    participation: Annotated[Path | None, _option("record of cohorts to check as well")] = None,
    head: Annotated[str | None, _option("COUNT:HASH, a head that this ledger once had")] = None,
) -> None:
    """Check the hash chain of a ledger; if it is broken, name the first bad row, exit code 2."""
    from fedpriv.report import tables

    tables.print_verification(ledger, participation, head)


@ledger_app.command()
def export(
    ledger: LedgerPath,
    out: Annotated[Path | None, _option("new file to write", default="the terminal")] = None,
    form: Annotated[
        Literal["json-lines", "dp-accounting"],
        _option("charges that anyone can check, or Python that computes ε", "--as"),
    ] = "json-lines",
) -> None:
    """Write a ledger for other programs; it does not reveal who took part."""
    from fedpriv.ledger.ledger import Ledger

    if form == "dp-accounting":
        from fedpriv.report.tables import dp_events

        text = dp_events(ledger)
    else:
        with Ledger.open(ledger) as opened:
            opened.export(lines := io.StringIO())
        text = lines.getvalue()
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_new(out, text.encode())


@ledger_app.command()
def backup(
    ledger: LedgerPath,
    to: Annotated[Path, typer.Argument(help="the file to write; it must not exist")],
) -> None:
    """Copy a ledger, even while it is in use, and its secret record of who took part."""
    from fedpriv.run.backup import back_up

    head = back_up(ledger, to)
    typer.echo(f"{to} holds {head.count} charges; head {head.count}:{head.hash}")


@ledger_app.command()
def restore(
    backup: Annotated[Path, typer.Argument(help="the ledger file of the backup")],
    ledger: Annotated[Path, typer.Argument(help="the ledger file to put in its place")],
    older: Annotated[bool, _option("even if charges are lost; prints them", "--older")] = False,
) -> None:
    """Replace a ledger and the record next to it by a backup; stop runs first."""
    from fedpriv.run.backup import restore as put_back

    head, charges = put_back(backup, ledger, older=older)
    typer.echo(f"{ledger} holds {head.count} charges; head {head.count}:{head.hash}")
    for charge in charges:
        typer.echo(f"it lacks {charge}")


@app.command(rich_help_panel=_TRAIN)
def compare(
    file: Annotated[Path, typer.Argument(help="the study, TOML")],
    out: Annotated[Path | None, _option("folder of the study", default="studies/NAME")] = None,
    workers: Annotated[int | None, _option("runs at once", min=1, default="cores")] = None,
) -> None:
    """Run an experiment under several settings at the same ε, and compare them.

    Finished runs in the folder do not run again.
    """
    from fedpriv.run.compare import run_study

    run_study(file, out, workers)


@app.command(rich_help_panel=_TRAIN)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="folder of a run or a study; or of several runs, for --charts"),
    ],
    out: Annotated[Path | None, _option("file to write", default="report.html in FOLDER")] = None,
    show: Annotated[bool, _option("open it in the browser", "--open")] = False,
    charts: Annotated[
        Path | None, _option("draw PNG and SVG into this folder; no page", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, _option("print one JSON object; no page", "--json")] = False,
) -> None:
    """Verify ledgers, and write one HTML page of a run or a study, which opens offline."""
    from fedpriv.run.folder import draw, summary_json, write_charts, write_report

    folder, is_several = folders[0], len(folders) > 1
    if is_several and charts is None:
        problem = f"{len(folders)} folders are given"
        raise InvalidValueError(f"{problem}; a page shows one, and --charts draws several runs")
    if as_json:
        if out or show or charts:
            raise InvalidValueError("--json writes no page; leave out --out, --open and --charts")
        typer.echo(summary_json(folder))
        return
    if charts is None:
        typer.echo(write_report(folder, out, show=show))
        return
    if out or show:
        raise InvalidValueError("--charts writes no page; leave out --out and --open")
    for file in draw(folders, charts) if is_several else write_charts(folder, charts):
        typer.echo(file)


@app.command("export", rich_help_panel=_TRAIN)
def export_model(
    folder: Annotated[Path, typer.Argument(help="folder of a run, or of a search on users")],
    to: Annotated[
        Literal["torch", "onnx", "hf"],
        typer.Option("--to", help="a state_dict, an ONNX file, or a folder of save_pretrained"),
    ],
    out: Annotated[
        Path | None,
        _option("new file or folder", "--out", "-o", default="model.pt, model.onnx or model/"),
    ] = None,
) -> None:
    """Write a released model for another library."""
    from fedpriv.run.export import export_model as write

    typer.echo(write(folder, to, out))


@app.command(rich_help_panel=_TRAIN)
def simulate(
    file: ExperimentFile,
    assignments: Assignments = None,
    out: OutFolder = None,
    resume: Resume = False,
    keep_going: KeepGoing = False,
    start: Annotated[
        Path | None, _option("folder of a run to start from, on its ledger", "--from")
    ] = None,
    engine: Annotated[Literal["in-process", "flower"], _option("where to train")] = "in-process",
    workers: Annotated[int | None, _option("of the engine flower", min=1, default="2")] = None,
) -> None:
    """Train across simulated users, and print the accuracy and the (ε, δ) of the ledger.

    Exit code 3: the audit of the run refutes its ledger. Exit code 4: the run ended because too few
    users count.
    """
    arguments = file, assignments or [], out
    if engine == "flower":
        if start is not None:
            raise InvalidValueError("--from is given with --engine flower; it is for in-process")
        (simulate_on_ray,) = entry_points(group="fedpriv.engines", name="ray")
        on_ray = simulate_on_ray.load()
        on_ray(*arguments, workers or 2, resume=resume, keep_going=keep_going).check()
        return
    if workers is not None:
        raise InvalidValueError(f"--workers is {workers}; only --engine flower has workers")
    from fedpriv.run.simulate import run_simulation

    run_simulation(*arguments, resume=resume, keep_going=keep_going, start=start).check()


@app.command(rich_help_panel=_TRAIN)
def plan(file: ExperimentFile, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Show the norm and noise of each vector group in a round, and the cost of all rounds."""
    from fedpriv.run.simulate import show_allocation

    show_allocation(file, assignments or [], as_json=as_json)


@app.command(rich_help_panel=_TRAIN)
def tune(
    file: ExperimentFile,
    on: Annotated[
        Literal["public", "users"],
        typer.Option("--on", help="people who are not enrolled, or the users, at a price"),
    ],
    assignments: Assignments = None,
    out: Annotated[Path | None, _option("folder of the search", default="tuning/NAME-…")] = None,
    price: Annotated[bool, _option("print the price of --on users, and stop", "--price")] = False,
) -> None:
    """Search learning rates, clipping norm, sampling and rounds.

    Exit code 1: the search is charged, and none of its trials ended.
    """
    from fedpriv.run.tune import tune_file

    if not tune_file(file, assignments or [], out, on=on, price_only=price).settings and not price:
        raise typer.Exit(1)


@app.command(rich_help_panel=_PRICE)
def epsilon(
    ledgers: Annotated[
        list[Path],
        typer.Argument(
            help="ledger files, folders of their runs, or exports; several add up",
            metavar="LEDGER...",
            callback=lambda given: [*map(_ledger_of, given)],
        ),
    ],
    delta: Delta = None,
    target: Annotated[float | None, _option("print δ at this ε instead", "--epsilon")] = None,
    accountant: Annotated[str, _option("name of an accountant, or all")] = "all",
    as_json: AsJson = False,
) -> None:
    """Print the ε of the releases in ledgers, for each run and in total."""
    from fedpriv.accounting import pricing
    from fedpriv.report import tables

    spending = pricing.price(ledgers, delta, target, accountant)
    if as_json:
        typer.echo(tables.spending_json(spending))
    else:
        tables.print_spending(spending)


@app.command(rich_help_panel=_PRICE)
def calibrate(
    delta: Annotated[float, _option("δ of the privacy budget, or of the ε printed")],
    epsilon: Annotated[float | None, _option("ε of the privacy budget")] = None,
    advantage: Annotated[
        float | None, _option("budget instead of ε: largest true minus false positive rate")
    ] = None,
    rounds: Annotated[int | None, _option("T")] = None,
    sampling_probability: Annotated[float | None, _option("q in (0, 1]")] = None,
    noise_multiplier: Annotated[float | None, _option("z, noise over clipping norm")] = None,
    policy: Annotated[_Policy, _option("how users are sampled")] = "poisson",
    relation: Annotated[
        Literal["add-or-remove-one", "replace-one"] | None,
        _option("neighbours", default="replace-one for fixed-size, else add-or-remove-one"),
    ] = None,
    population: Annotated[int | None, _option("N, for fixed-size sampling")] = None,
    accountant: Annotated[str, _option("name of an accountant")] = "tight",
    as_json: AsJson = False,
) -> None:
    """Compute the noise, the rounds or the sampling for (ε, δ), given the other two.

    With --advantage, the budget limits how much better than guessing anyone can tell who took part.
    """
    if (epsilon is None) == (advantage is None):
        budget = "absent" if epsilon is None else f"--epsilon {epsilon} and --advantage {advantage}"
        raise InvalidValueError(f"the budget is {budget}; it must be --epsilon or --advantage")
    from fedpriv.accounting.calibration import plan_within
    from fedpriv.accounting.risks import plan_of_advantage
    from fedpriv.ledger.events import NeighbouringRelation, SamplingPolicy
    from fedpriv.report import tables

    default_relation = "replace-one" if policy == "fixed-size" else "add-or-remove-one"
    plan_of_budget = partial(
        plan_within,
        rounds=rounds,
        sampling_probability=sampling_probability,
        noise_multiplier=noise_multiplier,
        policy=SamplingPolicy(policy),
        relation=NeighbouringRelation(relation or default_relation),
        population=population,
        accountant=accountant,
    )
    if advantage is None:
        plan = plan_of_budget(cast(float, epsilon), delta)
    else:
        plan = plan_of_advantage(advantage, delta, plan_of_budget, accountant)
    if as_json:
        typer.echo(tables.plan_json(plan, advantage))
    else:
        tables.print_plan(plan, advantage)


@app.command(rich_help_panel=_PRICE)
def price(
    noise_multiplier: Annotated[
        float | None, _option("z, noise on the sum of the cohort over the clip")
    ] = None,
    noise_stddev: Annotated[float | None, _option("noise on the sum instead, with --clip")] = None,
    clip: Annotated[float | None, _option("S, largest norm of a user's update")] = None,
    cohort: Annotated[int | None, _option("users of a round")] = None,
    population: Annotated[int | None, _option("N", default="the cohort")] = None,
    rounds: Annotated[int | None, _option("T")] = None,
    delta: Annotated[float | None, _option("δ")] = None,
    noise_cohort: Annotated[
        int | None, _option("users of the round that the noise is for", default="--cohort")
    ] = None,
    enrolled: Annotated[int | None, _option("users who are enrolled", default="N")] = None,
    sampling: Annotated[
        Literal["poisson", "fixed-size", "unknown"] | None,
        _option("how cohorts are drawn", default="unknown; fixed-size with --pfl"),
    ] = None,
    claimed_epsilon: Annotated[float | None, _option("claimed ε")] = None,
    pfl: Annotated[Path | None, _option("YAML of a benchmark of pfl")] = None,
    write: Annotated[Path | None, _option("new experiment with these settings")] = None,
    as_json: AsJson = False,
) -> None:
    """Price the settings of another tool exactly, and check its claims."""
    options = locals()  # most are named like the fields of a setting
    from fedpriv.run.price import ForeignSetting, price_setting

    fields = {name: options[name] for name in ForeignSetting.__dataclass_fields__}
    price_setting(ForeignSetting.stated(pfl, noise_stddev, fields), write, as_json=as_json)


@app.command(rich_help_panel=_PRICE)
def curves(ledger: LedgerPath, out: Annotated[Path, _option("folder to write to")]) -> None:
    """Draw the errors of tests that guess who took part: PNG, SVG and CSV."""
    from fedpriv.accounting.pricing import read_ledger
    from fedpriv.report.guarantee import write_trade_off

    for file in write_trade_off(read_ledger(ledger), out):
        typer.echo(file)


app.add_typer(ledger_app, name="ledger", rich_help_panel=_PRICE)
for _entry in sorted(entry_points(group="fedpriv.commands")):
    _entry.load()(app)


def main() -> None:
    """Run the command line; bad input prints one sentence and exits with code 2.

    A temporary problem, such as a full disk, prints one sentence and exits with code 1. Code 3 is
    for a run whose audit refutes its ledger, and 4 for a run that ended because too few users
    count.
    """
    # Models and populations named package.module:function may be in the working folder.
    with suppress(FileNotFoundError):  # it may have been removed
        sys.path.append(str(Path.cwd()))
    for option, argument in pairwise(sys.argv):
        if not argument or re.fullmatch("--[a-z-]+=", argument):  # "" would be the working folder
            _refuse(f"{argument.rstrip('=') or option} has an empty value; it must not be empty")
    try:
        code = app(prog_name="fedpriv", standalone_mode=False)
    except _UsageError as error:
        _refuse(error.format_message())
    except (FedprivError, OSError) as error:
        _refuse(sentence_of(error), _exit_code(error))
    except MemoryError as error:
        _refuse(f"there is too little memory. {error}", 1)
    if code == _INTERRUPTED:
        command = _CONTINUE.get("".join(sys.argv[1:2]))
        typer.echo(f"interrupted; continue with {command}" if command else "interrupted", err=True)
    sys.exit(code)


def _exit_code(error: FedprivError | OSError) -> int:
    passes = isinstance(error, RunError | UnreachableError) or lacks_room(error)
    ends: dict[type, int] = {RefutedError: 3, TooFewUsersError: 4}
    return ends.get(type(error), 1 if passes else 2)


def _refuse(sentence: str, code: int = 2) -> NoReturn:
    if sentence:  # empty if a command is missing and help was printed
        typer.echo(f"error: {one_line(' '.join(sentence.split()))}", err=True)
    sys.exit(code)
