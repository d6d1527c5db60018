"""What goes wrong at a site: one line, counters and a table, and who may see which."""

import json
import logging
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedpriv import wire
from fedpriv.errors import DataError, StoppedError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.report.records import SiteRecord, Trouble
from fedpriv.run.folder import RunFolder
from fedpriv.server import certificates, monitoring
from fedpriv.server import service as service_module
from fedpriv.server.certificates import tls_context
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment
from fedpriv.server.gateway import by_certificate
from fedpriv.server.monitoring import SERVER, STRANGER, Metrics, Sites
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import Decline, naming
from fedpriv.wire import federation_pb2 as pb
from simulations.loopback import issue
from tests.server.loopback import (
    PATIENCE,
    POPULATION_ID,
    Answering,
    Site,
    clipped,
    enrol,
    nodes,
    sends,
    serving,
    site,
    strike,
    summed,
    until,
)

PARAMETERS = {"w": np.zeros((30, 10), np.float32)}
LAYOUT = Layout.of(PARAMETERS)
USERS = {"four": ["4"], "silo": ["s0", "s1"], "ward": ["w0", "w1"]}  # at positions 0, 1-2, 3-4
SOON = PATIENCE.model_copy(update={"deadline_seconds": 2.0, "absent_seconds": 0.1})
START = datetime(2030, 1, 1, tzinfo=UTC)


def request_to(users: list[int]) -> RoundRequest:
    clipping, drawn = Clipping(LAYOUT, flat(LAYOUT, 1.0)), np.array(users, np.int64)
    local = LocalTraining(0.5, steps=1)
    return RoundRequest("run", 0, 0, PARAMETERS, clipping, local, drawn, bytes(32))


def of(number: float) -> Answering:
    """Answers with this number in all places of all users' updates."""

    def answering(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        update = {"w": np.full((30, 10), number, np.float32)}
        return clipped(offer, *[update] * len(request.users))

    return answering


def too_long(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    users, most = len(request.users), request.clipping.weight_cap
    return summed(offer, PartialSum("", users, np.full(300, 2**24), users * most))


def too_heavy(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    users, most = len(request.users), request.clipping.weight_cap
    return summed(offer, PartialSum("", users, np.ones(300, np.int64), users * most + 1))


def only_one(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    return clipped(offer, {"w": np.ones((30, 10), np.float32)})


def declines(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    return sends(offer, Decline("too dear\nFORGED\x1b[2J"), {})


def silent(offer: wire.RoundOffer, request: RoundRequest) -> None:
    return None


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, USERS) as made:
        yield made


def collect(made: Site, users: list[int]) -> int:
    """Collect a round; how many contributions came."""
    return sum(partial.users for partial in made.transport(SOON).collect(request_to(users)))


def table(made: Site) -> dict[str, SiteRecord]:
    return dict(made.server.service.sites.table().sites)


def counted(made: Site) -> dict[tuple[str, str], float]:
    """Troubles on the page for Prometheus, by node and kind."""
    service = made.server.service
    with Metrics(lambda: service.published, service.sites).served("127.0.0.1", 0) as port:
        text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {
        (s.labels["node"], s.labels["what"]): s.value
        for s in samples
        if s.name == "fedpriv_troubles_total"
    }


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Node, what and why of each line about a site."""
    found = [record for record in caplog.records if hasattr(record, "what")]
    assert {record.levelno for record in found} <= {logging.WARNING}
    return [(record.node, record.what, record.why) for record in found]


@pytest.mark.parametrize(
    ("answering", "what", "why", "accepted", "counts"),
    [
        (of(np.nan), "not finite", "all updates of its users are NaN, infinite or zero", True, 2),
        (of(np.inf), "not finite", "all updates of its users are NaN, infinite or zero", True, 2),
        (only_one, "unfinished", "training of some users failed or took too long", True, 1),
        (declines, "declined", r"too dear\nFORGED\x1b[2J", True, 0),
        (too_long, "answer refused", "the sum is longer than its users", False, 0),
        (too_heavy, "answer refused", "the sum claims more weight than", False, 0),
    ],
    ids=["NaN", "infinite", "one of two", "declined", "too long", "too heavy"],
)
def test_a_site_that_does_something_wrong_is_named_with_what_and_why(
    made: Site,
    caplog: pytest.LogCaptureFixture,
    answering: Answering,
    what: str,
    why: str,
    accepted: bool,
    counts: int,
) -> None:
    with nodes(made, {"silo": answering, "ward": of(1.0)}) as connected:
        assert collect(made, [1, 2, 3, 4]) == counts + 2
        until(lambda: connected["silo"].receipts)
        (receipt,) = connected["silo"].receipts
        sites = table(made)
    assert receipt.accepted == accepted
    assert accepted or why in receipt.reason
    ((node, said, reason),) = lines(caplog)
    assert (node, said) == ("silo", what)
    assert why in reason
    assert counted(made) == {("silo", what): 1.0}
    assert sites["silo"].troubles == {what: 1}
    assert sites["silo"].last[Trouble(what)].why == reason
    assert sites["silo"].answered == (counts > 0)
    assert sites["ward"].troubles == {}
    assert sites["ward"].answered == 1


def test_who_has_not_answered_at_the_end_of_a_round_is_late(
    made: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(made, {"silo": silent}):
        assert collect(made, [1, 3]) == 0
    assert set(lines(caplog)) == {
        ("silo", "late", "no answer by the end of the round"),
        ("ward", "late", "not connected in the round"),
    }
    assert [table(made)[node].troubles for node in ("silo", "ward")] == [{Trouble.LATE: 1}] * 2


def test_nobody_is_late_for_a_round_that_the_operator_stops(
    made: Site, caplog: pytest.LogCaptureFixture
) -> None:
    transport = made.transport(PATIENCE)

    def stops(offer: wire.RoundOffer, request: RoundRequest) -> None:
        transport.stop()

    with nodes(made, {"silo": stops}), pytest.raises(StoppedError):
        list(transport.collect(request_to([1, 3])))
    assert lines(caplog) == []


@pytest.mark.parametrize("answering", [of(np.nan), declines, too_long, silent])
def test_a_node_of_one_user_is_named_with_a_round_in_the_secret_table_alone(
    made: Site, caplog: pytest.LogCaptureFixture, answering: Answering
) -> None:
    caplog.set_level(logging.INFO)
    with nodes(made, {"four": answering}):
        before = len(caplog.records)
        collect(made, [0])
        after = caplog.records[before:]
        ((name, _, _),) = lines(caplog)
        assert sum(table(made)["four"].troubles.values()) == 1
    assert name == "a node of one user"
    assert not [record for record in after[:-1] if "four" in str(vars(record))]
    assert {node for node, _ in counted(made)} == {"a node of one user"}


def test_a_node_that_calls_too_often_and_one_that_is_struck_off_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with site(tmp_path, USERS, calls_per_minute=3) as made:
        with made.channel("silo") as channel:
            ask = channel.unary_unary("/fedpriv.v1.Federation/GetStatus")
            for _ in range(3):
                ask(b"", timeout=30.0)
            for _ in range(10):
                with pytest.raises(grpc.RpcError, match="calls too often"):
                    ask(b"", timeout=30.0)
        strike(made.certs, "ward")
        with made.channel("ward") as channel, pytest.raises(grpc.RpcError, match="status 401"):
            channel.unary_unary("/fedpriv.v1.Federation/GetStatus")(b"", timeout=30.0)
        issue(made.certs, "visitor")
        with made.channel("visitor") as channel, pytest.raises(grpc.RpcError, match="status 401"):
            channel.unary_unary("/fedpriv.v1.Federation/GetStatus")(b"", timeout=30.0)
        sites, numbers = table(made), counted(made)
    often, struck, unknown = lines(caplog)  # one line for ten refusals
    assert often == ("silo", "call refused", "the node calls too often")
    assert struck[:2] == ("ward", "call refused")
    assert unknown[:2] == (STRANGER, "call refused")
    assert "CN=visitor" in unknown[2]
    assert sites["silo"].troubles == {Trouble.CALL: 10}
    assert numbers["silo", "call refused"] == 10
    assert sites["ward"].troubles == {Trouble.CALL: 1}
    assert numbers[STRANGER, "call refused"] == 1


def test_an_enrolment_that_cannot_be_read_is_the_servers_trouble(
    made: Site, caplog: pytest.LogCaptureFixture
) -> None:
    (made.certs / "enrolment.toml").write_text("nonsense")
    with made.channel("silo") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/fedpriv.v1.Federation/GetStatus")(b"", timeout=30.0)
    ((node, what, why),) = lines(caplog)
    assert (node, what) == (SERVER, "enrolment")
    assert "enrolment.toml" in why
    assert "enrolment.toml" not in caught.value.details()


@pytest.mark.parametrize(("node", "name"), [("silo", "silo"), ("four", "a node of one user")])
def test_a_node_that_knows_another_ledger_is_named_unless_it_has_one_user(
    made: Site, caplog: pytest.LogCaptureFixture, node: str, name: str
) -> None:
    made.server.service.ledger = lambda _: None
    request = pb.LedgerRequest(count=1, hash="ab" * 32).SerializeToString()
    with made.channel(node) as channel:
        parts = channel.unary_stream("/fedpriv.v1.Federation/FetchLedger")(request, timeout=30.0)
        assert [pb.FilePart.FromString(part).unknown for part in parts] == [True]
    assert lines(caplog) == [
        (name, "ledger", "the node knows a head that the ledger never had"),
    ]


def test_a_node_with_other_users_is_named(made: Site, caplog: pytest.LogCaptureFixture) -> None:
    hello = pb.FromNode(hello=wire.HELLO.encode(wire.Hello("four", wire.digest_of(["5"]))))
    said = iter([hello.SerializeToString()])
    with made.channel("four") as channel, pytest.raises(grpc.RpcError, match="other users than"):
        next(channel.stream_stream("/fedpriv.v1.Federation/Connect")(said))
    assert lines(caplog) == [
        ("four", "enrolment", "the node holds other users than are enrolled at it")
    ]


def test_a_certificate_is_warned_of_before_its_end_and_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends in ten days, one while its node is connected, one and the server's in a year."""
    monkeypatch.setattr(service_module, "_RECHECK_SECONDS", 0.2)
    monkeypatch.setattr(monitoring, "_SECOND", 0.05)
    certs = tmp_path / "certs"
    certificates.init(certs, ["localhost"])
    begin = datetime.now(UTC) - timedelta(minutes=1)
    ends = {"ward": timedelta(days=10), "four": timedelta(seconds=5), "silo": timedelta(days=365)}
    for node, end in ends.items():
        issue(certs, node, begin=begin, lifetime=timedelta(minutes=1) + end)
    identify = by_certificate(EnrolledCertificates(enrol(certs, USERS)))
    with serving(certs, USERS, identify, tls_context(certs / "server")) as made:
        sites = made.server.service.sites
        shown = naming.load_certificate(certs / "server" / "server.pem")
        sites.serves_until(shown.not_valid_after_utc)
        with (
            sites.kept(RunFolder(tmp_path)),
            nodes(made, dict.fromkeys(USERS, silent)) as connected,
        ):
            until(lambda: len(lines(caplog)) == 2)  # soon to end
            until(lambda: connected["four"].ended)
            until(lambda: len(lines(caplog)) == 3)  # and the call that had been open
            found = table(made)
    said = lines(caplog)
    assert {(node, what) for node, what, _ in said} == {
        ("ward", "certificate"),
        ("four", "certificate"),
        ("a node of one user", "call refused"),
    }
    (ward,) = [why for node, _, why in said if node == "ward"]
    assert "in 9 days" in ward
    left = found["ward"].certificate_end - datetime.now(UTC)
    assert timedelta(days=9) < left <= timedelta(days=10)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sites(clock: Clock) -> Sites:
    return Sites(Enrolment(POPULATION_ID, USERS), clock)


def test_of_each_kind_a_node_has_one_line_a_minute_and_all_are_counted(
    sites: Sites, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(120):
        clock.now = START + timedelta(seconds=second)
        sites.trouble("silo", Trouble.DECLINED, "too dear")
        sites.trouble("ward", Trouble.DECLINED, "too dear")
        sites.trouble("silo", Trouble.LATE, "no answer")
    assert len(lines(caplog)) == 2 * 3
    assert sites.table().sites["silo"].troubles == {Trouble.DECLINED: 120, Trouble.LATE: 120}


def test_a_clock_that_is_set_back_silences_nothing(
    sites: Sites, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    sites.trouble("silo", Trouble.DECLINED, "too dear")
    clock.now -= timedelta(hours=12)
    for _ in range(11):
        clock.now += timedelta(hours=1)
        for _ in range(2):
            sites.trouble("silo", Trouble.DECLINED, "too dear")
    assert len(lines(caplog)) == 12


def test_who_is_away_for_long_is_named_once_a_day_and_again_when_it_leaves_again(
    sites: Sites, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for node in ("four", "silo"):
        sites.came(node, None)
    sites.look()
    clock.now += timedelta(hours=1)
    sites.left("four")
    sites.look()
    assert lines(caplog) == [("ward", "away", "not connected since 2030-01-01 00:00 UTC")]
    clock.now += timedelta(minutes=10)
    for _ in range(3):
        sites.look()
    assert lines(caplog)[1:] == [("four", "away", "not connected since 2030-01-01 01:00 UTC")]
    sites.came("four", None)
    sites.left("four")
    clock.now += timedelta(minutes=10)
    sites.look()
    assert [node for node, _, _ in lines(caplog)] == ["ward", "four", "four"]
    clock.now += timedelta(days=1)
    sites.look()
    assert [node for node, _, _ in lines(caplog)[3:]] == ["four", "ward"]


def test_certificates_are_warned_of_daily_from_30_days_before_their_end(
    sites: Sites, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    sites.serves_until(START + timedelta(days=31))
    for node in USERS:
        sites.came(node, START + timedelta(days=400))
    for hour in range(24 * 33):
        clock.now = START + timedelta(hours=hour)
        sites.look()
    said = lines(caplog)
    assert {(node, what) for node, what, _ in said} == {(SERVER, "certificate")}
    assert len(said) == 32
    assert "ends at 2030-02-01 00:00 UTC, in 30 days" in said[0][2]
    assert "expired at 2030-02-01" in said[-1][2]


def test_the_table_is_for_its_owner_alone_and_outlives_a_server(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "_SECOND", 0.01)
    folder = RunFolder(tmp_path)
    (tmp_path / ".sites.json.partial").touch(0o644)  # a crash left it
    with sites.kept(folder):
        sites.came("silo", START + timedelta(days=9))
        sites.trouble("silo", Trouble.DECLINED, "too dear")
        until(folder.sites.exists)
        until(lambda: folder.read_sites().sites["silo"].troubles)
    assert stat.S_IMODE(folder.sites.stat().st_mode) == 0o600
    before = folder.read_sites().sites["silo"]
    assert (before.connected, before.certificate_end) == (True, START + timedelta(days=9))
    later = Sites(Enrolment(POPULATION_ID, USERS))
    with later.kept(folder):
        later.trouble("silo", Trouble.DECLINED, "too dear")
    after = folder.read_sites().sites["silo"]
    assert (after.connected, after.certificate_end) == (False, START + timedelta(days=9))
    assert after.troubles == {Trouble.DECLINED: 2}


def test_a_table_that_cannot_be_written_or_read_ends_nothing(
    sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "_SECOND", 0.01)
    gone = RunFolder(tmp_path / "gone")
    with sites.kept(gone):
        until(lambda: "the table of sites cannot be written" in caplog.text)
    good = RunFolder(tmp_path)
    good.sites.write_text(json.dumps({"sites": 3}))
    with pytest.raises(DataError, match=r"sites\.json cannot be read"):
        good.read_sites()
    with sites.kept(good):
        pass
    assert "its counts begin anew" in caplog.text
    assert good.read_sites().sites.keys() == USERS.keys()
