"""A certificate that is revoked while a run is under way."""

from pathlib import Path

import pytest

from tests.commandline import printed
from tests.deployment.checking import stop_and_check
from tests.deployment.sites import LONG, Site, await_answers, refused


@pytest.mark.slow
def test_a_revoked_node_is_out_from_the_next_offer_on_and_the_run_goes_on(tmp_path: Path) -> None:
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
        printed("certs", "revoke", "node-2", "--folder", tmp_path / "certs")
        traps.free("opened")
        said = refused(leaving)
        assert "refuses node 'node-2'" in said
        assert "revoked" in said
        await_answers(staying)
        site.await_releases(2, server)
        stop_and_check(site, server)
