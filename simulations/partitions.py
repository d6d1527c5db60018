"""Figures for docs/data.md of the partitioners in `fedpriv.data.partition`.

    python -m simulations.partitions

Each figure, docs/images/partition-*.svg, shows one way to deal the 1,437 training images of DIGITS
to 20 users: how many images of each digit each user has.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert

from fedpriv.data import load_population
from fedpriv.report.charts import COLOURS

USERS = 20
DIGITS = range(10)
LARGEST = 400  # area of the largest marker, in square pixels
WAYS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "iid": ("iid: every user has some of all", {}),
    "dirichlet-10": ("dirichlet, α = 10: mixtures differ", {"alpha": 10.0}),
    "dirichlet-1": ("dirichlet, α = 1: a digit or two prevail", {"alpha": 1.0}),
    "shards": ("shards, 2 per user: about two digits", {"shards_per_user": 2}),
}


def dealt(name: str) -> np.ndarray:
    """Return the number of images of each digit at each user, int64 [users, digits]."""
    options = {"users": USERS, "partition": name.partition("-")[0], **WAYS[name][1]}
    store = load_population("digits", options).users
    rows = (store.examples_of(user)["y"] for user in range(USERS))
    return np.array([np.bincount(y.astype(int), minlength=len(DIGITS)) for y in rows])


def chart(name: str) -> dict[str, Any]:
    """Return a chart in Vega-Lite: a marker for each user's digit, its area in proportion."""
    counts = dealt(name)
    users, digits = (indices.tolist() for indices in np.nonzero(counts))
    rows = [
        {"user": user, "digit": digit, "images": int(counts[user, digit])}
        for user, digit in zip(users, digits, strict=True)
    ]
    low, high = counts.sum(axis=1).min(), counts.sum(axis=1).max()
    caption = (
        f"DIGITS: {counts.sum():,} images, {USERS} users of {low} to {high}, seed 0; the largest "
        f"marker is {counts.max()} images."
    )
    area = {"zero": True, "rangeMin": 0, "rangeMax": LARGEST}
    return {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "opacity": 1, "color": COLOURS[0]},
        "encoding": {
            "x": _axis("user", "user (number)", USERS),
            "y": _axis("digit", "digit (label)", len(DIGITS)),
            "size": {"field": "images", "type": "quantitative", "scale": area, "legend": None},
        },
        "title": {"text": WAYS[name][0], "subtitle": caption},
        "background": "white",
        "padding": 12,
        "width": 600,
        "height": 300,
    }


def _axis(field: str, title: str, count: int) -> dict[str, Any]:
    scale = {"domain": [-0.7, count - 0.3], "nice": False, "zero": False}
    ticks = {"values": [*range(count)]}
    return {
        "field": field, "type": "quantitative", "title": title, "scale": scale, "axis": ticks,
    }  # fmt: skip


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description="figures of what partitioners deal")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in WAYS:
        path = arguments.folder / f"partition-{name}.svg"
        path.write_text(vl_convert.vegalite_to_svg(chart(name)), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
