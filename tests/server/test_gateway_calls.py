"""Who reaches a handler, over real TLS: those with a valid, enrolled certificate."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest

from fedpriv import wire
from fedpriv.server import certificates
from fedpriv.server.certificates import tls_context
from fedpriv.server.enrolment import EnrolledCertificates
from fedpriv.server.gateway import (
    NODE,
    RateLimit,
    by_certificate,
    by_declaration,
)
from fedpriv.server.service import Service
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import NODE_KEY
from simulations.loopback import issue
from tests.server.hostile_nodes import CALLS, SERVICE, Outcome, one
from tests.server.loopback import Site, channel_to, enrol, serving, site, strike, until
from tests.wire.stub import FederationStub

USERS = {"silo": ["0", "1"], "four": ["4"], "five": ["5"], "hôpital": ["6"]}
NOW = datetime.now(UTC)
DAY = timedelta(days=1)
HANDLERS = {
    Service: {
        "connect": "Connect",
        "download": "Download",
        "upload": "Upload",
        "fetch_ledger": "FetchLedger",
        "fetch_model": "FetchModel",
        "get_status": "GetStatus",
    },
}


def counting(entered: list[tuple[str, str]], name: str, method: Callable) -> Callable:
    async def counted(self: object, request: object, context: object) -> object:
        entered.append((name, NODE.get()))
        return await method(self, request, context)

    return counted


@pytest.fixture(scope="module")
def entered() -> Iterator[list[tuple[str, str]]]:
    """Every entry of a handler: its name, and the node that it was told of."""
    found: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, methods in HANDLERS.items():
            for attribute, name in methods.items():
                method = counting(found, name, getattr(owner, attribute))
                patch.setattr(owner, attribute, method)
        yield found


@pytest.fixture(scope="module")
def served(
    entered: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), USERS) as made:
        yield made


@pytest.fixture
def alone(entered: list[tuple[str, str]], tmp_path: Path) -> Iterator[Site]:
    """A server of a test's own, whose certificates it may spoil."""
    with site(tmp_path, USERS) as made:
        yield made


def outcomes(port: int, certs: Path, bundle: Path | None) -> dict[str, Outcome]:
    """What each method says to whoever has the certificate of a bundle."""
    with channel_to(port, certs, bundle) as channel:
        return {name: call(channel) for name, call in CALLS.items()}


def port_of(made: Site) -> int:
    return made.server.address.port


def admitted(made: Site, node: str, entered: list[tuple[str, str]]) -> None:
    """Assert that a node reaches every handler once, under its name."""
    before = len(entered)
    codes = set(outcomes(port_of(made), made.certs, made.certs / "nodes" / node).values())
    assert not codes & {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
    assert sorted(entered[before:]) == sorted((name, node) for name in CALLS)


def of_another_authority(made: Site, folder: Path) -> Path:
    certificates.init(folder / "other", ["localhost"])
    return issue(folder / "other", "four").folder


def issued(made: Site, **validity: object) -> Path:
    """Another certificate of a node, in place of the one it had."""
    issue(made.certs, "four", **validity)
    enrol(made.certs, USERS)
    return made.certs / "nodes" / "four"


def servers_own(made: Site, folder: Path) -> Path:
    """The server's certificate and key, as if they were a node's."""
    folder.mkdir(exist_ok=True)
    for end in ("pem", "key"):
        (folder / f"node.{end}").write_bytes((made.certs / "server" / f"server.{end}").read_bytes())
    return folder


def none(made: Site, folder: Path) -> None:
    return None


def expired(made: Site, folder: Path) -> Path:
    return issued(made, begin=NOW - 2 * DAY, lifetime=DAY)


def not_yet_valid(made: Site, folder: Path) -> Path:
    return issued(made, begin=NOW + DAY)


IN_TLS: dict[str, Callable[[Site, Path], Path | None]] = {
    "none": none,
    "of another authority": of_another_authority,
    "expired": expired,
    "not yet valid": not_yet_valid,
    "for servers": servers_own,
}


@pytest.mark.parametrize("case", IN_TLS)
def test_without_a_valid_certificate_nothing_is_reached(
    alone: Site, entered: list[tuple[str, str]], tmp_path: Path, case: str
) -> None:
    before = len(entered)
    bundle = IN_TLS[case](alone, tmp_path / "bundle")
    found = outcomes(port_of(alone), alone.certs, bundle)
    assert found == dict.fromkeys(CALLS, grpc.StatusCode.UNAVAILABLE)
    assert entered[before:] == []
    admitted(alone, "five", entered)


def not_enrolled(made: Site) -> Path:
    return issue(made.certs, "stranger").folder


def added_while_it_runs(made: Site) -> Path:
    bundle = issue(made.certs, "stranger").folder
    enrol(made.certs, {**USERS, "stranger": ["7"]})
    return bundle


def another_certificate(made: Site) -> Path:
    return issue(made.certs, "four").folder


def struck_off(made: Site) -> Path:
    strike(made.certs, "four")
    return made.certs / "nodes" / "four"


def removed(made: Site) -> Path:
    enrol(made.certs, {node: users for node, users in USERS.items() if node != "four"})
    return made.certs / "nodes" / "four"


def damaged_enrolment(made: Site) -> Path:
    (made.certs / "enrolment.toml").write_text("[nodes")
    return made.certs / "nodes" / "four"


def missing_enrolment(made: Site) -> Path:
    (made.certs / "enrolment.toml").unlink()
    return made.certs / "nodes" / "four"


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (not_enrolled, grpc.StatusCode.UNAVAILABLE),
        (added_while_it_runs, grpc.StatusCode.PERMISSION_DENIED),
        (another_certificate, grpc.StatusCode.UNAVAILABLE),
        (struck_off, grpc.StatusCode.UNAVAILABLE),
        (removed, grpc.StatusCode.UNAVAILABLE),
        (damaged_enrolment, grpc.StatusCode.UNAVAILABLE),
        (missing_enrolment, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_certificate_that_tls_accepts_reaches_nothing_if_it_may_not(
    alone: Site,
    entered: list[tuple[str, str]],
    spoil: Callable[[Site], Path],
    code: grpc.StatusCode,
) -> None:
    admitted(alone, "four", entered)
    before = len(entered)
    found = outcomes(port_of(alone), alone.certs, spoil(alone))
    assert found == dict.fromkeys(CALLS, code)
    assert entered[before:] == []


def test_what_only_the_operator_should_know_is_not_told(alone: Site) -> None:
    with alone.channel("four") as channel:
        missing_enrolment(alone)
        with pytest.raises(grpc.RpcError) as caught:
            FederationStub(channel).GetStatus(pb.StatusRequest())
    assert "HTTP status 401" in caught.value.details()
    assert "enrolment" not in caught.value.details()


def test_striking_off_counts_on_a_connection_that_is_open(
    alone: Site, entered: list[tuple[str, str]]
) -> None:
    with alone.channel("four") as channel:
        assert answer_to(channel) == SERVING
        strike(alone.certs, "four")
        before = len(entered)
        assert answer_to(channel) is grpc.StatusCode.UNAUTHENTICATED
    assert entered[before:] == []


SERVING = "serving"


def answer_to(channel: grpc.Channel) -> Outcome | str:
    """`SERVING` if the server says where the run stands."""
    outcome = one(channel, SERVICE + "GetStatus")
    return SERVING if isinstance(outcome, bytes) else outcome


@pytest.mark.parametrize("node", USERS)
def test_every_enrolled_node_reaches_every_handler_under_its_name(
    served: Site, entered: list[tuple[str, str]], node: str
) -> None:
    admitted(served, node, entered)


@pytest.mark.parametrize(
    "method",
    ["/fedpriv.v1.Federation/Other", "/x.Y/Connect", "/", "/../a", "/grpc.health.v1.Health/Check"],
)
def test_what_is_no_method_reaches_nothing(
    served: Site, entered: list[tuple[str, str]], method: str
) -> None:
    before = len(entered)
    with served.channel("four") as channel:
        assert one(channel, method) is grpc.StatusCode.UNIMPLEMENTED
    assert entered[before:] == []


@contextmanager
def limited(folder: Path, rates: RateLimit) -> Iterator[Site]:
    certs = folder / "certs"
    certificates.init(certs, ["localhost"])
    for node in USERS:
        issue(certs, node)
    identify = by_certificate(EnrolledCertificates(enrol(certs, USERS)))
    with serving(certs, USERS, identify, tls_context(certs / "server"), rates=rates) as made:
        yield made


def test_a_node_that_calls_too_often_waits_and_others_do_not(
    entered: list[tuple[str, str]], tmp_path: Path
) -> None:
    time = [1000.0]
    refused = grpc.StatusCode.RESOURCE_EXHAUSTED
    with (
        limited(tmp_path, RateLimit(3, lambda: time[0])) as made,
        made.channel("four") as four,
        made.channel("five") as five,
    ):

        def asked(channel: grpc.Channel, times: int) -> list[Outcome]:
            return [answer_to(channel) for _ in range(times)]

        before = len(entered)
        assert asked(four, 5) == [SERVING] * 3 + [refused] * 2
        assert asked(five, 3) == [SERVING] * 3
        time[0] += 20.0  # a third of a minute: one more
        assert asked(four, 2) == [SERVING, refused]
        time[0] += 3600.0  # a bucket has no more than its minute
        assert asked(four, 4) == [SERVING] * 3 + [refused]
        assert len(entered) - before == 10


def test_a_node_has_so_many_calls_open_and_no_more(served: Site) -> None:
    """Whatever a node leaves open ends somewhere; here it connects and does not say hello."""
    until(lambda: served.server.service.authentication.idle_seconds() > 0.0)
    open_calls = served.server.service.authentication._open
    silent = threading.Event()
    with ExitStack() as stack:
        # One connection carries 8 calls at once.
        channels = [stack.enter_context(served.channel("four")) for _ in range(3)]
        stack.callback(silent.set)
        connect = [channel.stream_stream(SERVICE + "Connect") for channel in channels]
        held = [
            connect[number % 2]((b"" for _ in iter(silent.wait, True)), timeout=60.0)
            for number in range(16)
        ]
        until(lambda: open_calls["four"] == 16)
        with pytest.raises(grpc.RpcError) as caught:
            next(connect[2](iter([b""]), timeout=60.0))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "the node has 16 calls open"
        with served.channel("five") as other:
            assert answer_to(other) == SERVING
        assert served.server.service.authentication.idle_seconds() == 0.0
        held.pop().cancel()
        until(lambda: answer_to(channels[2]) == SERVING)
    until(lambda: served.server.service.authentication.idle_seconds() > 0.0)


@pytest.fixture(scope="module")
def in_plain_text(entered: list[tuple[str, str]]) -> Iterator[Site]:
    with serving(Path(), USERS, by_declaration, None) as made:
        yield made


def said(made: Site, metadata: list[tuple[str, str]]) -> tuple[grpc.StatusCode, str]:
    """How a call with this metadata ends."""
    with grpc.insecure_channel(made.target) as channel:
        call = FederationStub(channel).GetStatus.future(
            pb.StatusRequest(), metadata=metadata, timeout=20.0
        )
        return call.code(), call.details()


@pytest.mark.parametrize("node", USERS)
def test_in_plain_text_a_node_is_whom_it_says(
    in_plain_text: Site, entered: list[tuple[str, str]], node: str
) -> None:
    before = len(entered)
    assert said(in_plain_text, [(NODE_KEY, quote(node))])[0] is grpc.StatusCode.OK
    assert entered[before:] == [("GetStatus", node)]


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ([], "the name of a node is ''"),
        ([(NODE_KEY, "")], "the name of a node is ''"),
        ([(NODE_KEY, "%0a")], "the name of a node is"),
        ([(NODE_KEY, "a%2fb")], "the name of a node is 'a/b'"),
        ([(NODE_KEY, "%ff")], "codec can't decode"),
        ([(NODE_KEY, "x" * 100)], "the name of a node is"),
    ],
)
def test_in_plain_text_who_has_no_legal_name_reaches_nothing(
    in_plain_text: Site,
    entered: list[tuple[str, str]],
    metadata: list[tuple[str, str]],
    sentence: str,
) -> None:
    before = len(entered)
    code, details = said(in_plain_text, metadata)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert sentence in details
    assert entered[before:] == []


def test_in_plain_text_who_is_not_enrolled_reaches_nothing(
    in_plain_text: Site, entered: list[tuple[str, str]]
) -> None:
    before = len(entered)
    code, details = said(in_plain_text, [(NODE_KEY, "stranger")])
    assert (code, details) == (grpc.StatusCode.PERMISSION_DENIED, "the node is not enrolled")
    assert entered[before:] == []


def test_nodes_that_call_at_once_are_not_mixed_up(
    served: Site, entered: list[tuple[str, str]]
) -> None:
    before, names = len(entered), list(USERS)

    def calls(node: str) -> None:
        with served.channel(node) as channel:
            for _ in range(50):
                FederationStub(channel).GetStatus(pb.StatusRequest())

    threads = [threading.Thread(target=calls, args=(node,)) for node in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entered[before:]) == sorted([("GetStatus", node) for node in names] * 50)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (wire.Hello("five", wire.digest_of(["5"])), grpc.StatusCode.INVALID_ARGUMENT),
        (wire.Hello("four", wire.digest_of(["5"])), grpc.StatusCode.FAILED_PRECONDITION),
        (wire.Hello("four", wire.digest_of([])), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_hello_that_does_not_fit_the_certificate_connects_nobody(
    served: Site, hello: wire.Hello, code: grpc.StatusCode
) -> None:
    before = len(served.server.service.connections)
    said = iter([pb.FromNode(hello=wire.HELLO.encode(hello))])
    with served.channel("four") as channel, pytest.raises(grpc.RpcError) as caught:
        next(FederationStub(channel).Connect(said))
    assert caught.value.code() is code
    assert len(served.server.service.connections) == before
