"""A server whose nodes do not agree to its rounds asks again, stops, and goes on when they do."""

from pathlib import Path

import pytest

from fedpriv.ledger.ledger import Ledger
from tests.deployment.sites import Site, ended


@pytest.mark.slow
def test_nothing_is_charged_until_nodes_agree(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    consent = tmp_path / "consent.toml"
    consent.write_text('purposes = ["research *"]\n')
    strict = ("--consent", str(consent))
    with site.node("node-1", *strict) as node, site.node("node-2", *strict):
        with site.server("--exit", "--set=federation.patience_seconds=8.0") as server:
            said = ended(server, 75)
        for name in ("node-1", "node-2"):
            why = f"{name}: does not agree: the purpose is ''; this node consents to"
            assert said.count(why) == 1
        why = "the log says why nodes do not agree; --resume goes on with the run"
        assert why in said.splitlines()
        with Ledger.open(site.run.ledger) as ledger:
            assert ledger.head.count == 0
        with site.server("--exit", "--set=federation.purpose=research on digits") as server:
            assert "6 of 6, 6 charged" in ended(server)
        assert "answered after" in node.text
