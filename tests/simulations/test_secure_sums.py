"""The federation by which secure sums are compared with a trusted server."""

import json
import subprocess
import sys

import pytest

COSTS = """
import json
from dataclasses import asdict
from fedpriv.ledger.events import SecureSum
from simulations.secure_load import costs
print(json.dumps([asdict(cost) for cost in costs(SecureSum(3, 1, 0), 50_000)]))
"""


@pytest.mark.slow
def test_a_federation_of_processes_sends_four_bytes_a_number_with_either_trust() -> None:
    """In a process of its own: it forks. Both kinds of rounds check their own sums."""
    done = subprocess.run([sys.executable, "-c", COSTS], capture_output=True, text=True, check=True)
    plain, masked = json.loads(done.stdout)
    for cost in (plain, masked):
        assert 4 * 50_000 < cost["sent"] < 4 * 50_000 + 6_000
