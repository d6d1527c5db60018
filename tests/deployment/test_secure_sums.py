"""A federation of real processes whose server need not be trusted."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedpriv.ledger.events import SecureSum
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.run.folder import RunFolder
from fedpriv.server.enrolment import Enrolment
from fedpriv.wire import enrolment_digest
from simulations import federation, loopback
from simulations.loopback import Program
from tests.deployment.sites import kill, until


def settings(nodes: int, colluding: int, dropouts: int, *others: str) -> list[str]:
    section = {
        "trust": "none",
        "least_nodes": nodes,
        "colluding_nodes": colluding,
        "dropouts": dropouts,
        "deadline_seconds": 120,
        "absent_seconds": 1,
    }
    given = [f"federation.{key}={value}" for key, value in section.items()]
    return [f"--set={setting}" for setting in (*given, *others)]


def lay_out(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Nodes of so many users, and the consent of each to all of them; their names."""
    loopback.lay_out_digits(folder, tuple(sizes))
    digest = enrolment_digest(Enrolment.load(folder / "enrolment.toml").enrolled)
    text = f'trust = "none"\nenrolment = "{digest}"\nleast_colluding_nodes = 1\n'
    (folder / "consent.toml").write_text(text, encoding="utf-8")
    return [f"node-{number + 1}" for number in range(len(sizes))]


def ended(*programs: Program) -> None:
    for program in programs:
        assert program.process.wait() == 0, program.text
        assert "Traceback" not in program.text


@pytest.mark.slow
def test_a_federation_trains_and_nobody_knows_who_took_part(tmp_path: Path) -> None:
    names = lay_out(tmp_path, (1, 94, 192))
    with loopback.server(
        tmp_path, federation.FILE, "--exit", *settings(3, 1, 0, "rounds=8")
    ) as server:
        port = loopback.port_of(server)
        consent = ("--once", "--consent", str(tmp_path / "consent.toml"))
        with loopback.nodes(tmp_path, names, port, *consent) as nodes:
            ended(server, *nodes.values())
    folder = RunFolder(tmp_path / "run")
    rows = list(folder.read_metrics())
    assert len(rows) == 8
    assert float(str(rows[-1]["accuracy"])) > 0.6
    with (
        Ledger.open(folder.ledger) as ledger,
        ParticipationRecord.open(record_path(folder.ledger)) as participation,
    ):
        ledger.verify(participation)
        charges = list(ledger.charges())
        commitments = {charge.cohort_commitment for charge in charges}
        assert len(commitments) == 8
    assert {charge.event.secure_sum for charge in charges} == {SecureSum(3, 1, 0)}
    assert [row["charge"] for row in rows] == [charge.hash for charge in charges]
    statement = "everything that the server and any 1 node saw"
    assert statement in " ".join(server.text.replace("│", " ").split())  # a cell of a table
    for name in names:
        log = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
        assert statement in log
        assert log.count("answered with a masked sum") == 8  # each node in each round
        assert "the ledger holds 8 charges" in log


@pytest.mark.slow
def test_a_node_that_is_killed_is_done_without(tmp_path: Path) -> None:
    names = lay_out(tmp_path, (57, 57, 57, 57, 59))
    asked = settings(4, 1, 1, "rounds=30")
    with loopback.server(tmp_path, federation.FILE, "--exit", *asked) as server:
        port = loopback.port_of(server)
        consent = ("--once", "--consent", str(tmp_path / "consent.toml"))
        with loopback.nodes(tmp_path, names, port, *consent) as nodes:
            last = nodes[names[-1]]
            until(lambda: last.text.count("answered with a masked sum") >= 2, server, last)
            kill(last)
            ended(server, *(nodes[name] for name in names[:-1]))
    with Ledger.open(RunFolder(tmp_path / "run").ledger) as ledger:
        charges = list(ledger.charges())
    assert {charge.event.secure_sum for charge in charges} == {SecureSum(4, 1, 1)}
    assert len({charge.round for charge in charges}) == len(
        list(RunFolder(tmp_path / "run").read_metrics())
    )


@pytest.mark.slow
def test_a_node_that_has_pinned_other_nodes_does_not_agree(tmp_path: Path) -> None:
    names = lay_out(tmp_path, (95, 96, 96))
    consent = tmp_path / "consent.toml"
    digest = enrolment_digest(Enrolment.load(tmp_path / "enrolment.toml").enrolled)
    consent.write_text(f'enrolment = "{digest[::-1]}"\n', encoding="utf-8")
    asked = settings(3, 1, 0, "federation.patience_seconds=3")
    with loopback.server(tmp_path, federation.FILE, "--exit", *asked) as server:
        port = loopback.port_of(server)
        given = ("--once", "--consent", str(consent))
        with loopback.nodes(tmp_path, names, port, *given) as nodes:
            assert server.process.wait() != 0 or "too few nodes agreed" in server.text
            until(lambda: "not agreed to" in nodes[names[0]].text, nodes[names[0]])
            assert digest in nodes[names[0]].text
    with Ledger.open(RunFolder(tmp_path / "run").ledger) as ledger:
        assert list(ledger.charges()) == []
