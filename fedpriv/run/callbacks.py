"""Telling of each released round: callbacks, and TensorBoard's event files."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fedpriv.errors import InvalidValueError
from fedpriv.training.rounds import OnRound, RoundResult

_log = logging.getLogger(__name__)


def tell(callbacks: Mapping[str, OnRound], result: RoundResult) -> None:
    """Call each callback; one that raises is logged, and called again after the next round.

    A service that is down must not cost a run what it has spent.
    """
    for name, callback in callbacks.items():
        try:
            callback(result)
        except Exception as error:
            _log.warning(
                "callback %s raised %s in round %d: %s",
                name,
                type(error).__name__,
                result.round,
                error,
            )


@contextmanager
def event_files(folder: Path, first: int) -> Iterator[OnRound]:
    """A callback that writes TensorBoard's event files; complete when the block is left."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

    # Events of rounds that a run repeats after a crash are hidden by those that are written now.
    with SummaryWriter(str(folder), purge_step=first + 1) as writer:

        def write(result: RoundResult) -> None:
            for name, value in result.scalars.items():
                writer.add_scalar(name, value, result.number)

        yield write


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
