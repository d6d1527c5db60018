"""The figures of what partitioners deal show every row once, and the guide shows every figure."""

from pathlib import Path

import numpy as np
import pytest

from fedpriv.data import load_digits
from fedpriv.report.charts import figure
from simulations import partitions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", partitions.WAYS)
def test_markers_are_all_images_of_each_user(way: str) -> None:
    (series,) = partitions.chart(way).series
    shown = np.zeros((partitions.USERS, 10))
    for user, digit, size in zip(series.x, series.y, series.sizes, strict=True):
        assert digit is not None
        shown[int(user), int(digit)] += size
    labels = load_digits(20).users.fields["y"].astype(int)
    assert shown.sum(axis=0).tolist() == np.bincount(labels).tolist()
    assert set(shown.sum(axis=1)) == {71, 72}
    assert len(series.x) == np.count_nonzero(shown)
    # None is thinned out, and each has its size.
    drawn = figure(partitions.chart(way)).to_dict()
    (part,) = drawn["hconcat"]
    (rows,) = drawn["datasets"].values()
    assert [row["size"] for row in rows if row["marked"]] == list(series.sizes)
    (markers,) = (layer for layer in part["layer"] if "size" in layer["encoding"])
    assert markers["encoding"]["size"]["field"] == "size"


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
