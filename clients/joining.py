"""What `fedpriv join` does: bring a node's users to a server, until it is stopped."""

import asyncio
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import grpc

from fedpriv.errors import InvalidValueError
from fedpriv.wire import Hello

from .answering import Answering
from .backoff import Backoff
from .channel import Identity, identity_of, open_channel
from .consent import Consent
from .diary import Diary
from .membership import Membership, Terms
from .messages import Source
from .screening import Auditor, Screening
from .worker import Worker

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joining:
    """A node that wants to take part.

    Attributes:
        server: HOST:PORT.
        users: where the users' data are, as `clients.users.load_users` reads it.
        certificates: folder with ca.pem, node.pem and node.key; None: plain text, on loopback.
        node: name of the node, where there are no certificates.
        consent: TOML file with the limits of the node; None: it has none.
        verify_ledger: read and check the server's ledger before and after taking part.
        state: folder in which the node remembers; None: one of its own in the user's state folder.
        trusted: import paths of models, losses and metrics that the server may have the node run.
        device: where to train.
        memory_mebibytes: that training may take; None: without limit.
        seconds: longest for one round; None: until its deadline.
        activations: of the model while users train, as `InProcessTransport` has them.
        processes: how many train side by side, likewise.
        once: leave when the run is over, instead of waiting for another.
        backoff: how long to wait when the connection was lost.
    """

    server: str
    users: str
    certificates: Path | None = None
    node: str | None = None
    consent: Path | None = None
    verify_ledger: bool = False
    state: Path | None = None
    trusted: tuple[str, ...] = ()
    device: str = "auto"
    memory_mebibytes: int | None = None
    seconds: float | None = None
    activations: str = "float32"
    processes: int | None = None
    once: bool = False
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen, so sharing it is safe


def join(joining: Joining) -> None:
    """Take part until the run is over, if `once`, or until SIGTERM or SIGINT; in the main thread.

    Guarantees:

    * a signal ends it by an ordinary return, with no process left and nothing half-written;
    * this process neither imports torch nor holds users' data;
    * a lost connection never ends it.

    Raises:
        InvalidValueError: a setting is not legal, a file of the node's cannot be used, or the
            server names code that is not trusted.
        DataError: the users cannot be loaded.
        ModelError: the task cannot be built.
        WireError: the server refuses the node for good, or talks nonsense.
        AuditError, LedgerError: with `once`, the ledger cannot be believed at the end.
    """
    asyncio.run(_until_stopped(joining))


async def _until_stopped(joining: Joining) -> None:
    taking_part = asyncio.create_task(take_part(joining))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, taking_part.cancel)
    await asyncio.wait([taking_part])
    if taking_part.cancelled():
        _log.info("stopped")
    else:
        taking_part.result()


async def take_part(joining: Joining) -> None:
    """As `join`, for a running event loop; it ends when its task is cancelled."""
    identity = identity_of(joining.certificates, joining.node)
    consent = Consent() if joining.consent is None else Consent.load(joining.consent)
    source = _source(joining)
    folder = _state_folder(joining.state, identity.node)
    async with open_channel(joining.server, identity) as channel:
        with Diary.open(folder / "diary.sqlite") as diary:
            worker = await Worker.start(source)
            try:
                await _membership(joining, identity, channel, worker, consent, diary).last()
            finally:
                await worker.close()


def _source(joining: Joining) -> Source:
    return Source(
        joining.users,
        device=joining.device,
        memory_mebibytes=joining.memory_mebibytes,
        seconds=joining.seconds,
        activations=joining.activations,
        processes=joining.processes,
    )


def _membership(
    joining: Joining,
    identity: Identity,
    channel: grpc.aio.Channel,
    worker: Worker,
    consent: Consent,
    diary: Diary,
) -> Membership:
    backoff = joining.backoff
    auditor = Auditor(channel, diary, consent, backoff) if joining.verify_ledger else None
    screening = Screening(consent, diary, auditor)
    hello = Hello(identity.node, worker.users_sha256)
    terms = Terms(joining.server, hello, joining.trusted, auditor, joining.once, backoff)
    return Membership(channel, worker, Answering(channel, worker, screening, diary, backoff), terms)


def _state_folder(given: Path | None, node: str) -> Path:
    """The folder in which a node remembers, open to its owner only.

    By default it is fedpriv/NODE, percent-encoded, in $XDG_STATE_HOME or ~/.local/state (XDG Base
    Directory Specification 0.8).
    """
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"
    folder = given or base / "fedpriv" / quote(node, safe=" ")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be made: {error.strerror}") from error
    return folder
