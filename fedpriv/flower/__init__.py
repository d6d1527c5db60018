"""All code that needs Flower: privacy for Flower's own apps, and simulations on its workers.

`strategy` makes a Flower app private. It defines all names of this package, which are loaded at
their first use, because Flower reads its environment variables when it is imported. `ray` is
`fedpriv simulate --engine flower`: it starts Flower's simulation on Ray, where `grid` distributes
users among workers, each a ClientApp. `messages` defines the content of all their messages.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpriv.flower.strategy import PrivateStrategy, clipping_mod, connected

__all__ = ["PrivateStrategy", "clipping_mod", "connected"]


def __getattr__(name: str) -> object:
    if name in __all__:
        value: object = getattr(import_module("fedpriv.flower.strategy"), name)
        return value
    raise AttributeError(f"module 'fedpriv.flower' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
