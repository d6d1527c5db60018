"""What the command line offers of the server: `serve`, and `certs init`, `issue`, `server`."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import InvalidValueError
from fedpriv.logs import LogFormat

_certs = typer.Typer(
    help="Make a small authority, and certificates for server and nodes.", no_args_is_help=True
)
Hosts = Annotated[
    list[str],
    typer.Argument(
        help="DNS names and IP addresses of the server", metavar="HOST", show_default=False
    ),
]
AuthorityFolder = Annotated[Path, typer.Option(help="folder of the authority")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to a command line."""
    app.command()(serve)
    app.add_typer(_certs, name="certs")


def serve(
    file: Annotated[Path, typer.Argument(help="the experiment, TOML", show_default=False)],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="replace a key, e.g. clipping.norm=0.3; may be repeated"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder of the run", show_default="runs/NAME-…")
    ] = None,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in --out, or start it there")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="plain text without certificates; on loopback only")
    ] = False,
    leave: Annotated[
        bool, typer.Option("--exit", help="end with the run; else ledger and status stay up")
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="of the log, on stderr")
    ] = LogFormat.TEXT,
) -> None:
    """Train across the users of nodes that connect; print accuracy beside the ledger's (ε, δ)."""
    if resume and out is None:
        raise InvalidValueError("--resume needs --out, the folder of the run to go on with")
    from fedpriv.logs import configure

    configure(log_format)
    from fedpriv.server.deployment import serve as run

    run(file, assignments or [], out, resume=resume, insecure=insecure, leave=leave)


@_certs.command()
def init(hosts: Hosts, folder: AuthorityFolder = Path("certs")) -> None:
    """Make an authority, and the server's certificate for these hosts."""
    from fedpriv.server import certificates

    certificates.init(folder, hosts)
    path = folder / "authority"
    typer.echo(f"{path}: keep it where nodes are enrolled; ca.key can make any node")
    typer.echo(f"{folder / 'server'}: belongs on the server")


@_certs.command()
def issue(
    node: Annotated[str, typer.Argument(help="name of the node", show_default=False)],
    folder: AuthorityFolder = Path("certs"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long it is valid")] = 365,
) -> None:
    """Give a node a key and a certificate, and print what to enrol."""
    from fedpriv.server import certificates

    issued = certificates.issue(folder, node, lifetime=timedelta(days=days))
    folder = issued.folder
    typer.echo(f"{folder}: move it to the node, for --certificates; it is valid for {days} days")
    typer.echo(f'the server\'s enrolment, at node {node!r}: certificate = "{issued.fingerprint}"')


@_certs.command()
def server(hosts: Hosts, folder: AuthorityFolder = Path("certs")) -> None:
    """Give the server a new key and certificate for these hosts, in place of the old."""
    from fedpriv.server import certificates

    certificates.issue_server(folder, hosts)
    typer.echo(f"{folder / 'server'}: belongs on the server, which reads it when it starts")
