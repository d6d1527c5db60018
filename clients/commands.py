"""The commands of a node: `fedpriv join`, `status`, `model`, `enrol` and `id-key`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.errors import InvalidValueError
from fedpriv.support.importing import split_path
from fedpriv.support.logs import LogFormat, configure


def _option(text: str, *names: str, default: bool | str = False, **keywords: Any) -> Any:
    return typer.Option(*names, help=text, show_default=default, **keywords)


Server = Annotated[str, _option("HOST:PORT of the server")]
Certificates = Annotated[Path | None, _option("folder with ca.pem, node.pem and node.key")]
NodeName = Annotated[str | None, _option("without certificates, on loopback only: the node's name")]
IdKey = Annotated[
    Path | None, _option("file of a key; users' ids are keyed hashes of the ids in the data")
]
_LINES_PER_MINUTE = 120  # of each level, so that a server cannot flood a node's log
_HALF = "half of this machine's, on a CPU"
_OWN_MEBIBYTES = 4096  # for messages, ledger and models, in addition to training
_USERS = "users' data: a folder, a file or package.module:function"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to a command line."""
    for command in (join, status, model, enrol, id_key):
        app.command(rich_help_panel="Deploy")(command)


def join(
    server: Server,
    users: Annotated[str, _option(_USERS, metavar="SOURCE")],
    certificates: Certificates = None,
    node: NodeName = None,
    id_key: IdKey = None,
    consent: Annotated[
        Path | None, _option("what the node agrees to, TOML", default="everything")
    ] = None,
    verify_ledger: Annotated[
        bool,
        _option("check the ledger, its ε and this node's draws before each round", default=True),
    ] = True,
    state: Annotated[
        Path | None, _option("folder of the node's journal", default="in the home folder")
    ] = None,
    trust: Annotated[
        list[str] | None,
        _option("package.module:function that the server may name; may be repeated"),
    ] = None,
    device: Annotated[str, _option("where to train", default=True)] = "auto",
    memory: Annotated[
        # The system cannot represent limits that are much larger.
        int | None, _option("MiB that training may take", min=1, max=2**40 - 1, default=_HALF)
    ] = None,
    activations: Annotated[
        str, _option("of the model while it trains: float32, tf32 or bfloat16", default=True)
    ] = "float32",
    processes: Annotated[
        int | None, _option("in which users train, on a CPU", min=1, default="one per thread")
    ] = None,
    once: Annotated[bool, _option("exit when the run is over", "--once")] = False,
    review: Annotated[
        bool, _option("print the task that the server proposes and its hash, and exit", "--review")
    ] = False,
    log_format: Annotated[
        LogFormat, _option("of the log, on stderr", "--log-format", default=True)
    ] = LogFormat.TEXT,
) -> None:
    """Take part with the users on this machine; their data never leave it."""
    configure(log_format, _LINES_PER_MINUTE)
    from fedpriv.clients.users import is_file

    is_file(users)  # before torch is loaded
    for path in trust or ():
        split_path(f"--trust {path!r}", path, InvalidValueError)
    from fedpriv.clients import membership
    from fedpriv.clients.worker import HostSettings

    host = HostSettings(users, device, memory, activations, processes, id_key)
    options = consent, verify_ledger, state, tuple(trust or ()), once, _OWN_MEBIBYTES
    settings = membership.NodeSettings(server, host, certificates, node, *options)
    (membership.review if review else membership.join)(settings)


def status(
    folder: Annotated[
        Path | None, typer.Argument(help="of a run of this machine's server: show its sites")
    ] = None,
    server: Annotated[str | None, _option("HOST:PORT of the server, as a node")] = None,
    certificates: Certificates = None,
    node: NodeName = None,
    as_json: Annotated[bool, _option("print one JSON object", "--json")] = False,
) -> None:
    """Show where a run stands: ask its server as a node, or read its sites as the operator.

    A node learns the round, the ε spent and left, and the number of connected nodes. The actions of
    each site are secret; only the run's folder has them.
    """
    if (folder is None) == (server is None):
        raise InvalidValueError("exactly one of FOLDER and --server must be given")
    if folder is not None:
        if certificates is not None or node is not None:
            raise InvalidValueError("a folder is read without --certificates and --node")
        from fedpriv.clients.status import show_sites

        show_sites(folder, as_json=as_json)
        return
    from fedpriv.clients.connection import identity_of
    from fedpriv.clients.status import show_status

    show_status(str(server), identity_of(certificates, node), as_json=as_json)


def model(
    server: Server,
    out: Annotated[Path, _option("file to write or replace, safetensors")],
    certificates: Certificates = None,
    node: NodeName = None,
) -> None:
    """Fetch the newest model that a server released, with its round and ε."""
    from fedpriv.clients.connection import identity_of
    from fedpriv.clients.status import save_model

    save_model(server, identity_of(certificates, node), out)


def enrol(
    data: Annotated[
        list[str], typer.Argument(help=f"{_USERS}; several are several nodes'", metavar="DATA...")
    ],
    certificates: Annotated[
        list[Path] | None, _option("folder of a node's certificates; one for each DATA")
    ] = None,
    node: Annotated[
        list[str] | None, _option("name of a node, without certificates; one for each DATA")
    ] = None,
    id_key: IdKey = None,
) -> None:
    """Check the ids of users, and print the tables to put into the server's enrolment."""
    counts = len(certificates or ()), len(node or ())
    if counts not in ((len(data), 0), (0, len(data))):
        raise InvalidValueError(
            f"{len(data)} DATA, {counts[0]} --certificates and {counts[1]} --node are given; give "
            "one --certificates, or one --node, for each DATA"
        )
    from fedpriv.clients.users import enrolment_toml
    from fedpriv.wire.naming import check_node_name

    nodes: list[tuple[str, str | None]] = [(check_node_name(name), None) for name in node or ()]
    if certificates:
        from fedpriv.clients.connection import enrolled_as

        nodes = [enrolled_as(folder) for folder in certificates]
    typer.echo(enrolment_toml(data, nodes, id_key), nl=False)


def id_key(file: Annotated[Path, typer.Argument(help="the file to write")]) -> None:
    """Make a key for the ids of users, which sites share and the server must not have."""
    from fedpriv.clients.users import make_id_key

    make_id_key(file)
    typer.echo(f"{file}: give it to the other sites over a secure channel, never to the server")
