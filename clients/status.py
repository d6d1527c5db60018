"""`fedpriv status`: where a federation stands, as its server says."""

import asyncio
import json
import math

import grpc
from rich.console import Console
from rich.table import Table

from fedpriv.accounting.accountants import format_epsilon
from fedpriv.clients.connection import FederationStub, Identity
from fedpriv.errors import WireError
from fedpriv.logs import one_line
from fedpriv.report.tables import number
from fedpriv.wire import Status

_PATIENCE_SECONDS = 10.0


def show_status(server: str, identity: Identity, *, as_json: bool) -> None:
    """Ask a server and print what it says, of which only the form is checked."""
    found = asyncio.run(_ask(server, identity))
    if as_json:
        spent, limit = number(found.epsilon), number(found.epsilon_limit)
        fields = vars(found) | {"epsilon": spent, "epsilon_limit": limit}
        print(json.dumps(fields, indent=2, allow_nan=False))  # noqa: T201
        return
    left = "no limit"
    if not math.isinf(found.epsilon_limit):  # rounded down
        thousandths = math.floor(max(0.0, found.epsilon_limit - found.epsilon) * 1000)
        left = f"{thousandths / 1000:.3f} of {found.epsilon_limit:g}"
    table = Table(title=one_line(found.run), show_header=False)
    table.add_row("state", str(found.state))
    table.add_row("round", f"{found.round} of {found.rounds}")
    table.add_row("ε spent", f"{format_epsilon(found.epsilon)} at δ = {found.delta:g}")
    table.add_row("ε left", left)
    table.add_row("nodes connected", f"{found.nodes_connected} of {found.nodes_enrolled}")
    table.add_row("users enrolled", str(found.users_enrolled))
    # The name of a run is not markup, whatever brackets it contains.
    Console(markup=False, emoji=False, highlight=False).print(table)


async def _ask(server: str, identity: Identity) -> Status:
    try:
        async with (
            FederationStub.open(server, identity) as stub,
            asyncio.timeout(_PATIENCE_SECONDS),
        ):
            return await stub.status()
    except TimeoutError as error:
        sentence = f"{server} does not answer within {_PATIENCE_SECONDS:g} seconds"
        raise WireError(sentence) from error
    except grpc.aio.AioRpcError as error:
        # Its words are another machine's.
        details, code = one_line(error.details() or "")[:400], error.code()
        away = code is grpc.StatusCode.UNAVAILABLE
        failed = "cannot be reached" if away else f"refuses, {code.name}"
        raise WireError(f"{server} {failed}: {details}") from error
