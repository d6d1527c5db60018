"""Chunks of one size take the memory of those before them."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from fedpriv.engine.memory import keep_freed_memory
keep_freed_memory()

def round():
    for array in [np.ones(2**17) for _ in range(32)]:
        del array

round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> int:
    """Pages that a process asked for again in 20 rounds that free 32 MiB each."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_kept_unless_the_environment_decides() -> None:
    rounds_pages = 20 * 32 * 2**20 // 4096
    assert faults() < rounds_pages / 20
    # What the environment sets is left: everything larger than this is given back at once.
    assert faults(MALLOC_MMAP_THRESHOLD_="65536") > rounds_pages / 2
