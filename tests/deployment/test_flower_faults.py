"""A SuperLink, its ServerApp and its ClientApps that fail: all releases are charged."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, beside
from fedpriv.run.folder import RunFolder
from fedpriv.training.rounds import checkpoints
from tests.deployment.digits import assert_same_model, in_process, on_nodes
from tests.deployment.faulty import NODES, FaultySite, faulty_site
from tests.deployment.superlink import SERVERAPP, SUPERLINK

ALL_NODES = f"federation.least_nodes={len(NODES)}"
# A round with a node that hangs takes so long; another must answer in it on a loaded machine.
DEADLINE = "federation.deadline_seconds=50.0"
SECRET = "a user's secret"  # in the text of what `harmful` raises


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultySite]:
    with faulty_site(tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.mark.slow
def test_a_serverapp_that_is_killed_is_submitted_again_and_pays_again(
    site: FaultySite, tmp_path: Path
) -> None:
    private = ("privacy.noise_multiplier=4.0", "privacy.unsafe_no_privacy=false")
    text = on_nodes(
        site.link.folder, "rounds=2", "output.checkpoint_every=100", ALL_NODES, *private
    )
    folder = RunFolder(tmp_path)
    waiting = site.arm("node-1", "waits", 2)
    site.run(text, tmp_path, resume=True)
    waiting.await_done()
    site.kill(SERVERAPP)
    waiting.end()
    assert attempts_in(folder) == [(1, 0)]
    assert checkpoints(folder.checkpoints) == []

    again = site.run(text, tmp_path, resume=True)
    site.link.await_completed(again)
    # The killed attempt at round 2 was drawn, so it is charged, and released nothing; the next has
    # a number and a cohort of its own.
    assert attempts_in(folder, unreleased=[(2, 0)]) == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert [row["round"] for row in folder.read_metrics()] == [1, 1, 2]


@pytest.mark.slow
def test_a_superlink_that_is_killed_costs_a_run_nothing(site: FaultySite, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "there")
    in_process(tmp_path / "here", "rounds=2")
    waiting = site.arm("node-1", "waits", 1)
    run = site.run(on_nodes(site.link.folder, "rounds=2", ALL_NODES), folder.path)
    waiting.await_done()
    site.kill(SUPERLINK)
    waiting.end()
    site.start_superlink()
    site.link.await_completed(run)
    assert attempts_in(folder) == [(1, 0), (2, 0)]
    assert_same_model(tmp_path / "here", folder.path)


@pytest.mark.slow
def test_clientapps_that_fail_count_as_zero_and_say_nothing(
    site: FaultySite, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "there")
    speaking = f"data.options={{ users = {sum(NODES.values())}, speaking = {NODES['node-1']} }}"
    silenced = "data.name=tests.deployment.silenced:population"
    in_process(tmp_path / "here", "rounds=2", silenced, speaking)
    harms = {"node-2": ("raises", "exits"), "node-3": ("sends too much", "waits")}
    armed = {
        (node, number): site.arm(node, harm, number)
        for node, some in harms.items()
        for number, harm in enumerate(some, start=1)
    }
    run = site.run(on_nodes(site.link.folder, "rounds=2", ALL_NODES, DEADLINE), folder.path)
    site.link.await_completed(run)
    for harm in armed.values():
        harm.await_done()
    armed["node-3", 2].end()

    assert attempts_in(folder) == [(1, 0), (2, 0)]
    assert_same_model(tmp_path / "here", folder.path)
    said = site.link.flwr("log", run, "test", "--show")
    assert "node-2 counts as zero: error 2 of Flower" in said
    assert SECRET in site.link.log_of("node-2")
    for log in (said, *(site.link.log_of(name) for name in ("superlink", "superexec"))):
        assert SECRET not in log


def attempts_in(
    folder: RunFolder, unreleased: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """Round and attempt of each charge; others are released, and every cohort is another."""
    with (
        Ledger.open(folder.ledger) as ledger,
        ParticipationRecord.open(beside(folder.ledger)) as participation,
    ):
        ledger.verify(participation)
        charges = list(ledger.charges())
        cohorts = [participation.users_of(charge.cohort_commitment) for charge in charges]
    for one, other in combinations(cohorts, 2):
        assert not np.array_equal(one, other)
    paid = {charge.hash: (charge.round, charge.attempt) for charge in charges}
    released = [(row["charge"], (row["round"], row["attempt"])) for row in folder.read_metrics()]
    assert released == [item for item in paid.items() if item[1] not in unreleased]
    return list(paid.values())
