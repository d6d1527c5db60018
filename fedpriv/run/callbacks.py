"""What is told of each round to whoever wants to follow a run: released figures only."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from fedpriv.errors import InvalidValueError
from fedpriv.importing import import_function
from fedpriv.training.rounds import RoundResult

OnRound = Callable[[RoundResult], object]
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
