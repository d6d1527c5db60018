"""On Flower's runtime: privacy for its own apps, and simulations among workers. All that needs it.

`strategy` makes a Flower app private, and has all names of this package; they are loaded when they
are first used, since Flower reads its switches when it is imported. `ray` is
`fedpriv simulate --engine flower`: it starts Flower's simulation on Ray, where the ServerApp of
`grid` spreads users among workers, each of which is the ClientApp of `client_app`. `messages` says
what they all send.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpriv.flower.strategy import (
        Evaluate,
        NodesTransport,
        PrivateStrategy,
        TrainedModel,
        clipping_mod,
        connected,
        contribution,
    )

__all__ = [
    "Evaluate",
    "NodesTransport",
    "PrivateStrategy",
    "TrainedModel",
    "clipping_mod",
    "connected",
    "contribution",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        value: object = getattr(import_module("fedpriv.flower.strategy"), name)
        return value
    raise AttributeError(f"module 'fedpriv.flower' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
