"""What is told of each round to whoever wants to follow a run: released figures only."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from fedpriv.errors import InvalidValueError
from fedpriv.importing import import_function


@dataclass(frozen=True)
class ReleasedRound:
    """What one round released; safe to show, and safe to send to a service.

    It holds nothing that depends on users but through the noise, not even how long the round took.

    Attributes:
        run: name of the run.
        rounds: T, how many are planned.
        round: number of the round, from 0.
        attempt: number of the attempt; a round that was run again after a crash is told again.
        epsilon: ε of all charges of the ledger so far, at `delta`.
        delta: δ of the budget.
        test_loss: mean loss on held-out rows, if the round was evaluated.
        test_accuracy: accuracy on held-out rows, if there is one.
        clipping_norms: S of each vector group of the update in this round.
        unclipped: noised fraction of users that were not clipped, by vector group; empty unless
            clipping is adaptive.
        metrics: private averages by name; a vector is a list.
        metrics_noise_stddev: standard deviation of the noise in each component of a metric.
    """

    run: str
    rounds: int
    round: int
    attempt: int
    epsilon: float
    delta: float
    test_loss: float | None
    test_accuracy: float | None
    clipping_norms: Mapping[str, float]
    unclipped: Mapping[str, float]
    metrics: Mapping[str, object]
    metrics_noise_stddev: Mapping[str, float]

    @property
    def scalars(self) -> dict[str, float]:
        """All that is one number, by name, as trackers of experiments take it."""
        tables: tuple[tuple[str, Mapping[str, object]], ...] = (
            ("test", {"loss": self.test_loss, "accuracy": self.test_accuracy}),
            ("privacy", {"epsilon": self.epsilon}),
            ("clipping_norm", self.clipping_norms),
            ("unclipped", self.unclipped),
            ("metric", self.metrics),
        )
        return {
            f"{table}/{name}": float(value)
            for table, values in tables
            for name, value in values.items()
            if isinstance(value, int | float)
        }


OnRound = Callable[[ReleasedRound], object]
"""Is called after each round; what it returns is not read."""


def find_callbacks(paths: Iterable[str]) -> dict[str, OnRound]:
    """Import callables of the form "package.module:name".

    Raises:
        InvalidValueError: one is not of that form, cannot be imported or cannot be called.
    """
    return {path: import_function(f"callback {path!r}", path, InvalidValueError) for path in paths}


def require_tensorboard() -> None:
    """Refuse where event files cannot be written.

    Raises:
        InvalidValueError: TensorBoard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise InvalidValueError(
            "output.tensorboard is true, but tensorboard cannot be imported; "
            "pip install 'fedpriv[tensorboard]' installs it"
        )
