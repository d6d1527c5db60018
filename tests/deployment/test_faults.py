"""Servers that are asked to stop at any moment, and what is refused in one sentence."""

from pathlib import Path

import pytest

from tests.deployment.checking import check
from tests.deployment.sites import (
    Site,
    ask_to_stop,
    children_of,
    ended,
    free_port,
    is_gone,
    refused,
    until,
)

# Where the server is asked to stop, and whether the round is released all the same.
ENDS = {
    "drawn": False,
    "summed": True,
    "half charged": True,
    "half saved": True,
}


@pytest.mark.slow
def test_a_server_that_is_asked_to_stop_while_nodes_train_and_after_the_charge(
    tmp_path: Path,
) -> None:
    site = Site.lay_out(tmp_path, 287)
    server_traps, node_traps = site.traps("server"), site.traps("node-1")
    node_traps.arm("training")
    with site.node("node-1") as node:
        with site.server() as server:
            node_traps.await_caught("training", node)
            ask_to_stop(server)
            ended(server)
        assert check(site).charged == 1  # its cohort was drawn
        server_traps.arm("charged")
        with site.server() as server:
            # What the node is at now was asked of another cohort; it must not count.
            node_traps.free("training")
            server_traps.await_caught("charged", server)
            ask_to_stop(server)
            server_traps.free("charged")
            ended(server)
        found = check(site)
        assert (found.next_round, found.released, found.charged) == (1, 1, 2)
        children = children_of(node)
        assert children
        ask_to_stop(node)
        ended(node)
        until(lambda: all(map(is_gone, children)))


@pytest.mark.slow
def test_a_server_that_is_asked_to_stop_between_two_steps(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    traps = site.traps("server")
    rounds = charged = 0
    with site.node("node-1"):
        for place, released in ENDS.items():
            traps.arm(place)
            with site.server("--set=rounds=20") as server:
                traps.await_caught(place, server)
                ask_to_stop(server)
                traps.free(place)
                assert "the run ended: it was asked to stop" in ended(server)
            rounds, charged = rounds + released, charged + 1  # whatever is drawn is charged
            found = check(site)
            standing = found.next_round, found.released, found.charged
            assert standing == (rounds, rounds, charged), place


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    users = f"--users={tmp_path / 'users' / 'node-2'}"
    with site.server() as server, site.node("node-1", users) as stranger:
        server.await_text("listening on")
        with Site(tmp_path, free_port()).server() as same_folder:
            assert "holds a run that another process uses" in refused(same_folder)
        with site.server(f"--out={tmp_path / 'other'}") as same_port:
            assert "the server cannot listen: Address already in use" in refused(same_port)
        assert not (tmp_path / "other").exists()
        stranger.await_text("holds other users than are enrolled")  # and it tries again
        ask_to_stop(server)
        ended(server)
    with site.server("--set=clipping.norm=0.6") as other_plan:
        assert "a run can only be resumed with the plan it began with" in refused(other_plan)
    assert check(site).charged == 0
