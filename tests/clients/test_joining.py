"""A whole node, with a real training process: rounds over TLS, and how it begins and ends."""

import asyncio
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import grpc
import numpy as np
import pytest
import torch

from fedpriv.clients import membership
from fedpriv.clients.connection import Backoff
from fedpriv.clients.membership import NodeSettings, take_part
from fedpriv.clients.users import load_users
from fedpriv.clients.worker import HostSettings
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.experiment.build import build_task
from fedpriv.privacy.round import add_up
from fedpriv.wire import decode_answer, digest_of
from tests.clients.tiny_server import (
    NODE,
    PARAMETERS,
    PATIENCE,
    TASK,
    TinyServer,
    make_certificates,
    make_offer,
    serving,
)

QUICK = Backoff(0.01, 0.05)
# Joins as the command does, says on stdout what it has loaded, and ends as `join` does.
COMMAND = """
import logging, sys
from pathlib import Path
from fedpriv.clients.membership import NodeSettings, join
from fedpriv.clients.worker import HostSettings
logging.basicConfig(level=logging.INFO, format="%(message)s")
server, users, certificates, state = sys.argv[1:]
join(NodeSettings(server, HostSettings(users, "cpu"), Path(certificates), state=Path(state)))
print(sorted({"torch", "flwr"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[grpc.ServerCredentials, Path]:
    return make_certificates(tmp_path_factory.mktemp("certs"))


def write_users(folder: Path, ids: list[str]) -> Path:
    rng = np.random.default_rng(5)
    folder.mkdir()
    for number, name in enumerate(ids, 3):
        x = rng.standard_normal((number, 4)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=rng.integers(0, 3, number))
    return folder


def in_process(users: Path, positions: list[int]) -> InProcessTransport:
    task = build_task(TASK.model, TASK.options, TASK.seed, TASK.loss)
    store = load_users(str(users))
    order = np.argsort([store.id_of(user) for user in range(store.population)])
    hosted = np.empty(len(positions), np.int64)
    hosted[order] = positions
    return InProcessTransport(task, store, torch.device("cpu"), 10**6, hosted, processes=1)


def assert_expected(total: np.ndarray, users: Path, positions: list[int]) -> None:
    """Assert that a total is the sum that this process computes for the round on offer.

    Each number may differ by one unit for each user, because rounding depends on threads.
    """
    offer, _ = make_offer(users=np.array(positions))
    partials = in_process(users, positions).collect(offer.request(PARAMETERS))
    expected = add_up(partials, offer.clipping, len(positions)).total
    np.testing.assert_allclose(total, expected, rtol=0.0, atol=len(positions))


def test_a_silo_sends_the_sum_that_the_engine_computes(
    tmp_path: Path, certificates: tuple[grpc.ServerCredentials, Path]
) -> None:
    credentials, folder = certificates
    users, positions = write_users(tmp_path / "users", ["u2", "u10"]), [3, 70]

    async def main() -> TinyServer:
        tiny = TinyServer(positions)
        async with serving(tiny, credentials) as port:
            host = HostSettings(str(users), "cpu")
            node = NodeSettings(
                f"localhost:{port}", host, folder, state=tmp_path / "state", once=True
            )
            task = asyncio.create_task(take_part(node))
            await tiny.offer(users=np.array(positions))
            received = asyncio.create_task(tiny.answers.get())
            await asyncio.wait([task, received], return_when=asyncio.FIRST_COMPLETED)
            header, data = await received
            await tiny.script.put(None)
            await task
        answer = decode_answer(header)
        assert (answer.content.users, answer.content.weight) == (2, 2)
        assert_expected(np.frombuffer(data, "<i4"), users, positions)
        return tiny

    tiny = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    hello = tiny.hellos.get_nowait()
    assert (hello.node, hello.users_sha256) == (NODE, digest_of(["u10", "u2"]))
    assert tiny.names == {NODE}


@asynccontextmanager
async def process(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """A node as a process of its own, which does not outlive the block."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COMMAND, *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def children_of(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]


def runs(pid: int) -> bool:
    """Whether there is such a process, which has not ended; nobody may have asked how it ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_a_node_of_one_user_sends_a_clipped_sum_and_stops_when_it_is_told(
    tmp_path: Path, certificates: tuple[grpc.ServerCredentials, Path]
) -> None:
    credentials, folder = certificates
    users = write_users(tmp_path / "users", ["alone"])

    async def main() -> None:
        tiny = TinyServer()
        async with (
            serving(tiny, credentials) as port,
            process(f"127.0.0.1:{port}", users, folder, tmp_path / "state") as node,
        ):
            await tiny.offer()
            received, ended = map(asyncio.ensure_future, (tiny.answers.get(), node.communicate()))
            await asyncio.wait([received, ended], return_when=asyncio.FIRST_COMPLETED)
            assert not ended.done(), (await ended)[1].decode()
            header, data = await received
            workers = children_of(node.pid)
            assert workers
            node.send_signal(signal.SIGTERM)
            out, err = await ended
        assert node.returncode == 0, err.decode()
        assert out.decode() == "[]\n"
        assert "stopped" in err.decode()
        assert "alone" not in err.decode()
        while any(map(runs, workers)):
            await asyncio.sleep(0.01)
        clipping = make_offer()[0].clipping
        answer = decode_answer(header)
        assert (answer.content.users, answer.content.weight) == (1, 1)
        total = np.frombuffer(data, "<i4").astype(np.int64)
        assert_expected(total, users, [3])
        assert clipping.admits(total, 1, 1)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_users_that_cannot_be_loaded_end_it_at_once(tmp_path: Path) -> None:
    host = HostSettings(str(tmp_path / "none"), "cpu")
    node = NodeSettings("127.0.0.1:9", host, node="n", state=tmp_path)
    with pytest.raises(DataError, match="do not exist"):
        asyncio.run(asyncio.wait_for(take_part(node), PATIENCE))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": None}, "exactly one must be given"),
        ({"server": "nonsense"}, "must be HOST:PORT"),
        ({"server": "192.0.2.1:7443"}, "perhaps another machine"),
        ({"consent": Path("/nowhere/consent.toml")}, "cannot be read"),
        ({"state": Path("/dev/null/state")}, "cannot be created"),
    ],
)
def test_settings_are_checked_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reason: str
) -> None:
    monkeypatch.setattr(membership, "Worker", None)
    host = HostSettings("unused")
    fields = {"server": "127.0.0.1:9", "host": host, "node": "n", "state": tmp_path}
    with pytest.raises(InvalidValueError, match=reason):
        asyncio.run(take_part(NodeSettings(**{**fields, **changes})))


@pytest.mark.parametrize("xdg", [True, False])
def test_a_node_remembers_in_a_folder_of_its_own_that_nobody_else_can_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, xdg: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg") if xdg else "")
    monkeypatch.setattr(membership, "Worker", None)
    node = NodeSettings("127.0.0.1:9", HostSettings("unused"), node="ä %")
    with pytest.raises(AttributeError):
        asyncio.run(take_part(node))
    base = tmp_path / ("xdg" if xdg else ".local/state")
    folder = base / "fedpriv" / "%C3%A4 %25"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "journal.sqlite").stat().st_mode) == 0o600


@pytest.mark.parametrize("state", [True, False])
def test_a_node_without_a_home_must_be_told_where_to_remember(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, state: bool
) -> None:
    def home() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(membership, "Worker", None)
    folder = tmp_path / "state" if state else None
    node = NodeSettings("127.0.0.1:9", HostSettings("unused"), node="n", state=folder)
    with pytest.raises(AttributeError if state else InvalidValueError) as caught:
        asyncio.run(take_part(node))
    assert ("--state must name a folder" in str(caught.value)) is not state
    assert (tmp_path / "state" / "journal.sqlite").exists() is state
