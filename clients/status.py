"""`fedpriv status` and `fedpriv model`: the status of a federation, and its released model."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import grpc
from rich.table import Table
from safetensors import SafetensorError, deserialize, safe_open

from fedpriv.clients.connection import FederationStub, Identity
from fedpriv.errors import InvalidValueError, UnreachableError, WireError
from fedpriv.ledger.events import Randomness
from fedpriv.report.records import SiteRecord, Trouble
from fedpriv.report.tables import Column, json_text, print_table, screen
from fedpriv.report.tables import Table as Rows
from fedpriv.support.checks import epsilon_down, epsilon_up
from fedpriv.support.disk import write_atomically
from fedpriv.support.logs import expiry, one_line
from fedpriv.wire.codec import MAX_NAME

_PATIENCE_SECONDS = 10.0
_MODEL_SECONDS = 600.0
_SILENT = timedelta(minutes=2)  # a server writes its table every minute
# Errors that reading the header of a model may raise.
_NO_MODEL = SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError
_COLUMNS = {  # heading: troubles that the column counts
    "declined": (Trouble.UNWILLING, Trouble.DECLINED),
    "refused": (Trouble.REFUSED, Trouble.CALL, Trouble.ENROLMENT),
    "late": (Trouble.LATE,),
    "NaN": (Trouble.NOT_FINITE,),
    "part": (Trouble.UNFINISHED,),
}
Result = TypeVar("Result")


def show_status(server: str, identity: Identity, *, as_json: bool) -> None:
    """Print the status that a server reports; only its form is checked.

    UnreachableError: the server does not answer; WireError: it refuses, or its answer is malformed.
    """
    status = asyncio.run(_ask(server, identity, FederationStub.status, _PATIENCE_SECONDS))
    if as_json:
        print(json_text(vars(status)))  # noqa: T201
        return
    epsilon_left = "no limit"
    if not math.isinf(limit := status.epsilon_limit):
        epsilon_left = f"{epsilon_down(limit - status.epsilon)} of {limit}"
    table = Table(title=one_line(status.run), show_header=False)
    table.add_row("state", str(status.state))
    table.add_row("round", f"{status.round} of {status.rounds}")
    table.add_row("ε spent", f"{epsilon_up(status.epsilon)} at δ = {status.delta}")
    table.add_row("ε left", epsilon_left)
    table.add_row("nodes connected", f"{status.nodes_connected} of {status.nodes_enrolled}")
    table.add_row("users enrolled", str(status.users_enrolled))
    # Without markup, because the name of a run may contain brackets.
    screen().print(table)


def save_model(server: str, identity: Identity, out: Path) -> None:
    """Fetch the newest released model into a file, and print its round and its cost.

    InvalidValueError: the file exists and is not a model. UnreachableError and WireError as for
    `show_status`.
    """
    if out.exists():
        _check_model(out)
    data = asyncio.run(_ask(server, identity, FederationStub.fetch_model, _MODEL_SECONDS))
    try:
        deserialize(data)  # type: ignore[no-untyped-call]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        header = json.loads(header["release"])
        run, *rounds = str(header["run"]), int(header["round"]), int(header["rounds"])
        epsilon, delta = float(header["epsilon"]), float(header["delta"])
        randomness = Randomness(header["randomness"])
        if len(run) > MAX_NAME or not all(0 <= number < 2**32 for number in rounds):
            raise ValueError("the run or its rounds are too long to print")
        if not (epsilon >= 0.0 and 0.0 <= delta < 1.0):
            raise ValueError("no model costs that")
    except _NO_MODEL as error:
        raise WireError(f"what {server} sends is not a model with its round and ε") from error
    write_atomically(out, data)
    name, spent = one_line(run), f"ε = {epsilon_up(epsilon)} at δ = {delta}"
    if randomness is Randomness.SEEDED:
        spent += f", {randomness}"
    print(f"{out}: run {name}, round {rounds[0]} of {rounds[1]}, {spent}")  # noqa: T201


def _check_model(path: Path) -> None:
    """Refuse to replace a file that holds no model."""
    try:
        with safe_open(path, "numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise InvalidValueError(
            f"{path} exists already and is no model; it is not overwritten"
        ) from error


async def _ask(
    server: str,
    identity: Identity,
    call: Callable[[FederationStub], Awaitable[Result]],
    seconds: float,
) -> Result:
    """Return the result of a call; UnreachableError or WireError if it fails."""
    try:
        async with FederationStub.open(server, identity) as stub, asyncio.timeout(seconds):
            return await call(stub)
    except TimeoutError as error:
        raise UnreachableError(f"{server} does not answer within {seconds:g} seconds") from error
    except grpc.aio.AioRpcError as error:
        # The details come from another machine.
        details, code = one_line(error.details() or "")[:400], error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            raise UnreachableError(f"{server} cannot be reached: {details}") from error
        if code is grpc.StatusCode.FAILED_PRECONDITION:  # no model was released yet
            raise UnreachableError(f"{server} answers: {details}") from error
        raise WireError(f"{server} refuses, {code.name}: {details}") from error


def show_sites(folder: Path, *, as_json: bool) -> None:
    """Print the state of each site of a run, and its latest troubles, for the operator.

    DataError: the run's folder has no readable table of sites.
    """
    from fedpriv.run.folder import RunFolder  # noqa: PLC0415 - slow to load; nodes do not need it

    run = RunFolder(folder)
    table = run.read_sites()
    sites = table.sites.items()
    if as_json:
        print(run.sites.read_text(encoding="utf-8"))  # noqa: T201
        return
    console = screen()
    caption = f"{one_line(str(folder))}, secret: these counts say who took part"
    headings = ("seen", "answers", *_COLUMNS, "cert. ends")
    columns = [Column("site", "long"), *map(Column, headings)]
    now = datetime.now(UTC)
    silent = now - table.written
    if silent > _SILENT:
        console.print(f"the server last wrote {_ago(silent)} ago; it is probably not running")
    rows = [_row(name, site, now, "?" if silent > _SILENT else "now") for name, site in sites]
    print_table(Rows(caption, columns, rows), console)
    for name, site in sites:
        for trouble, last in sorted(site.last.items(), key=lambda item: item[1].time, reverse=True):
            console.print(f"{name}, {_ago(now - last.time)} ago: {trouble}: {one_line(last.why)}")
        if site.certificate_end is not None and (reason := expiry(site.certificate_end, now)):
            console.print(f"{name}: {Trouble.CERTIFICATE}: {reason}")
    end = table.server_certificate_end
    console.print(
        f"the server's certificate ends {_day(end)}; as of {table.written:%Y-%m-%d %H:%M:%S UTC}"
    )


def _row(name: str, site: SiteRecord, now: datetime, connected: str) -> list[str]:
    last_seen = connected if site.connected else "never"
    if site.last_seen is not None and not site.connected:
        last_seen = _ago(now - site.last_seen)
    counts = [sum(site.troubles.get(t, 0) for t in troubles) for troubles in _COLUMNS.values()]
    numbers = [str(count or "") for count in (site.answered, *counts)]
    return [name, last_seen, *numbers, _day(site.certificate_end)]


def _ago(time: timedelta) -> str:
    seconds = max(0, int(time.total_seconds()))  # clocks may differ
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _day(end: datetime | None) -> str:
    return "unknown" if end is None else f"{end:%Y-%m-%d}"
