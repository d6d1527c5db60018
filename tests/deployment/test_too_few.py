"""A server of nodes whose users' data are broken ends by what it released, and says so again."""

from pathlib import Path

import numpy as np
import pytest

from fedpriv.data.population import UserStore
from fedpriv.ledger.ledger import Ledger
from fedpriv.training.rounds import Stop
from tests.deployment.sites import Site, ended, refused

SETTINGS = ("--exit", "--set=privacy.noise_multiplier=1.0", "--set=privacy.epsilon=1000.0")


@pytest.mark.slow
def test_a_run_in_which_nobody_counts_ends_early_with_code_4(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    users = UserStore.load(tmp_path / "users" / "node-1")
    x = np.full_like(users.fields["x"], np.nan)
    ids = [users.id_of(user) for user in range(users.population)]
    UserStore({**users.fields, "x": x}, users.offsets, ids).save(tmp_path / "nan")
    with site.node("node-1", f"--users={tmp_path / 'nan'}"):
        with site.server(*SETTINGS) as server:
            sentence = refused(server, 4)
        done = site.released
        assert sentence.startswith("error: too few users count: ")
        assert f"after {done - 1} of 6 rounds" in sentence  # whose result is written down twice
        end = site.run.read_end()
        assert end is not None
        assert (end.stop, end.epsilon) == (Stop.TOO_FEW, 1000.0)
        assert "simulation only" not in " ".join(end.warnings)
        with site.server(*SETTINGS) as server:
            assert refused(server, 4).startswith("error: too few users count: ")
        with Ledger.open(site.run.ledger) as ledger:
            assert ledger.head.count == done - 1
        with site.server(*SETTINGS, "--keep-going") as server:
            assert "6 of 6, 6 charged" in ended(server)
