"""Keeping the memory of one chunk for the next."""

import ctypes
import os

# glibc's names for them (mallopt(3)), and its largest legal threshold on machines of 64 bits.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 * 2**20
_KEPT = 256 * 2**20


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 256 MiB, and not return it after each chunk.

    Pages that the system takes back and gives again, full of zeros, cost a fifth of the time of
    training. Whoever sets `MALLOC_…` or `GLIBC_TUNABLES` decides for himself; where there is no
    glibc, nothing is done.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
