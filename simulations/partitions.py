"""What each partitioner of `fedpriv.data.partition` deals: figures for docs/data.md.

    python -m simulations.partitions

Draws, for each way of dealing the 1,437 training images of DIGITS to 20 users, how many of each
digit each user has, as docs/images/partition-*.svg.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedpriv.data import load_population
from fedpriv.report.charts import Axis, Chart, Series, save

USERS = 20
DIGITS = range(10)
WAYS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "iid": ("iid: every user has some of all", {}),
    "dirichlet-10": ("dirichlet, α = 10: mixtures differ", {"alpha": 10.0}),
    "dirichlet-1": ("dirichlet, α = 1: a digit or two prevail", {"alpha": 1.0}),
    "shards": ("shards, 2 per user: about two digits", {"shards_per_user": 2}),
}


def dealt(way: str) -> np.ndarray:
    """Number of images of each digit at each user, int64 [users, digits]."""
    options = {"users": USERS, "partition": way.partition("-")[0], **WAYS[way][1]}
    store = load_population("digits", options).users
    rows = (store.examples_of(user)["y"] for user in range(USERS))
    return np.array([np.bincount(y.astype(int), minlength=len(DIGITS)) for y in rows])


def chart(way: str) -> Chart:
    """A marker for each digit that a user has, its area in proportion to how many."""
    counts = dealt(way)
    user, digit = np.nonzero(counts)
    series = Series(
        "images of a digit that a user has, by area",
        user.tolist(),
        digit.tolist(),
        joined=False,
        sizes=counts[user, digit].tolist(),
    )
    least, most = counts.sum(axis=1).min(), counts.sum(axis=1).max()
    return Chart(
        f"partition-{way}",
        WAYS[way][0],
        f"DIGITS: {counts.sum():,} images, {USERS} users of {least} to {most}, seed 0; "
        f"the largest marker is {counts.max()} images.",
        Axis("user", "number", ends=(-0.7, USERS - 0.3)),
        Axis("digit", "label", ends=(-0.7, 9.7), ticks=tuple((float(d), str(d)) for d in DIGITS)),
        [series],
    )


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description="figures of what partitioners deal")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for way in WAYS:
        (path,) = save(chart(way), arguments.folder, ("svg",))
        print(path)


if __name__ == "__main__":
    main()
