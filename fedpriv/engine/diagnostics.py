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
from fedpriv.privacy.groups import VectorGroup, layers, per_layer
from fedpriv.privacy.layout import Layout

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
        simulation_only_group_norms: for each of these groups, the average of users' norms before
            clipping, in the units of its clipping norm.
        simulation_only_update_norms: for each layer of the model, the average L2 norm of users'
            updates of its tensors before clipping, in the model's units.
    """

    round: int
    attempt: int
    simulation_only_cohort_size: int
    simulation_only_contributors: int
    simulation_only_clipped: Mapping[str, float]
    simulation_only_train_loss: float
    simulation_only_group_norms: Mapping[str, float]
    simulation_only_update_norms: Mapping[str, float]


@dataclass(frozen=True)
class ChunkDiagnostics:
    """Sums over the users of a chunk that contribute.

    Attributes:
        users: their number.
        clipped: how many of them were clipped, by vector group.
        loss: sum of their mean losses.
        group_norms: sum of their norms before clipping, by vector group.
        update_norms: sum of the norms of their updates before clipping, by layer.
    """

    users: int
    clipped: Mapping[str, int]
    loss: float
    group_norms: Mapping[str, float]
    update_norms: Mapping[str, float]


def diagnose_chunk(
    tensors: Updates, request: RoundRequest, losses: torch.Tensor, users: int
) -> ChunkDiagnostics:
    """Diagnostics of a chunk.

    Args:
        tensors: what its lanes send, before clipping.
        request: of the round.
        losses: [L] mean loss of each lane's examples.
        users: C, how many of the lanes are users; the first ones.
    """
    groups = sent(request.clipping)
    norms = {name: norm[:users] for name, norm in group_norms(tensors, groups).items()}
    losses = losses[:users]
    finite = torch.isfinite(torch.stack(list(norms.values()))).all(0)
    clipped = {
        group.name: int((norms[group.name][finite] > group.clipping_norm * _ROUNDING).sum())
        for group in groups
    }
    layers = group_norms(tensors, _layers_of(request))
    whole = {name: norm[:users] for name, norm in layers.items()}
    return ChunkDiagnostics(
        int(finite.sum()),
        clipped,
        float(losses[finite].sum()),
        {name: float(norm[finite].sum()) for name, norm in norms.items()},
        {name: float(norm[finite].sum()) for name, norm in whole.items()},
    )


def diagnose_round(
    request: RoundRequest, chunks: Iterable[ChunkDiagnostics]
) -> SimulationOnlyDiagnostics:
    """Diagnostics of a round from those of its chunks."""
    seen = list(chunks)
    users = sum(chunk.users for chunk in seen)
    groups = [group.name for group in sent(request.clipping)]
    share = 1.0 / users if users else math.nan

    def average(sums: Iterable[float]) -> float:
        return share * math.fsum(sums)

    return SimulationOnlyDiagnostics(
        round=request.round,
        attempt=request.attempt,
        simulation_only_cohort_size=request.users.size,
        simulation_only_contributors=users,
        simulation_only_clipped={g: average(chunk.clipped[g] for chunk in seen) for g in groups},
        simulation_only_train_loss=average(chunk.loss for chunk in seen),
        simulation_only_group_norms={
            g: average(chunk.group_norms[g] for chunk in seen) for g in groups
        },
        simulation_only_update_norms={
            layer.name: average(chunk.update_norms[layer.name] for chunk in seen)
            for layer in _layers_of(request)
        },
    )


def _layers_of(request: RoundRequest) -> tuple[VectorGroup, ...]:
    """The layers of the model as groups, in the model's units."""
    layout = Layout.of(request.parameters)
    parts = layers(layout)
    return per_layer(layout, parts, dict.fromkeys(parts, 1.0))
