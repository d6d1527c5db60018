"""A network that is cut, silent or slow between a node and the server."""

from pathlib import Path

import pytest

from simulations.loopback import Program
from tests.deployment.checking import stop_and_check
from tests.deployment.proxy import Proxy, proxy
from tests.deployment.sites import LONG, Site, await_answers, until

pytestmark = pytest.mark.slow
# 307,210 parameters: 1.2 MB down, and as sums in float64 2.5 MB up.
LARGE = (
    *LONG,
    "--set=model.name=mlp",
    "--set=model.options={inputs=64,hidden=4096,classes=10}",
    "--set=federation.absent_seconds=20.0",
)
DOWN, UP = 1_228_840, 2_457_680
SLOW = 2**19  # bytes per second


def cut(site: Site, node: Program, through: Proxy, way: str) -> None:
    """Reset the connection in the middle of the model's way to the node, or its answer's way."""
    place, size = ("noted", DOWN) if way == "down" else ("answering", UP)
    traps = site.traps("node-2")
    traps.arm(place)
    traps.await_caught(place, node)
    before = getattr(through, way)
    setattr(through, f"{way}_rate", SLOW)
    traps.free(place)
    until(lambda: getattr(through, way) > before + size // 4, node)
    assert getattr(through, way) < before + size // 2
    through.reset()
    setattr(through, f"{way}_rate", None)


def test_a_connection_that_is_cut_in_the_middle(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    with (
        site.server(*LARGE) as server,
        proxy(site.port) as through,
        site.node("node-1"),
        site.node("node-2", port=through.port) as node,
    ):
        await_answers(node, 1)
        for way in ("down", "up"):
            cut(site, node, through, way)
            await_answers(node)
        stop_and_check(site, server)


def test_a_network_that_is_silent_is_noticed_and_come_back_through(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    with (
        site.server(*LARGE, "--set=federation.absent_seconds=0") as server,
        proxy(site.port) as through,
        site.node("node-1") as other,
        site.node("node-2", port=through.port) as node,
    ):
        await_answers(node, 1)
        through.open.clear()
        until(lambda: "disconnected: node-2" in server.text, server, node)
        await_answers(other)
        until(lambda: "no connection" in node.text.partition("answered")[2], server, node)
        through.open.set()
        await_answers(node)
        stop_and_check(site, server)


def test_a_slow_uploader_holds_nobody_up_beyond_the_deadline(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    limits = ("--set=federation.transfer_seconds=3.0", "--set=federation.deadline_seconds=20.0")
    with (
        site.server(*LARGE, *limits) as server,
        proxy(site.port) as through,
        site.node("node-1") as other,
        site.node("node-2", port=through.port) as node,
    ):
        await_answers(node, 1)
        through.up_rate = 2.0**15
        refusal = "node-2: answer refused: it took too long"
        until(lambda: refusal in server.text, server, node)
        await_answers(other)
        site.await_releases(2, server)
        through.up_rate = None
        await_answers(node)
        stop_and_check(site, server)
