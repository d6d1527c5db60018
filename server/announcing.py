"""Telling of each round: callbacks of the configuration, and TensorBoard's event files."""

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedpriv.callbacks import OnRound, ReleasedRound
from fedpriv.experiment import Experiment
from fedpriv.federated.plan import TrainingPlan

from .folder import RunFolder
from .run import Outcome, RoundRow

_log = logging.getLogger(__name__)
Rounds = Generator[RoundRow, None, Outcome]


@contextmanager
def announced(
    rounds: Rounds, experiment: Experiment, folder: RunFolder, first: int
) -> Iterator[Rounds]:
    """The same rounds, each of which is told of before it is passed on.

    A callback that raises is logged and called again after the next round: a service that is down
    must not cost a run what it has spent.

    Args:
        rounds: from `conduct`.
        experiment: what is run.
        folder: of the run, where event files are written.
        first: the round that comes first.
    """
    if not experiment.config.output.tensorboard:
        yield _announcing(rounds, experiment.plan, experiment.on_round)
        return
    with _event_files(folder.tensorboard, first) as write:
        both = {"tensorboard": write, **experiment.on_round}
        yield _announcing(rounds, experiment.plan, both)


def _announcing(rounds: Rounds, plan: TrainingPlan, callbacks: Mapping[str, OnRound]) -> Rounds:
    while True:
        try:
            row = next(rounds)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        released = released_round(row, plan)
        for name, callback in callbacks.items():
            try:
                callback(released)
            except Exception as error:
                _log.warning(
                    "callback %s raised %s in round %d: %s",
                    name,
                    type(error).__name__,
                    row.round,
                    error,
                )
        yield row


def released_round(row: RoundRow, plan: TrainingPlan) -> ReleasedRound:
    """What of a round may be told: all of its row but how long it took."""
    names = [group.name for group in plan.groups]
    return ReleasedRound(
        run=plan.run,
        rounds=plan.rounds,
        round=row.round,
        attempt=row.attempt,
        epsilon=row.epsilon,
        delta=row.delta,
        test_loss=row.test_loss,
        test_accuracy=row.test_accuracy,
        clipping_norms=dict(zip(names, row.clipping_norms, strict=True)),
        unclipped=dict(zip(names, row.unclipped, strict=False)),
        metrics=row.metrics,
        metrics_noise_stddev=row.metrics_noise_stddev,
    )


@contextmanager
def _event_files(folder: Path, first: int) -> Iterator[OnRound]:
    """A callback that writes TensorBoard's event files; complete when the block is left."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

    # Events of rounds that a run repeats after a crash are hidden by those that are written now.
    with SummaryWriter(str(folder), purge_step=first + 1) as writer:

        def write(released: ReleasedRound) -> None:
            for name, value in released.scalars.items():
                writer.add_scalar(name, value, released.round + 1)

        yield write
