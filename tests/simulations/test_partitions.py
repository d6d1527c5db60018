"""The figures of what partitioners deal show every row once, and the guide shows every figure."""

from pathlib import Path

import numpy as np
import pytest

from fedpriv.data import load_digits
from simulations import partitions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", partitions.WAYS)
def test_markers_are_all_images_of_each_user(way: str) -> None:
    drawn = partitions.chart(way)
    rows = drawn["data"]["values"]
    shown = np.zeros((partitions.USERS, 10))
    for row in rows:
        shown[row["user"], row["digit"]] += row["images"]
    labels = load_digits(20).users.fields["y"].astype(int)
    assert shown.sum(axis=0).tolist() == np.bincount(labels).tolist()
    assert set(shown.sum(axis=1)) == {71, 72}
    assert len(rows) == np.count_nonzero(shown)
    assert drawn["encoding"]["size"]["field"] == "images"


def test_each_way_deals_fewer_digits_to_a_user_than_the_one_before() -> None:
    held = [np.count_nonzero(partitions.dealt(way)) for way in ("iid", "dirichlet-10", "shards")]
    assert held == sorted(held, reverse=True)
    assert np.count_nonzero(partitions.dealt("shards")) <= 3 * partitions.USERS


def test_the_command_draws_what_the_guide_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["partitions", "--folder", str(tmp_path)])
    partitions.main()
    guide = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == len(partitions.WAYS)
    for name in names:
        assert f"](images/{name})" in guide
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        assert "(no unit)" not in drawn
        committed = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        title = partitions.WAYS[name.removeprefix("partition-").removesuffix(".svg")][0]
        assert title in drawn
        assert title in committed
