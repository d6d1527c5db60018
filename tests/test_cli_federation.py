"""Commands of a deployment: certificates, where a run stands, and options that do not fit."""

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from safetensors.torch import load_file, save

from fedpriv import wire
from fedpriv.clients import status as status_module
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.bundled import experiment_file
from fedpriv.report.records import Happening, SiteRecord, SiteTable, Trouble
from fedpriv.run.folder import RunFolder
from fedpriv.server.certificates import init
from fedpriv.server.enrolment import Enrolment
from fedpriv.wire import RunState, Status, chunks
from fedpriv.wire import federation_pb2 as pb
from simulations.loopback import issue
from tests.commandline import fedpriv, printed, refused

ROOT = Path(__file__).parents[1]
STATUS = Status("digits", 3, 10, 1.2341, 2.0, 1e-5, 4, 3, 1797, RunState.COLLECTING)


@dataclass(frozen=True)
class Standing:
    """Says where it stands to whoever may ask, who was asking, or that nobody may ask."""

    answer: pb.Status
    refusal: str | None = None
    model: bytes = b""

    def fetch_model(self, request: bytes, context: grpc.ServicerContext) -> Iterator[pb.FilePart]:
        del request
        if not self.model:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no round was released yet")
        yield pb.FilePart(size=len(self.model))
        yield from (pb.FilePart(chunk=chunk) for chunk in chunks([self.model]))

    def get_status(self, request: bytes, context: grpc.ServicerContext) -> pb.Status:
        del request
        if self.refusal is not None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, self.refusal)
        names = dict(context.invocation_metadata())
        if not context.auth_context().get("x509_pem_cert"):
            assert names["fedpriv-node"] == "n"
        return self.answer


@contextmanager
def serving(servicer: Standing, certs: Path | None = None) -> Iterator[str]:
    """HOST:PORT of a server that demands certificates if there is an authority."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        status = grpc.unary_unary_rpc_method_handler(
            servicer.get_status, None, pb.Status.SerializeToString
        )
        model = grpc.unary_stream_rpc_method_handler(
            servicer.fetch_model, None, pb.FilePart.SerializeToString
        )
        service = grpc.method_handlers_generic_handler(
            "fedpriv.v1.Federation", {"GetStatus": status, "FetchModel": model}
        )
        server.add_generic_rpc_handlers((service,))
        if certs is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            key, pem, ca = (
                (certs / "server" / name).read_bytes()
                for name in ("server.key", "server.pem", "ca.pem")
            )
            credentials = grpc.ssl_server_credentials([(key, pem)], ca, require_client_auth=True)
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def rows(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return dict(cells)


def plain(server: str) -> list[str]:
    return ["--server", server, "--node", "n"]


def test_certificates_are_made_and_it_is_said_where_they_go(tmp_path: Path) -> None:
    said = printed("certs", "init", "localhost", "127.0.0.1", cwd=tmp_path)
    assert "certs/server: belongs on the server" in said
    assert "certs/authority: keep it" in said
    site = tmp_path / "site"
    site.mkdir()
    bundle = "certs/nodes/hospital-a"
    assert printed("certs", "request", "hospital-a", cwd=site) == (
        f"{bundle}/node.key: stays here; no other machine needs it\n"
        f"{bundle}/node.csr: send it to the authority, for fedpriv certs sign\n"
    )
    request = site / bundle / "node.csr"
    said = printed("certs", "sign", request, "--days", "30", cwd=tmp_path)
    pem = (tmp_path / bundle / "node.pem").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    assert said == (
        f"{bundle}: send ca.pem and node.pem to 'hospital-a', next to its node.key; valid for 30 "
        "days\n"
        "the server's enrolment, at node 'hospital-a': "
        f'certificate = "{certificate.fingerprint(hashes.SHA256()).hex()}"\n'
    )
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=29) < left < timedelta(days=31)


def test_the_servers_certificate_is_renewed_in_any_folder(tmp_path: Path) -> None:
    folder = ["--folder", tmp_path / "mine"]
    printed("certs", "init", "localhost", *folder)
    issue(tmp_path / "mine", "n")
    before = (tmp_path / "mine" / "server" / "server.pem").read_bytes()
    said = printed("certs", "server", "fl.example.org", *folder)
    after = (tmp_path / "mine" / "server" / "server.pem").read_bytes()
    assert f"{tmp_path / 'mine' / 'server'}: belongs on the server" in said
    names = x509.load_pem_x509_certificate(after).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert before != after
    assert names.value.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert (tmp_path / "mine" / "nodes" / "n" / "node.key").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["init"], "Missing argument"),
        (["init", "a:80"], "host 'a:80' is neither"),
        (["request", "../n"], "the name of a node is '../n'"),
        (["sign", "n.csr"], "n.csr cannot be read"),
        (["sign", "n.csr", "--days", "0"], "--days"),
        (["sign", "n.csr", "--days", "4000"], "--days"),
        (
            ["server", "localhost"],
            "certs holds no authority: certs/authority/ca.key cannot be read: No such file or dir",
        ),
    ],
    ids=" ".join,
)
def test_what_cannot_be_made_is_refused(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    assert sentence in refused("certs", *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_goes_to_a_terminal_is_printable(tmp_path: Path) -> None:
    printed("certs", "init", "localhost", cwd=tmp_path)
    assert "\x1b" not in refused("certs", "request", "\x1b[2Kn", cwd=tmp_path)


def test_status_over_tls_is_a_table(tmp_path: Path) -> None:
    printed("certs", "init", "127.0.0.1", cwd=tmp_path)
    issue(tmp_path / "certs", "n")
    bundle = tmp_path / "certs" / "nodes" / "n"
    with serving(Standing(wire.STATUS.encode(STATUS)), tmp_path / "certs") as server:
        text = printed("status", "--server", server, "--certificates", bundle)
    assert text.splitlines()[0].strip() == "digits"
    # ε is rounded up, and what is left of it down.
    assert rows(text) == {
        "state": "collecting",
        "round": "3 of 10",
        "ε spent": "1.235 at δ = 1e-05",
        "ε left": "0.765 of 2.0",
        "nodes connected": "3 of 4",
        "users enrolled": "1797",
    }


def test_status_is_one_json_object() -> None:
    endless = replace(STATUS, epsilon=float("inf"), epsilon_limit=float("inf"))
    with serving(Standing(wire.STATUS.encode(STATUS))) as server:
        said = json.loads(printed("status", *plain(server), "--json"))
    assert said == {
        "run": "digits",
        "round": 3,
        "rounds": 10,
        "epsilon": 1.2341,
        "epsilon_limit": 2.0,
        "delta": 1e-5,
        "nodes_enrolled": 4,
        "nodes_connected": 3,
        "users_enrolled": 1797,
        "state": "collecting",
    }
    with serving(Standing(wire.STATUS.encode(endless))) as server:
        said = json.loads(printed("status", *plain(server), "--json"))
        text = printed("status", *plain(server))
    assert (said["epsilon"], said["epsilon_limit"]) == ("Infinity", "Infinity")
    assert (rows(text)["ε spent"], rows(text)["ε left"]) == ("∞ at δ = 1e-05", "no limit")


@pytest.mark.parametrize(
    ("spent", "limit", "shown", "left"),
    [
        (1e306, 1e306, "1e+306", "0.000 of 1e+306"),
        (2.0, 1.0, "2.000", "0.000 of 1.0"),
        (0.5, 0.5 + 2.0**-12, "0.500", "0.000244 of 0.500244140625"),
    ],
)
def test_any_epsilon_can_be_shown(spent: float, limit: float, shown: str, left: str) -> None:
    found = wire.STATUS.encode(replace(STATUS, epsilon=spent, epsilon_limit=limit))
    with serving(Standing(found)) as server:
        text = rows(printed("status", *plain(server)))
    assert text["ε spent"] == f"{shown} at δ = 1e-05"
    assert text["ε left"] == left


def test_a_limit_that_is_hardly_one_can_be_shown() -> None:
    with serving(Standing(wire.STATUS.encode(replace(STATUS, epsilon_limit=1e306)))) as server:
        assert "of 1e+306" in printed("status", *plain(server))


def test_what_a_server_says_cannot_write_to_the_terminal() -> None:
    hostile = "\x1b[2K[bold]r\n│ round │ 9 of 9 │"
    with serving(Standing(wire.STATUS.encode(replace(STATUS, run=hostile)))) as server:
        text = printed("status", *plain(server))
    assert "\x1b" not in text
    assert "[bold]r" in text
    assert rows(text)["round"] == "3 of 10"
    with serving(Standing(pb.Status(), "go\n\x1b[2K" + "away" * 500)) as server:
        line = refused("status", *plain(server))
    assert "refuses, PERMISSION_DENIED: go\\n\\x1b[2Kaway" in line
    assert len(line) < 600


def sites_of(folder: Path, many: int, now: datetime) -> Path:
    """The folder of a run with this many sites at a time, the second of which is in trouble."""
    made = {f"clinic-{n}": SiteRecord(True, now, now + timedelta(days=99), 40) for n in range(many)}
    declined = Happening(now - timedelta(minutes=3), "too dear")
    broken = Happening(now - timedelta(hours=5), "all NaN")
    made["clinic-1"] = SiteRecord(
        False,
        now - timedelta(days=2),
        now + timedelta(days=9),
        7,
        {Trouble.DECLINED: 12, Trouble.NOT_FINITE: 3, Trouble.REFUSED: 1, Trouble.CALL: 4},
        {Trouble.DECLINED: declined, Trouble.NOT_FINITE: broken},
    )
    made["never-seen"] = SiteRecord()
    RunFolder(folder).write_sites(SiteTable(now, now + timedelta(days=50), made))
    return folder


@pytest.mark.parametrize("many", [3, 60])
def test_status_of_a_folder_is_a_table_of_sites(tmp_path: Path, many: int) -> None:
    now = datetime.now(UTC)
    ends = {days: f"{now + timedelta(days=days):%Y-%m-%d}" for days in (9, 50, 99)}
    lines = printed("status", sites_of(tmp_path, many, now)).splitlines()
    rows = [line.translate(str.maketrans("│┃", "  ")).split() for line in lines]
    heading = ["site", "seen", "answers", "declined", "refused", "late", "NaN", "part"]
    assert [*heading, "cert.", "ends"] in rows
    assert ["clinic-0", "now", "40", ends[99]] in rows
    assert ["clinic-1", "2", "d", "7", "12", "5", "3", ends[9]] in rows
    assert ["never-seen", "never", "unknown"] in rows
    assert len([row for row in rows if "now" in row]) == many - 1
    assert "clinic-1, 3 min ago: declined: too dear" in lines
    assert "clinic-1, 5 h ago: not finite: all NaN" in lines
    certificate = f"clinic-1: certificate: it ends at {ends[9]}"
    assert any(line.startswith(certificate) for line in lines)
    assert lines[-1].startswith(f"the server's certificate ends {ends[50]}")
    assert "secret: these counts say who took part" in " ".join(" ".join(lines).split())


def test_status_of_a_folder_says_when_its_server_is_silent(tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(hours=3)
    lines = printed("status", sites_of(tmp_path, 3, before)).splitlines()
    assert lines[0] == "the server last wrote 3 h ago; it is probably not running"
    rows = [line.replace("│", " ").split() for line in lines]
    assert ["clinic-0", "?", "40"] in [row[:3] for row in rows]
    assert "clinic-1, 8 h ago: not finite: all NaN" in lines
    assert not any(" now " in line for line in lines)


def test_status_of_a_folder_is_json_too(tmp_path: Path) -> None:
    made = sites_of(tmp_path, 3, datetime(2030, 1, 1, tzinfo=UTC))
    said = json.loads(printed("status", made, "--json"))
    site = said["sites"]["clinic-1"]
    assert site["troubles"] == {"declined": 12, "not finite": 3, "answer refused": 1} | {
        "call refused": 4
    }
    assert site["last"]["declined"] == {"time": "2029-12-31T23:57:00Z", "why": "too dear"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "exactly one of FOLDER and --server"),
        (["run", "--server", "localhost:1"], "exactly one of FOLDER and --server"),
        (["run", "--node", "n"], "a folder is read without"),
        (["run"], "run has no sites.json; only a run of `fedpriv serve` does"),
    ],
)
def test_status_needs_a_server_or_the_folder_of_a_run(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    assert sentence in refused("status", *arguments, cwd=tmp_path)


def test_a_status_that_is_none_is_refused() -> None:
    nonsense = wire.STATUS.encode(STATUS)
    nonsense.epsilon = float("nan")
    with serving(Standing(nonsense)) as server:
        assert "a status is not legal: epsilon is nan" in refused("status", *plain(server))


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{free.getsockname()[1]}"
        for command in (["status"], ["model", "--out", "m"]):
            done = fedpriv(*command, *plain(server))
            assert done.returncode == 1  # it may be there later
            assert f"error: {server} cannot be reached" in done.stderr


def test_a_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "_PATIENCE_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        done = fedpriv("status", *plain(server))
        assert done.returncode == 1
        assert f"error: {server} does not answer within" in done.stderr


BOTH_OR_NEITHER = [
    [],
    ["--certificates", "c", "--node", "n"],
]


@pytest.mark.parametrize("identity", BOTH_OR_NEITHER, ids=" ".join)
@pytest.mark.parametrize("command", ["join", "status"])
def test_a_node_is_known_in_exactly_one_way(command: str, identity: list[str]) -> None:
    more = ["--users", "h:h"] if command == "join" else []
    line = refused(command, "--server", "localhost:1", *more, *identity)
    assert "exactly one must be given" in line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve"], "Missing argument"),
        (["serve", f"{ROOT}/simulations/federation.toml", "--resume"], "--resume needs --out"),
        (["serve", "f.toml", "--log-format", "xml"], "--log-format"),
        (["join", "--users", "h:h"], "Missing option '--server'"),
        (["join", "--server", "localhost:1"], "Missing option '--users'"),
        (["join", *plain("localhost:1"), "--users", "u:u", "--memory", "0"], "--memory"),
        (
            ["join", *plain("localhost:1"), "--users", "u:u", "--memory", "99999999999999"],
            "--memory",
        ),
        (["join", *plain("localhost:1"), "--users", "u:u", "--processes", "0"], "--processes"),
        (["status", *plain("localhost")], "it must be HOST:PORT"),
        (["status", *plain("192.0.2.7:1")], "another machine"),
        (["status", "--server", "localhost:1", "--certificates", "none"], "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    assert sentence in refused(*arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging as in a process of its own, which commands configure, and that of gRPC."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


@pytest.mark.usefixtures("_no_handlers")
def test_a_plan_in_which_one_user_can_take_all_the_time_of_a_node_is_not_served(
    tmp_path: Path,
) -> None:
    text = (ROOT / "simulations" / "federation.toml").read_text(encoding="utf-8")
    bounded = [line for line in text.splitlines() if line.startswith("max_examples")]
    experiment = tmp_path / "endless.toml"
    experiment.write_text(text.replace(*bounded, ""), encoding="utf-8")
    enrolment = tmp_path / "enrolment.toml"
    enrolment.write_text(f'population = "{"5f" * 16}"\n[nodes.a]\nusers = ["ann"]\n')
    alone = "--set=federation.least_nodes=1"
    done = fedpriv("serve", experiment, "--insecure", alone, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    *_, line = done.stderr.splitlines()
    assert line.startswith("error: local.max_examples is absent")
    assert sorted(tmp_path.iterdir()) == [experiment, enrolment]


def passed_on(
    monkeypatch: pytest.MonkeyPatch, called: str, *arguments: str
) -> tuple[list[object], dict[str, object], str]:
    """What a command gives to what it calls, and what formats its log."""
    told = []

    def plain_of(value: object) -> object:
        return getattr(value, "__dict__", None) or str(value)

    def say(*arguments: object, **named: object) -> SimpleNamespace:
        (handler,) = logging.getLogger().handlers
        found = [arguments, named, type(handler.formatter).__name__]
        told.append(json.loads(json.dumps(found, default=plain_of)))
        return SimpleNamespace(stop=None, check=lambda: None)

    monkeypatch.setattr(called, say)
    logging.getLogger().handlers.clear()
    printed(*arguments)
    ((positional, named, formatter),) = told
    for settings in positional:
        if isinstance(settings, dict):
            del settings["backoff"]  # no option sets it
    return positional, named, formatter


@pytest.mark.usefixtures("_no_handlers")
def test_serve_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = "fedpriv.server.deployment.serve"
    file = str(experiment_file(Path("digits")))
    positional, named, formatter = passed_on(monkeypatch, serve, "serve", file)
    assert positional == [file, [], None]
    assert named == dict.fromkeys(("resume", "keep_going", "insecure", "leave"), False)
    assert formatter == "TextFormatter"
    options = ["--set", "rounds=1", "--set", "seed=2", "--out", "o", "--log-format", "json"]
    flags = ["--resume", "--keep-going", "--insecure", "--exit"]
    positional, named, formatter = passed_on(monkeypatch, serve, "serve", file, *options, *flags)
    assert positional == [file, ["rounds=1", "seed=2"], "o"]
    assert named == dict.fromkeys(("resume", "keep_going", "insecure", "leave"), True)
    assert formatter == "JsonFormatter"


@pytest.mark.usefixtures("_no_handlers")
def test_join_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    join = "fedpriv.clients.membership.join"
    (settings,), _, formatter = passed_on(
        monkeypatch, join, "join", *plain("localhost:1"), "--users", "u:u"
    )
    host = {"users": "u:u", "device": "auto", "activations": "float32"}
    unset = ["memory_mebibytes", "processes", "id_key"]
    assert settings == dict.fromkeys(["certificates", "consent", "state"]) | {
        "server": "localhost:1",
        "host": host | dict.fromkeys(unset),
        "node": "n",
        "verify_ledger": True,
        "trusted": [],
        "once": False,
        "own_mebibytes": 4096,
    }
    assert formatter == "TextFormatter"
    options = (
        "--server [::1]:7443 --users a.b:c --certificates c --consent t.toml --no-verify-ledger "
        "--state s --trust a:f --trust b:g --device cpu --memory 512 --once "
        "--activations bfloat16 --processes 3 --id-key k "
        "--log-format json"
    )
    (settings,), _, formatter = passed_on(monkeypatch, join, "join", *options.split())
    assert settings == {
        "server": "[::1]:7443",
        "host": {
            "users": "a.b:c",
            "device": "cpu",
            "memory_mebibytes": 512,
            "activations": "bfloat16",
            "processes": 3,
            "id_key": "k",
        },
        "certificates": "c",
        "node": None,
        "consent": "t.toml",
        "verify_ledger": False,
        "state": "s",
        "trusted": ["a:f", "b:g"],
        "once": True,
        "own_mebibytes": 4096,
    }
    assert formatter == "JsonFormatter"


@pytest.mark.usefixtures("_no_handlers")
def test_join_with_review_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.clients.membership.join", pytest.fail)
    given = *plain("localhost:1"), "--users", "u:u", "--review"
    (settings,), _, _ = passed_on(monkeypatch, "fedpriv.clients.membership.review", "join", *given)
    assert settings["server"] == "localhost:1"


def test_asking_for_the_status_loads_nothing_heavy() -> None:
    code = "import atexit, sys; sys.argv[0] = 'fedpriv'; from fedpriv.cli import main; " + (
        "atexit.register(lambda: print('torch' in sys.modules, 'grpc' in sys.modules)); main()"
    )
    with serving(Standing(wire.STATUS.encode(STATUS))) as server:
        command = [sys.executable, "-c", code, "status", *plain(server), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False True"


def test_every_command_says_what_it_is_for() -> None:
    text = fedpriv("--help").stdout
    assert all(f" {command} " in text for command in ("serve", "join", "status", "certs"))
    text = fedpriv("certs", "--help").stdout
    assert all(f" {command} " in text for command in ("init", "request", "sign", "server"))


def write_users(path: Path, *ids: str) -> Path:
    x = np.zeros((len(ids), 2), np.float32)
    np.savez(path, x=x, y=np.zeros(len(ids), np.int64), user_id=np.array(ids))
    return path


def test_a_person_at_two_sites_is_found_by_keyed_ids(tmp_path: Path) -> None:
    key = tmp_path / "id.key"
    assert "never to the server" in printed("id-key", key)
    init(tmp_path / "certs", ["localhost"])
    pieces = []
    for node, ids in (("a", ["ann", "bob"]), ("b", ["Eve", "ANN"])):
        bundle = issue(tmp_path / "certs", node)
        users = write_users(tmp_path / f"{node}.npz", *ids)
        given = ("--certificates", bundle.folder, "--id-key", key)
        pieces.append(printed("enrol", users, *given))
        assert bundle.fingerprint in pieces[-1]
        assert not any(one in pieces[-1].lower() for one in ("ann", "bob", "eve"))
    file = tmp_path / "enrolment.toml"
    for served in ([pieces[0]], pieces):
        file.write_text(f'population = "{"5f" * 16}"\n' + "".join(served), encoding="utf-8")
        if len(served) == 1:
            assert Enrolment.load(file).population == 2
    with pytest.raises(InvalidValueError, match="who is enrolled at node 'a' already"):
        Enrolment.load(file)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Missing argument"),
        (["u.npz"], "1 DATA, 0 --certificates and 0 --node are given; give one --cert"),
        (["u.npz", "--node", "a", "--node", "b"], "or one --node, for each DATA"),
        (["u.npz", "--node", "a/b"], "the name of a node is 'a/b'"),
        (["none.npz", "--node", "a"], "users 'none.npz' do not exist"),
        (["u.npz", "--certificates", "none"], "none/node.pem cannot be read"),
        (["u.npz", "u.npz", "--node", "a", "--node", "b"], "as one of 2 users of both"),
        (["u.npz", "--node", "a", "--id-key", "none"], "none cannot be read"),
    ],
    ids=" ".join,
)
def test_an_enrolment_that_cannot_be_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    write_users(tmp_path / "u.npz", "ann", "bob")
    assert sentence in refused("enrol", *arguments, cwd=tmp_path)


SPENT = {
    "run": "digits",
    "round": 3,
    "rounds": 10,
    "epsilon": 1.2341,
    "delta": 1e-5,
    "randomness": "operating system",
}
WEIGHTS = {"w": torch.arange(3, dtype=torch.bfloat16)}  # of which NumPy knows nothing


def released(**changes: object) -> bytes:
    return save(WEIGHTS, {"release": json.dumps(SPENT | changes)})


OLDER = save({"w": torch.zeros(1)})


def test_the_released_model_is_fetched_with_its_round_and_epsilon(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(OLDER)
    with serving(Standing(wire.STATUS.encode(STATUS), model=released())) as server:
        said = printed("model", *plain(server), "--out", file)
    assert said == f"{file}: run digits, round 3 of 10, ε = 1.235 at δ = 1e-05\n"
    assert load_file(file)["w"].tolist() == [0.0, 1.0, 2.0]
    assert list(tmp_path.iterdir()) == [file]


def test_a_model_of_a_seeded_run_is_said_to_have_no_guarantee(tmp_path: Path) -> None:
    seeded = released(randomness="seeded: reproducible, not a guarantee")
    with serving(Standing(wire.STATUS.encode(STATUS), model=seeded)) as server:
        said = printed("model", *plain(server), "--out", tmp_path / "m")
    assert said.endswith("at δ = 1e-05, seeded: reproducible, not a guarantee\n")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (b"nonsense", "is not a model with its round and ε"),
        (save(WEIGHTS), "is not a model with its round and ε"),
        (released(round="third"), "is not a model with its round and ε"),
        (released()[:-1], "is not a model with its round and ε"),
        (released(run="x" * 1025), "is not a model with its round and ε"),
        (released(round=float("inf")), "is not a model with its round and ε"),
        (released(rounds=-1), "is not a model with its round and ε"),
        (released(randomness="dice"), "is not a model with its round and ε"),
        (released(epsilon=10**400), "is not a model with its round and ε"),
        (released(epsilon="nan"), "is not a model with its round and ε"),
        (released(epsilon=-1.0), "is not a model with its round and ε"),
        (released(delta="nan"), "is not a model with its round and ε"),
        (released(delta=1.0), "is not a model with its round and ε"),
        (save(WEIGHTS, {"release": "[" * 200_000}), "is not a model with its round and ε"),
    ],
)
def test_what_is_no_released_model_replaces_no_file(
    model: bytes, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(OLDER)
    with serving(Standing(wire.STATUS.encode(STATUS), model=model)) as server:
        assert sentence in refused("model", *plain(server), "--out", file)
    assert file.read_bytes() == OLDER


def test_before_the_first_release_there_may_be_a_model_later(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with serving(Standing(wire.STATUS.encode(STATUS), model=b"")) as server:
        done = fedpriv("model", *plain(server), "--out", file)
    assert done.returncode == 1
    assert done.stderr.endswith("answers: no round was released yet\n")
    assert not file.exists()


def test_a_model_replaces_models_alone(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(b"not a model")
    with serving(Standing(wire.STATUS.encode(STATUS), model=released())) as server:
        sentence = refused("model", *plain(server), "--out", file)
        assert f"{file} exists already and is no model; it is not overwritten" in sentence
        assert file.read_bytes() == b"not a model"
        file.write_bytes(save(WEIGHTS))
        printed("model", *plain(server), "--out", file)
    assert file.read_bytes() == released()


def test_a_model_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with serving(Standing(wire.STATUS.encode(STATUS), model=released())) as server:
        file = tmp_path / "none" / "model.safetensors"
        assert f"{file} cannot be used" in refused("model", *plain(server), "--out", file)
        assert "--out" in refused("model", *plain(server))
