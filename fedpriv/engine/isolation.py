"""Whether users keep apart, to the last bit, in the shapes in which they train together.

A lane computes with its own numbers alone. But which instructions do it may depend on its place:
loops end with other instructions for what is left over, and libraries cut products into tiles.
Shapes are chosen so that nothing is left over where users are, and products of known layers are cut
into pieces of one size; and no shape is trusted for that. Before the first users train in one,
random users do, in other places and beside other neighbours, and each must get what it got before.

A rung has one shape with as many lanes as pay, which says what a user gets. Where there are fewer
users, the other lanes are blank; or there are fewer lanes, if the users are separable and these
lanes give the same. Where places or neighbours make a difference, users of the rung train one at a
time.
"""

import hashlib
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.batches import Integers, Rung, by_rung
from fedpriv.engine.task import RoundParameters
from fedpriv.engine.trainer import Chunk, Trainer
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import rows_of
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import LocalTraining, RoundRequest

_log = logging.getLogger(__name__)

# Random users that are compared in smaller shapes, in turns; of fewer, differences stay unseen.
_COMPARED = 64
_TURNS = 16
_LEARNING_RATE = 0.05  # at which random users stay finite, whatever the plan's


@dataclass(frozen=True)
class _Verdict:
    """How users of a rung train."""

    most: int  # lanes
    digests: tuple[bytes, ...] = ()  # of what random users get in them; none: one user at a time
    # For smaller numbers of lanes, whether they give the same.
    counts: dict[int, bool] = field(default_factory=dict)


class Isolation:
    """Cuts cohorts into chunks in whose shapes users keep apart.

    Guarantees:

    * the shapes in which a user may train follow from its rung, the request and the trainer;
    * in each of them, random users got the same bits whatever their places and neighbours were.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._verdicts: dict[Hashable, _Verdict] = {}
        # Of all random users, or they could not be compared.
        self._start: RoundParameters | None = None

    def chunks(
        self, request: RoundRequest, start: RoundParameters, rung: Rung, users: Integers, parts: int
    ) -> Iterator[Chunk]:
        """Cut users of a rung, positions in the store, into a multiple of `parts` if possible.

        Random users start from the first `start` that is ever given. A `ModelError` says that the
        model cannot be trained in this shape, or that what a user gets depends on more than its
        rows and the generators of torch.
        """
        self._start = self._start or start
        measured = tuple((metric.name, metric.shape) for metric in request.metrics)
        key = (request.local, measured, rung)
        if key not in self._verdicts:
            self._verdicts[key] = self._examined(request, rung)
        verdict = self._verdicts[key]
        if not verdict.digests:
            for user in np.split(users, len(users)):
                yield Chunk(rung, 1, together=False, users=user)
            return
        for some in self._shared_out(users, parts, len(verdict.digests), rung):
            lanes = self._lanes(verdict, request, rung, len(some))
            yield Chunk(rung, lanes, together=True, users=some)

    def _shared_out(self, users: Integers, parts: int, most: int, rung: Rung) -> list[Integers]:
        """Users in a multiple of so many parts, about equal, none of more than the most."""
        parts = min(len(users), parts * -(-len(users) // (parts * most)))
        full = self._trainer.footprint.filled(rung)
        if most % full or len(users) < parts * full:
            return np.array_split(users, parts)
        share = len(users) / parts / full
        return np.split(users, np.rint(np.arange(1, parts) * share).astype(np.int64) * full)

    def _lanes(self, verdict: _Verdict, request: RoundRequest, rung: Rung, users: int) -> int:
        """The least number of lanes for so many users that gives what all lanes give."""
        if self._trainer.layers is None:  # other models' products may depend on how many there are
            return verdict.most
        while (lanes := self._trainer.footprint.lanes_for(users, rung)) < verdict.most:
            if lanes not in verdict.counts:
                few = self._random_users(request, rung, min(_COMPARED, len(verdict.digests)))
                verdict.counts[lanes] = _agree(few.in_turns(lanes), verdict.digests)
            if verdict.counts[lanes]:
                return lanes
            users += 1
        return verdict.most

    def _examined(self, request: RoundRequest, rung: Rung) -> _Verdict:
        trainer = self._trainer
        lanes = trainer.most_lanes(request, rung)
        if not trainer.draws and (lanes > 1 or trainer.layers is not None):
            users = trainer.footprint.most_users(lanes, rung)
            try:
                if digests := self._random_users(request, rung, users).together(lanes):
                    return _Verdict(lanes, digests)
            except Exception as error:  # whatever the model does with several users
                _log.info("users cannot train side by side: %s", type(error).__name__)
            _log.warning(
                "users of up to %d examples in each of %d steps train one at a time: side by side, "
                "what one gets would depend on others",
                rung.width,
                rung.steps,
            )
        self._check_alone(self._random_users(request, rung, 1))
        return _Verdict(1)

    def _check_alone(self, users: "_RandomUsers") -> None:
        """Refuse a model that cannot be trained, or gives one user something else the next time."""
        try:
            found = [users.alone() for _ in range(2)]
        except Exception:  # random numbers need not be legal, but rows of zeros are
            zeros = {name: np.zeros_like(column) for name, column in users.store.fields.items()}
            users = replace(users, store=UserStore(zeros, users.store.offsets))
            try:
                found = [users.alone() for _ in range(2)]
            except (MemoryError, torch.OutOfMemoryError):
                return  # users of this size will count as zero
            except Exception as error:
                raise ModelError(
                    f"the model cannot be trained with {self._trainer.activations} activations: "
                    f"{error}"
                ) from error
        if found[0] != found[1]:
            raise ModelError(
                "training the same user twice gives two results; what a user gets must depend on "
                "its rows and on torch's generators alone, which are seeded for each user"
            )

    def _random_users(self, request: RoundRequest, rung: Rung, users: int) -> "_RandomUsers":
        """So many random users, the same first ones however many."""
        assert self._start is not None
        local = replace(request.local, learning_rate=_LEARNING_RATE)
        request = replace(request, local=local, local_key=bytes(32))
        store = _random_store(self._trainer, _sizes_on(rung, local, users))
        return _RandomUsers(self._trainer, request, self._start, rung, users, store)


@dataclass(frozen=True)
class _RandomUsers:
    """Users of one rung; user u is random, and user u + `users` broken, for u < `users`."""

    trainer: Trainer
    request: RoundRequest
    start: RoundParameters
    rung: Rung
    users: int
    store: UserStore

    def digests(self, order: Integers, lanes: int, *, together: bool = True) -> dict[int, bytes]:
        """SHA-256 of all bits that users who are not broken get if all train in this order."""
        chunk, found = Chunk(self.rung, lanes, together, order), []
        updates = self.trainer.sent(self.request, self.start, chunk, self.store)
        shapes = tuple(tuple(update.shape[1:]) for update in updates.values())
        for _, rows in rows_of(updates, Layout(tuple(updates), shapes), len(order)):
            for row in rows.cpu().numpy():
                row[np.isnan(row)] = np.nan  # one of the many
                found.append(hashlib.sha256(row).digest())
        by_user = zip(order.tolist(), found, strict=True)
        return {user: digest for user, digest in by_user if user < self.users}

    def together(self, lanes: int) -> tuple[bytes, ...]:
        """What all get side by side; nothing if place or neighbours make a difference."""
        users = self.users
        digests = self.digests(np.arange(users), lanes)
        expected = tuple(digests[user] for user in range(users))
        for number, places in ((0, 1), (1, users // 3 + 1), (2, 2 * (users // 3 + 1))):
            turned = np.roll(np.arange(users), places)
            broken = np.where(np.arange(users) % 3 == number, turned + users, turned)
            try:
                found = self.digests(broken, lanes)
            except Exception:  # a model may raise for what is not finite; then none is beside
                found = self.digests(turned, lanes)
            if not _agree(found, expected):
                return ()
        return expected

    def in_turns(self, lanes: int) -> dict[int, bytes]:
        """What some get, as many as tell, in fewer lanes at a time and one place further on."""
        most, found = self.trainer.footprint.most_users(lanes, self.rung), dict[int, bytes]()
        for first in range(0, min(self.users, _TURNS * most), most):
            turn = np.roll(np.arange(first, first + most) % self.users, 1)
            found |= self.digests(turn, lanes)
        return found

    def alone(self) -> dict[int, bytes]:
        """What the first one gets by itself."""
        return self.digests(np.zeros(1, np.int64), 1, together=False)


def _agree(found: Mapping[int, bytes], expected: Sequence[bytes]) -> bool:
    return all(expected[user] == digest for user, digest in found.items())


def _sizes_on(rung: Rung, local: LocalTraining, users: int) -> Integers:
    """Numbers of examples that lead to a rung: the largest, and some that leave padding."""
    passes = rung.blocks or rung.steps // (local.epochs or rung.steps)
    largest = rung.width * passes
    legal = [
        size
        for size in range(largest, max(largest - 3, 0), -1)
        for found, _ in by_rung(np.array([size]), local, measured=rung.blocks > 0)
        if found == rung
    ]
    return np.resize(np.array(legal), users)


def _random_store(trainer: Trainer, sizes: Integers) -> UserStore:
    """Random users of these sizes, and as many whose numbers are zero or not finite."""
    rows = int(sizes.sum())
    fields: dict[str, npt.NDArray[np.generic]] = {}
    for seed, name in enumerate((trainer.task.inputs, trainer.task.targets)):
        rng = np.random.default_rng(seed)
        column = trainer.users.fields[name]
        values = np.zeros((2 * rows, *column.shape[1:]), column.dtype)
        if np.issubdtype(column.dtype, np.floating):
            values[:rows] = rng.random(values[:rows].shape, np.float32)
            for number, broken in enumerate((np.nan, np.inf, -np.inf, 1e30)):
                values[rows + number :: 4] = broken
        else:
            values[:rows] = rng.integers(0, 2, values[:rows].shape)
        fields[name] = values
    return UserStore(fields, np.cumsum([0, *sizes, *sizes]))
