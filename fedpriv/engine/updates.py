"""What the users of a chunk learnt, before anybody clips it."""

from collections.abc import Iterator, Mapping
from math import prod

import torch

from fedpriv.engine.outer_products import OuterProducts
from fedpriv.engine.task import TorchTensors

# Numbers of whole updates that exist at a time. What has left a processor's caches before it is
# clipped costs more than the arithmetic; a GPU needs more to be busy.
_NUMBERS = 2**19
_NUMBERS_CUDA = 2**24

Updates = Mapping[str, torch.Tensor | OuterProducts]
"""Name of tensor → [C, *shape], float32, whole or in factors."""


def whole(updates: Updates, lanes: slice = slice(None)) -> TorchTensors:
    """Tensors of some of the users of a chunk: [c, *shape]."""
    return {name: update[lanes] for name, update in updates.items()}


def few_lanes(updates: Updates, users: int) -> Iterator[slice]:
    """A few of the users at a time, at least one, so that their whole tensors stay in a cache."""
    on_gpu = any(update.device.type == "cuda" for update in updates.values())
    numbers = sum(prod(update.shape[1:]) for update in updates.values())
    few = max(1, (_NUMBERS_CUDA if on_gpu else _NUMBERS) // max(1, numbers))
    for start in range(0, users, few):
        yield slice(start, min(start + few, users))
