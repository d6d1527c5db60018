"""The server's commands: `serve`, and `certs` for keys and certificates."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.support.logs import LogFormat, configure


def _option(text: str, *names: str, **keywords: Any) -> Any:
    return typer.Option(*names, help=text, **keywords)


_certs = typer.Typer(
    help="Make a small authority, and certificates for server and nodes.",
    no_args_is_help=True,
    suggest_commands=False,
)
_HOSTS = typer.Argument(help="DNS names and IP addresses of the server", metavar="HOST...")
Hosts = Annotated[list[str], _HOSTS]
AuthorityFolder = Annotated[Path, _option("folder of the authority")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to a command line."""
    app.command(rich_help_panel="Deploy")(serve)
    app.add_typer(_certs, name="certs", rich_help_panel="Deploy")


def serve(
    file: Annotated[Path, typer.Argument(help="the experiment, TOML")],
    assignments: Annotated[
        list[str] | None, _option("replace a key, e.g. clipping.norm=0.3; may be repeated", "--set")
    ] = None,
    out: Annotated[
        Path | None, _option("folder of the run", "--out", show_default="runs/NAME-…")
    ] = None,
    *,
    resume: Annotated[
        bool, _option("resume the run in --out, or start it there", "--resume")
    ] = False,
    keep_going: Annotated[
        bool, _option("continue even if too few users count", "--keep-going")
    ] = False,
    insecure: Annotated[
        bool, _option("plain text without certificates; on loopback only", "--insecure")
    ] = False,
    leave: Annotated[
        bool, _option("exit after the run; else keep ledger and status up", "--exit")
    ] = False,
    log_format: Annotated[LogFormat, _option("of the log, on stderr")] = LogFormat.TEXT,
) -> None:
    """Train across the users of nodes that connect; print accuracy next to the ledger's (ε, δ).

    Exit code 75: too few nodes agreed to a round for too long; --resume continues. Exit code 3: the
    audit of the run refutes its ledger. Exit code 4: the run ended because too few users count.
    """
    configure(log_format)
    from fedpriv.experiment.config import load_config

    load_config(file, assignments or [])  # refuses wrong settings before torch is imported
    from fedpriv.server.deployment import serve as run
    from fedpriv.training.rounds import Stop

    options = {"resume": resume, "keep_going": keep_going, "insecure": insecure, "leave": leave}
    finished_run = run(file, assignments or [], out, **options)
    if finished_run.stop is Stop.DECLINED:
        raise typer.Exit(os.EX_TEMPFAIL)
    finished_run.check()


@_certs.command()
def init(hosts: Hosts, folder: AuthorityFolder = Path("certs")) -> None:
    """Make an authority, and the server's certificate for these hosts."""
    from fedpriv.server import certificates

    certificates.init(folder, hosts)
    path = folder / "authority"
    typer.echo(f"{path}: keep it where nodes are enrolled; ca.key can make any node")
    typer.echo(f"{folder / 'server'}: belongs on the server")


@_certs.command()
def request(
    node: Annotated[str, typer.Argument(help="name of the node")],
    folder: Annotated[Path, _option("folder of the node's keys")] = Path("certs"),
) -> None:
    """At the node: create its key, which stays there, and a request for the authority to sign."""
    from fedpriv.server import certificates

    path = certificates.request(folder, node)
    typer.echo(f"{path.parent / 'node.key'}: stays here; no other machine needs it")
    typer.echo(f"{path}: send it to the authority, for fedpriv certs sign")


@_certs.command()
def sign(
    request: Annotated[Path, typer.Argument(help="the node's request, node.csr")],
    folder: AuthorityFolder = Path("certs"),
    days: Annotated[int, _option("how long it is valid", min=1, max=3650)] = 365,
) -> None:
    """At the authority: sign a node's request, and print what to enrol."""
    from fedpriv.server import certificates

    node, folder, fingerprint = certificates.sign(folder, request, lifetime=timedelta(days=days))
    files = f"{folder}: send ca.pem and node.pem to {node!r}, next to its node.key"
    typer.echo(f"{files}; valid for {days} days")
    typer.echo(f'the server\'s enrolment, at node {node!r}: certificate = "{fingerprint}"')


@_certs.command()
def server(hosts: Hosts, folder: AuthorityFolder = Path("certs")) -> None:
    """Give the server a new key and certificate for these hosts, in place of the old."""
    from fedpriv.server import certificates

    certificates.issue_server(folder, hosts)
    typer.echo(f"{folder / 'server'}: belongs on the server, which reads it when it starts")
