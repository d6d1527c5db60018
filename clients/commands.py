"""The commands of a node: `fedpriv join` and `fedpriv status`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import InvalidValueError
from fedpriv.logs import LogFormat

Server = Annotated[str, typer.Option(help="HOST:PORT of the server", show_default=False)]
Users = Annotated[
    str,
    typer.Option(
        help="users' data: a folder, a file or package.module:function",
        metavar="SOURCE",
        show_default=False,
    ),
]
Certificates = Annotated[
    Path | None, typer.Option(help="folder with ca.pem, node.pem and node.key", show_default=False)
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="plain text without certificates; on loopback only")
]
NodeName = Annotated[
    str | None, typer.Option(help="name of the node, with --insecure", show_default=False)
]
ConsentFile = Annotated[
    Path | None, typer.Option(help="what the node agrees to, TOML", show_default="everything")
]
Verify = Annotated[
    bool, typer.Option("--verify-ledger", help="check the ledger and its ε before each round")
]
State = Annotated[
    Path | None,
    typer.Option(help="folder of the node's journal", show_default="in the home folder"),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(help="package.module:function that the server may name; may be repeated"),
]
Device = Annotated[str, typer.Option(help="where to train")]
Memory = Annotated[
    int | None, typer.Option(min=1, help="MiB that training may take", show_default="no limit")
]
Seconds = Annotated[
    float | None, typer.Option(help="longest training of a round", show_default="its deadline")
]
Activations = Annotated[str, typer.Option(help="of the model while it trains: float32 or bfloat16")]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="users train side by side, on a CPU", show_default="one per thread"),
]
Once = Annotated[bool, typer.Option("--once", help="leave when the run is over")]
Format = Annotated[LogFormat, typer.Option("--log-format", help="of the log, on stderr")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (join, status):
        app.command()(command)


def join(
    server: Server,
    users: Users,
    certificates: Certificates = None,
    insecure: Insecure = False,
    node: NodeName = None,
    consent: ConsentFile = None,
    verify_ledger: Verify = False,
    state: State = None,
    trust: Trust = None,
    device: Device = "auto",
    memory: Memory = None,
    seconds: Seconds = None,
    activations: Activations = "float32",
    processes: Processes = None,
    once: Once = False,
    log_format: Format = LogFormat.TEXT,
) -> None:
    """Take part with the users whose data are here; their data do not leave this machine."""
    _check_identity(certificates, node, insecure=insecure)
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise InvalidValueError(f"--seconds is {seconds}; it must be positive and finite")
    from fedpriv.logs import configure

    configure(log_format)
    from fedpriv.clients import membership
    from fedpriv.clients.pipe import HostSettings

    host = HostSettings(
        users,
        device=device,
        memory_mebibytes=memory,
        seconds=seconds,
        activations=activations,
        processes=processes,
    )
    settings = membership.NodeSettings(
        server,
        host,
        certificates=certificates,
        node=node,
        consent=consent,
        verify_ledger=verify_ledger,
        state=state,
        trusted=tuple(trust or ()),
        once=once,
    )
    membership.join(settings)


def status(
    server: Server,
    certificates: Certificates = None,
    insecure: Insecure = False,
    node: NodeName = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Ask a server where its run stands: round, ε spent and left, nodes that are connected."""
    _check_identity(certificates, node, insecure=insecure)
    from fedpriv.clients.connection import identity_of
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
