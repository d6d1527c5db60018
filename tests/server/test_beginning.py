"""What a run on nodes cannot record."""

from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.server.beginning import Beginning

FEDERATION = Path(__file__).parents[2] / "simulations" / "federation.toml"


def test_nodes_are_not_asked_for_figures_that_are_not_private(tmp_path: Path) -> None:
    assignments = ["output.simulation_only=true"]
    beginning = Beginning.of(FEDERATION, assignments, tmp_path / "run", resume=False)
    assert beginning.config.federation is not None
    with pytest.raises(InvalidValueError, match="on nodes it must be false"):
        beginning.on_nodes(beginning.config.federation)
    assert list(tmp_path.iterdir()) == []
