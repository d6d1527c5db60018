"""A node whose certificate is struck off the enrolment while a run is under way."""

import tomllib
from pathlib import Path

import pytest
import tomli_w

from tests.deployment.checking import stop_and_check
from tests.deployment.sites import LONG, Site, await_answers, refused


@pytest.mark.slow
def test_a_node_struck_off_is_out_from_the_next_offer_on_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    with (
        site.server(*LONG) as server,
        site.node("node-1") as staying,
        site.node("node-2") as leaving,
    ):
        await_answers(leaving)
        traps = site.traps("server")
        traps.arm("opened")
        traps.await_caught("opened", server)
        strike_off(tmp_path / "enrolment.toml", "node-2")
        traps.free("opened")
        said = refused(leaving)
        assert "refuses node 'node-2'" in said
        assert "struck off" in said
        await_answers(staying)
        site.await_releases(2, server)
        stop_and_check(site, server)


def strike_off(enrolment: Path, node: str) -> None:
    """Delete a node's certificate, and keep its users."""
    table = tomllib.loads(enrolment.read_text(encoding="utf-8"))
    del table["nodes"][node]["certificate"]
    edited = enrolment.with_suffix(".new")
    edited.write_text(tomli_w.dumps(table), encoding="utf-8")
    edited.replace(enrolment)
