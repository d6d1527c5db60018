"""Engines that are broken on purpose, each in one small way that an attack must notice.

Each is a context in which the library is broken; the ledger's statements stay the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedpriv.engine import trainer
from fedpriv.engine.examples import Chunk
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.ledger.events import RoundEvent, SamplingEvent
from fedpriv.privacy import clipping, gaussian_mechanism, noise
from fedpriv.privacy import clipping_torch as batched
from fedpriv.privacy import round as rounds
from fedpriv.privacy.clipping import Clipping, Flags, FloatMatrix, IntegerVector
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.layout import FloatVector, granularity
from fedpriv.privacy.noise import rounded_gaussian
from fedpriv.privacy.round import PartialSum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.request import RoundRequest

Broken = Callable[[], AbstractContextManager[object]]
_LARGEST = 2.0**45  # steps of a number that is not clipped


@contextmanager
def no_clipping() -> Iterator[None]:
    """Add up updates without clipping, and accept all sums."""

    def clip_vectors(
        pieces: Sequence[FloatMatrix], clipping_norm: float, _: object
    ) -> tuple[Flags, Flags]:
        finite = np.all([np.isfinite(piece).all(axis=1) for piece in pieces], axis=0)
        for piece in pieces:
            piece[~finite] = 0.0
            piece[:] = np.clip(np.trunc(piece / granularity(clipping_norm)), -_LARGEST, _LARGEST)
        return finite, finite

    believed = patch.object(Clipping, "admits", lambda *_: True)
    with patch.object(clipping, "clip_vectors", clip_vectors), believed:
        yield


@contextmanager
def less_noise(share: float, most: int | None = None) -> Iterator[None]:
    """Add only this share of the noise in the ledger, to groups of at most `most` numbers."""
    honest = noise.rounded_gaussian

    def drawn(key: bytes, count: int, stddev: float) -> IntegerVector:
        is_small = most is None or count <= most
        return honest(key, count, stddev * (share if is_small else 1.0))

    with patch.object(gaussian_mechanism, "rounded_gaussian", drawn):
        yield


@contextmanager
def sums_of_many_louder() -> Iterator[None]:
    """Multiply a cohort's sum by the number of its users."""
    honest = rounds.add_up

    def added(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> PartialSum:
        partial = honest(partials, clipping, users)
        return replace(partial, total=partial.total * max(1, partial.users))

    with patch.object(rounds, "add_up", added):
        yield


@contextmanager
def realised_denominator() -> Iterator[None]:
    """Divide by the number of users who took part, not by the constant expected number."""
    honest = rounds.release

    def released(mechanism: Any, at: Any, cohort: PartialSum, *arguments: Any) -> Any:
        average = honest(mechanism, at, cohort, *arguments)
        return average * mechanism.sampling.expected_cohort_size / max(1, cohort.users)

    with patch.object(rounds, "release", released):
        yield


@contextmanager
def clipped_together() -> Iterator[None]:
    """Scale a chunk's updates down by their maximum: one user changes the updates of others."""
    honest = batched.add_contributions

    def add(
        total: FloatVector, updates: Updates, clipping: Clipping, weights: IntegerVector
    ) -> None:
        tensors = {name: update[:] for name, update in updates.items()}
        maximum = max(float(tensor.abs().max()) for tensor in tensors.values())
        honest(total, {n: t / max(1.0, maximum) for n, t in tensors.items()}, clipping, weights)

    with patch.object(trainer, "add_contributions", add):
        yield


@contextmanager
def one_failure_spoils_all() -> Iterator[None]:
    """Count a chunk as zero if one of its updates is not finite."""
    honest = batched.add_contributions

    def add(
        total: FloatVector, updates: Updates, clipping: Clipping, weights: IntegerVector
    ) -> None:
        if all(bool(torch.isfinite(update[:]).all()) for update in updates.values()):
            honest(total, updates, clipping, weights)

    with patch.object(trainer, "add_contributions", add):
        yield


@contextmanager
def failures_raise() -> Iterator[None]:
    """End the run if the training of a user raises."""

    def dropped(
        _: Trainer, _found: object, _chunk: Chunk, reason: str, error: Exception | None = None
    ) -> None:
        raise error or ValueError(reason)

    with patch.object(Trainer, "_drop", dropped):
        yield


@contextmanager
def shapes_of_all_enrolled() -> Iterator[None]:
    """Average losses over the row count of the largest enrolled user, drawn or not."""
    honest = InProcessTransport.collect

    def collected(transport: InProcessTransport, request: RoundRequest) -> Iterator[PartialSum]:
        rows = int(transport.users.sizes.max())
        for partial_sum in honest(transport, request):
            yield replace(partial_sum, total=partial_sum.total * 10 // max(10, rows))

    with patch.object(InProcessTransport, "collect", collected):
        yield


@contextmanager
def noise_used_twice() -> Iterator[None]:
    """Use each group's noise of a round again in the next round."""
    stored = dict[int, np.ndarray]()

    def again(key: bytes, count: int, stddev: float) -> np.ndarray:
        if count in stored:
            return stored.pop(count)
        stored[count] = rounded_gaussian(key, count, stddev)
        return stored[count]

    with patch.object(gaussian_mechanism, "rounded_gaussian", again):
        yield


@contextmanager
def bound_as_if_joint() -> Iterator[None]:
    """Add noise for the norm of one tensor, and charge as if for the whole update."""

    def of_one(
        moved: tuple[float, ...], noise_multiplier: float, _shares: object
    ) -> tuple[float, ...]:
        return tuple(noise_multiplier * sensitivity for sensitivity in moved)

    def least(event: RoundEvent) -> float:
        return min(query.noise_stddev / query.clipping_norm for query in event.queries)

    with (
        patch.object(gaussian_mechanism, "noise_stddevs", of_one),
        patch.object(RoundEvent, "noise_multiplier", property(least)),
    ):
        yield


@contextmanager
def half_of_q_charged() -> Iterator[None]:
    """Charge half of the probability with which users join."""
    honest = PoissonSampling.event

    def half(sampling: PoissonSampling) -> SamplingEvent:
        event = honest(sampling)
        return replace(event, sampling_probability=event.sampling_probability / 2.0)

    with patch.object(PoissonSampling, "event", half):
        yield


no_noise: Broken = partial(less_noise, 0.0)
halved_noise: Broken = partial(less_noise, 0.5)
exact_counts: Broken = partial(less_noise, 0.0, most=1)
