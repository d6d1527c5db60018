"""What only a simulation may know of a round: figures that are not private.

They never enter a partial sum: whoever simulates asks the in-process transport for them, and gets
them in a type and under names that say what they are.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fedpriv.engine.clipping import group_norms, sent
from fedpriv.engine.updates import Updates
from fedpriv.federated.transport import RoundRequest
from fedpriv.privacy.contribution import Clipping

_ROUNDING = 1.0 + 2.0**-20  # of float32: a metric at its bound is not clipped


@dataclass(frozen=True)
class SimulationOnlyDiagnostics:
    """True figures of one round. Publishing one breaks the guarantee of the users in it.

    Averages are over the users that contributed: those with examples for whom nothing raised and
    all is finite. They are NaN if there were none.

    Attributes:
        round: number of the round, from 0.
        attempt: number of the attempt, from 0.
        simulation_only_cohort_size: users that were drawn.
        simulation_only_contributors: users that contributed.
        simulation_only_clipped: for each vector group that users send, metrics included, the
            fraction of users that were clipped.
        simulation_only_train_loss: average of users' mean losses at the parameters before the
            round, in evaluation mode, without a bound.
    """

    round: int
    attempt: int
    simulation_only_cohort_size: int
    simulation_only_contributors: int
    simulation_only_clipped: Mapping[str, float]
    simulation_only_train_loss: float


@dataclass(frozen=True)
class ChunkDiagnostics:
    """Sums over the users of a chunk that contribute.

    Attributes:
        users: their number.
        clipped: how many of them were clipped, by vector group.
        loss: sum of their mean losses.
    """

    users: int
    clipped: Mapping[str, int]
    loss: float


def diagnose_chunk(tensors: Updates, clipping: Clipping, losses: torch.Tensor) -> ChunkDiagnostics:
    """Diagnostics of a chunk.

    Args:
        tensors: what its users send, before clipping.
        clipping: how contributions are made.
        losses: [C] mean loss of each user's examples.
    """
    groups = sent(clipping)
    norms = group_norms(tensors, groups)
    finite = torch.isfinite(torch.stack(list(norms.values()))).all(0)
    clipped = {
        group.name: int((norms[group.name][finite] > group.clipping_norm * _ROUNDING).sum())
        for group in groups
    }
    return ChunkDiagnostics(int(finite.sum()), clipped, float(losses[finite].sum()))


def diagnose_round(
    request: RoundRequest, chunks: Iterable[ChunkDiagnostics]
) -> SimulationOnlyDiagnostics:
    """Diagnostics of a round from those of its chunks."""
    seen = list(chunks)
    users = sum(chunk.users for chunk in seen)
    share = 1.0 / users if users else math.nan
    return SimulationOnlyDiagnostics(
        request.round,
        request.attempt,
        request.users.size,
        users,
        {
            group.name: share * sum(chunk.clipped[group.name] for chunk in seen)
            for group in sent(request.clipping)
        },
        share * math.fsum(chunk.loss for chunk in seen),
    )
