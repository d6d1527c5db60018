"""Models of tests are small; their layers learn without weights all the same, as large ones do."""

import pytest

from fedpriv.engine import side_by_side


@pytest.fixture(autouse=True)
def _small_layers_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_LARGE", 0)
