"""The table of faults: that it shows what was logged and what became of the run."""

import re

import pytest

from simulations import loopback
from simulations.faults import provoked

LOG = """\
faults: listening on 127.0.0.1:4711
2030-01-01T00:00:00Z INFO    connected: node-1
2030-01-01T00:00:01Z WARNING an answer of node-1 is refused: it took 3 seconds
2030-01-01T00:00:02Z WARNING an answer of node-1 is refused: it took 5 seconds
2030-01-01T00:00:03Z ERROR   gRPC stopped listening
error: the ledger is full
"""


def test_troubles_are_warnings_errors_and_last_sentences_each_once() -> None:
    assert loopback.troubles(LOG) == [
        "WARNING an answer of node-1 is refused: it took 3 seconds",
        "ERROR gRPC stopped listening",
        "ERROR the ledger is full",
    ]


@pytest.mark.slow
def test_a_ledger_that_is_set_back_is_refused() -> None:
    seen, run = provoked("ledger set back")
    released, charged = map(int, re.findall(r"(\d+) released, (\d+) charged", run)[0])
    assert "ends with exit code 2" in run
    assert "ledger" in seen
    assert charged < released
