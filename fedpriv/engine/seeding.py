"""Torch's own generators, which draw dropout masks, for as long as a chunk trains."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(local_key: bytes, user: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device, and put them back afterwards.

    Args:
        local_key: 32 bytes of this round.
        user: position in the population of the chunk's first user.
        device: where the chunk trains.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed((int.from_bytes(local_key[8:15], "little") + user) % 2**63)
        yield
