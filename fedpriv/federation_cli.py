"""Commands of a deployment: the server, its nodes, their certificates, and where a run stands."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.choices import LogFormat
from fedpriv.errors import InvalidValueError
from fedpriv.options import AsJson, Assignments, ExperimentFile, Resume, RunFolder, check_resume

_certs = typer.Typer(
    help="Make a small authority, and certificates for server and nodes.", no_args_is_help=True
)

Server = Annotated[str, typer.Option(help="HOST:PORT of the server", show_default=False)]
Certificates = Annotated[
    Path | None, typer.Option(help="folder with ca.pem, node.pem and node.key", show_default=False)
]
NodeName = Annotated[
    str | None, typer.Option(help="name of the node, with --insecure", show_default=False)
]
Users = Annotated[
    str,
    typer.Option(
        help="users' data: a folder, a file or package.module:function",
        metavar="SOURCE",
        show_default=False,
    ),
]
ConsentFile = Annotated[
    Path | None, typer.Option(help="what the node agrees to, TOML", show_default="everything")
]
StateFolder = Annotated[
    Path | None,
    typer.Option(help="folder of what the node remembers", show_default="in the home folder"),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(help="package.module:function that the server may name; may be repeated"),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="plain text without certificates; on loopback only")
]
LogForm = Annotated[LogFormat, typer.Option("--log-format", help="of the log, on stderr")]
Node = Annotated[str, typer.Argument(help="name of the node", show_default=False)]
Hosts = Annotated[
    list[str],
    typer.Argument(
        help="DNS names and IP addresses of the server", metavar="HOST", show_default=False
    ),
]
AuthorityFolder = Annotated[Path, typer.Option(help="folder of the authority")]


def register(app: typer.Typer) -> None:
    """Add the commands to those of the command line."""
    for command in (serve, join, status):
        app.command()(command)
    app.add_typer(_certs, name="certs")


def serve(
    file: ExperimentFile,
    assignments: Assignments = None,
    out: RunFolder = None,
    resume: Resume = False,
    insecure: Insecure = False,
    leave: Annotated[
        bool, typer.Option("--exit", help="end with the run; else ledger and status stay up")
    ] = False,
    log_format: LogForm = LogFormat.TEXT,
) -> None:
    """Train across the users of nodes that connect; print accuracy beside the ledger's (ε, δ)."""
    check_resume(out, resume=resume)
    from fedpriv.logs import configure

    configure(log_format)
    from fedpriv.server.deployment import serve as run

    run(file, assignments or [], out, resume=resume, insecure=insecure, leave=leave)


def join(
    server: Server,
    users: Users,
    certificates: Certificates = None,
    insecure: Insecure = False,
    node: NodeName = None,
    consent: ConsentFile = None,
    verify_ledger: Annotated[
        bool, typer.Option("--verify-ledger", help="check the ledger and its ε before each round")
    ] = False,
    state: StateFolder = None,
    trust: Trust = None,
    device: Annotated[str, typer.Option(help="where to train")] = "auto",
    memory: Annotated[
        int | None, typer.Option(min=1, help="MiB that training may take", show_default="no limit")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="longest training of a round", show_default="its deadline")
    ] = None,
    activations: Annotated[
        str, typer.Option(help="of the model while it trains: float32 or bfloat16")
    ] = "float32",
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="users train side by side, on a CPU", show_default="one for each thread"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="leave when the run is over")] = False,
    log_format: LogForm = LogFormat.TEXT,
) -> None:
    """Take part with the users whose data are here; their data do not leave this machine."""
    _check_identity(certificates, node, insecure=insecure)
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise InvalidValueError(f"--seconds is {seconds}; it must be positive and finite")
    from fedpriv.logs import configure

    configure(log_format)
    from fedpriv.clients.joining import Joining
    from fedpriv.clients.joining import join as run

    run(
        Joining(
            server=server,
            users=users,
            certificates=certificates,
            node=node,
            consent=consent,
            verify_ledger=verify_ledger,
            state=state,
            trusted=tuple(trust or ()),
            device=device,
            memory_mebibytes=memory,
            seconds=seconds,
            activations=activations,
            processes=processes,
            once=once,
        )
    )


def status(
    server: Server,
    certificates: Certificates = None,
    insecure: Insecure = False,
    node: NodeName = None,
    as_json: AsJson = False,
) -> None:
    """Ask a server where its run stands: round, ε spent and left, nodes that are connected."""
    _check_identity(certificates, node, insecure=insecure)
    from fedpriv.clients.channel import identity_of
    from fedpriv.clients.status import show_status

    show_status(server, identity_of(certificates, node), as_json=as_json)


def _check_identity(certificates: Path | None, node: str | None, *, insecure: bool) -> None:
    certified = certificates is not None and node is None and not insecure
    named = certificates is None and node is not None and insecure
    if not (certified or named):
        raise InvalidValueError(
            "a node is known by --certificates DIR, or by --insecure with --node NAME; exactly one "
            "of the two must be given"
        )


@_certs.command()
def init(hosts: Hosts, folder: AuthorityFolder = Path("certs")) -> None:
    """Make an authority, and the server's certificate for these hosts."""
    from fedpriv.server.authority import init as make

    make(folder, hosts)
    _say(
        f"{folder / 'authority'}: keep it where nodes are enrolled; ca.key can make any node",
        f"{folder / 'server'}: belongs on the server",
    )


@_certs.command()
def issue(
    node: Node,
    folder: AuthorityFolder = Path("certs"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long it is valid")] = 365,
) -> None:
    """Make a node a key and a certificate, and print what to enrol."""
    from fedpriv.server.authority import issue as make

    made = make(folder, node, lifetime=timedelta(days=days))
    _say(
        f"{made.folder}: move it to the node, for --certificates; it is valid for {days} days",
        f'the server\'s enrolment, at node {node!r}: certificate = "{made.fingerprint}"',
    )


@_certs.command()
def renew(hosts: Hosts, folder: AuthorityFolder = Path("certs")) -> None:
    """Make the server a new key and certificate for these hosts, in place of the old."""
    from fedpriv.server.authority import issue_server

    issue_server(folder, hosts)
    _say(f"{folder / 'server'}: belongs on the server, which reads it when it starts")


def _say(*sentences: str) -> None:
    for sentence in sentences:
        print(sentence)  # noqa: T201
