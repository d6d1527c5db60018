"""Two runs on one ledger at the same time: their nodes audit it and believe both."""

from pathlib import Path

import pytest

from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from simulations import loopback
from tests.deployment.sites import CONFIG

ROUNDS = 4
SETTINGS = (
    f"--set=rounds={ROUNDS}",
    "--set=federation.least_nodes=1",
    "--set=privacy.accountant=tight",
    # Long enough for the runs to take turns, and for shapes to be tried on a busy machine.
    "--set=federation.fixed_length=true",
    "--set=federation.deadline_seconds=10",
    "--exit",
)


@pytest.mark.slow
def test_nodes_of_two_runs_that_share_a_ledger_decline_nothing(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path, (287,))
    (tmp_path / "faults.toml").write_text(CONFIG)
    ledger, programs = tmp_path / "ledger.sqlite", []
    at = (
        f"--set=privacy.ledger={ledger}",
        f"--set=federation.enrolment={tmp_path / 'enrolment.toml'}",
        f"--set=federation.certificates={tmp_path / 'certs' / 'server'}",
        "--set=federation.address=127.0.0.1:0",
    )
    serve = ("serve", str(tmp_path / "faults.toml"), *at, *SETTINGS)
    join = (
        f"--users={tmp_path / 'users' / 'node-1'}",
        f"--certificates={tmp_path / 'certs' / 'nodes' / 'node-1'}",
        f"--state={tmp_path / 'state'}",  # one journal
        "--once",
        "--verify-ledger",
    )
    logs = [tmp_path / f"{kind}-{run}.log" for run in "ab" for kind in ("server", "node")]
    with (
        loopback.program(logs[0], *serve, "--out", str(tmp_path / "a")) as a,
        loopback.program(logs[2], *serve, "--out", str(tmp_path / "b")) as b,
    ):
        ports = [loopback.port_of(server) for server in (a, b)]
        with (
            loopback.program(logs[1], "join", f"--server=localhost:{ports[0]}", *join) as one,
            loopback.program(logs[3], "join", f"--server=localhost:{ports[1]}", *join) as two,
        ):
            programs = [a, b, one, two]
            assert [each.process.wait(180.0) for each in programs] == [0] * 4, [
                each.text for each in programs
            ]
    for each in programs:
        assert "believed" not in each.text
        assert "declined" not in each.text
    with Ledger.open(ledger) as found, ParticipationRecord.open(record_path(ledger)) as record:
        found.verify(record)
        runs = [row.run for row in found.charges()]
    assert len(runs) == 2 * ROUNDS
    assert len(set(runs)) == 2
    # They took turns.
    assert runs not in (sorted(runs), sorted(runs, reverse=True))
