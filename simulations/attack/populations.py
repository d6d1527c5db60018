"""Pairs of populations that differ in one user; each pair attacks the engine in its own way.

A pair consists of a plan's own users and fields. The user that differs is the last one, so all
others have the same positions in both worlds, and N, a public constant, is the same. By the
relation "replace one", the last user of the other world is an ordinary one; otherwise it is absent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpriv.data.columns import Array
from fedpriv.data.population import UserStore, offsets_of
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import FedprivError
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest, Transport

Rows = Mapping[str, Array]  # of one user, by field
Places = npt.NDArray[np.int64]  # of one user among all that may be drawn
_MANY = 100  # factor on the number of rows of a far larger user
_FULL = 8  # rows that each user has
_SECONDS = 1.0  # of a node's time for each user
_LARGE, _TINY, _SUBNORMAL = 1e4, 1e-20, 1e-40


class UnfitError(FedprivError):
    """A population does not fit a plan, for the reason in the message."""


@dataclass(frozen=True)
class Crowd:
    """Ordinary users of a plan, from whom populations are made."""

    users: UserStore  # N ≥ 2, or records of another unit
    inputs: tuple[str, ...]  # fields that the model reads
    target: str  # field that the loss reads
    most: int | None = None  # rows of a record; None: a user may have any number
    replaced: bool = False  # whether neighbours have another user instead of one less

    @property
    def others(self) -> list[Rows]:
        """The rows of all users except the last."""
        return [self.users.examples_of(user) for user in range(self.users.population - 1)]

    @property
    def last(self) -> Rows:
        """The rows of the last user."""
        return self.users.examples_of(self.users.population - 1)

    @property
    def classes(self) -> int:
        """The number of classes of the targets; UnfitError if targets are not classes."""
        labels = self.users.fields[self.target]
        if labels.dtype.kind not in "iu":
            raise UnfitError("targets are not classes")
        return int(labels.max(initial=0)) + 1

    def changed(self, rows: Rows, change: Callable[[npt.NDArray[Any]], Array]) -> Rows:
        """Return rows with all inputs changed; UnfitError if they are not floating-point."""
        if any(rows[name].dtype.kind != "f" for name in self.inputs):
            raise UnfitError("inputs are not floating-point numbers")
        with np.errstate(over="ignore", under="ignore"):
            new = {name: change(rows[name]).astype(rows[name].dtype) for name in self.inputs}
        return {**rows, **new}

    def resized(self, rows: Rows, count: int) -> Rows:
        """Return `count` rows by repeating rows; UnfitError if a record may not have that many."""
        if self.most is not None and count > self.most:
            raise UnfitError(f"it needs {count} rows of a record, which has at most {self.most}")
        return {
            name: np.resize(column, (count, *column.shape[1:])) for name, column in rows.items()
        }


@dataclass(frozen=True)
class Pair:
    """Two populations that differ in one user."""

    without: UserStore
    with_one: UserStore  # its last user is the one that differs
    # The transport in the world with the user, who has these places; by default, all sums arrive.
    carried: Callable[[InProcessTransport, Places], Transport] = lambda transport, _: transport


@dataclass(frozen=True)
class KeptPopulation:
    """A pair of populations that belongs to the suite, because it found, or would find, a fault."""

    name: str
    attacks: str
    pair: Callable[[Crowd], Pair]


def store_of(users: Sequence[Rows]) -> UserStore:
    """Return the rows of users, at least one, as a store; ids are positions."""
    fields = {name: np.concatenate([rows[name] for rows in users]) for name in users[0]}
    sizes = [len(next(iter(rows.values()))) for rows in users]
    return UserStore(fields, offsets_of(sizes))


def pair_of(crowd: Crowd, special: Rows, others: Sequence[Rows] | None = None) -> Pair:
    """Return a pair of other users, by default the ordinary ones, with and without a special user.

    If a user is replaced, the other world has the rows of the last but one in its place: with the
    last one's own rows, both worlds of `alone` and `every-label` would be the same.
    """
    others = crowd.others if others is None else others
    without = [*others, crowd.others[-1]] if crowd.replaced else others
    return Pair(store_of(without), store_of([*others, special]))


def _alone(crowd: Crowd) -> Pair:
    nothing = {name: column[:0] for name, column in crowd.last.items()}
    return pair_of(crowd, crowd.last, [nothing] * len(crowd.others))


def _cancelling(crowd: Crowd) -> Pair:
    special = crowd.changed(crowd.last, np.negative)
    return pair_of(crowd, special, [crowd.last] * len(crowd.others))


def _every_label(crowd: Crowd) -> Pair:
    classes = crowd.classes
    if crowd.users.fields[crowd.target].ndim != 1:
        raise UnfitError("a row has several targets")
    rows = crowd.resized({name: column[:1] for name, column in crowd.last.items()}, classes)
    labels = np.arange(classes).astype(rows[crowd.target].dtype)
    return pair_of(crowd, crowd.last, [{**rows, crowd.target: labels}] * len(crowd.others))


def _scaled(factor: float) -> Callable[[Crowd], Pair]:
    return lambda crowd: pair_of(crowd, crowd.changed(crowd.last, lambda x: x * factor))


def _huge(crowd: Crowd) -> Pair:
    def most(x: npt.NDArray[Any]) -> Array:
        return np.where(x > x.mean(), 1.0, -1.0) * float(np.finfo(x.dtype).max)

    return pair_of(crowd, crowd.changed(crowd.last, most))


def _not_finite(crowd: Crowd) -> Pair:
    def broken(x: npt.NDArray[Any]) -> Array:
        return np.resize([np.nan, np.inf, -np.inf, 1.0], x.shape)

    return pair_of(crowd, crowd.changed(crowd.last, broken))


def _illegal_labels(crowd: Crowd) -> Pair:
    labels = np.full_like(crowd.last[crowd.target], crowd.classes + 89)
    return pair_of(crowd, {**crowd.last, crowd.target: labels})


def _no_rows(crowd: Crowd) -> Pair:
    return pair_of(crowd, {name: column[:0] for name, column in crowd.last.items()})


def _far_larger(crowd: Crowd) -> Pair:
    return pair_of(crowd, _many(crowd))


def _many(crowd: Crowd) -> Rows:
    return crowd.resized(crowd.last, _MANY * len(crowd.last[crowd.target]))


def _full_chunk(crowd: Crowd) -> Pair:
    resized = [crowd.resized(rows, _FULL) for rows in (*crowd.others, crowd.last)]
    return pair_of(crowd, resized[-1], resized[:-1])


def _undrawn(crowd: Crowd) -> Pair:
    enrolled = [*crowd.others, crowd.last]
    return Pair(store_of(enrolled), store_of([*enrolled, _many(crowd)]))


@dataclass(frozen=True)
class _Meddling(Transport):
    """A transport to nodes, one of which misbehaves for its only user."""

    honest: Transport
    places: Places  # of that user
    overstated: bool  # whether the node sends a sum beyond the clipping norm; else it sends none

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sums of all other users, and the node's own sum, if any."""
        own_users = np.isin(request.users, self.places)
        yield from self.honest.collect(replace(request, users=request.users[~own_users]))
        if own_users.any() and self.overstated:
            total = np.full(request.clipping.layout.dimension, 2**40, np.int64)
            yield PartialSum("its node", 1, total, request.clipping.weight_cap)

    def release_resources(self) -> None:
        """Release the resources of the honest transport."""
        self.honest.release_resources()


@dataclass(frozen=True)
class _Node(Transport):
    """A transport to a node that has a deadline."""

    honest: InProcessTransport

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sums of users, each with the same time limit."""
        yield from (partial for _, partial in self.honest.by_chunk(request, _SECONDS))

    def release_resources(self) -> None:
        """Release the resources of the transport in this process."""
        self.honest.release_resources()


def _deadline(crowd: Crowd) -> Pair:
    def carried(honest: InProcessTransport, _: Places) -> Transport:
        return _Node(replace(honest, limited=True))

    return replace(_far_larger(crowd), carried=carried)


def _meddled(*, overstated: bool) -> Callable[[Crowd], Pair]:
    def carried(honest: InProcessTransport, places: Places) -> Transport:
        return _Meddling(honest, places, overstated)

    return lambda crowd: replace(pair_of(crowd, crowd.last), carried=carried)


POPULATIONS = {
    each.name: each
    for each in (
        KeptPopulation("alone", "others have no rows, so that nothing hides the user", _alone),
        KeptPopulation("cancelling", "its rows are all others' with the sign flipped", _cancelling),
        KeptPopulation(
            "every-label", "others have one row under each label: gradients cancel", _every_label
        ),
        KeptPopulation("huge", "its inputs are near the largest number of their type", _huge),
        KeptPopulation(
            "large", "its inputs, and its update, are 10,000 times larger", _scaled(_LARGE)
        ),
        KeptPopulation("tiny", "its inputs are 1e-20 of an ordinary user's", _scaled(_TINY)),
        KeptPopulation("subnormal", "its inputs are subnormal numbers", _scaled(_SUBNORMAL)),
        KeptPopulation(
            "illegal-labels", "training raises, as its labels are no classes", _illegal_labels
        ),
        KeptPopulation(
            "not-finite", "its inputs are NaN and infinite, so its update is", _not_finite
        ),
        KeptPopulation("no-rows", "it is enrolled and has no rows", _no_rows),
        KeptPopulation("far-larger", f"it has {_MANY} times as many rows as others", _far_larger),
        KeptPopulation(
            "full-chunk", "all have as many rows: it adds a lane to a chunk", _full_chunk
        ),
        KeptPopulation(
            "undrawn", f"stored with {_MANY} times as many rows, it is never drawn", _undrawn
        ),
        KeptPopulation(
            "deadline", f"{_MANY} times as large, it is at a node that has a deadline", _deadline
        ),
        KeptPopulation("late", "its sum never arrives", _meddled(overstated=False)),
        KeptPopulation(
            "overstated",
            "its node sends far more than the clipping norm",
            _meddled(overstated=True),
        ),
    )
}
"""All populations, by name."""
