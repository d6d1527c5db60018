"""The table of faults: that it shows what was logged and what became of the run."""

import re

import pytest

from simulations import loopback
from simulations.faults import provoked, shortened, telling

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


def test_what_every_fault_causes_is_left_out_where_there_is_more() -> None:
    late = "server: `WARNING node-2: late: not connected in the round`"
    refused = "server: `WARNING node-2: answer refused: it is too long`"
    assert telling([late, refused]) == [refused]
    assert telling([late]) == [late]


def test_lines_are_shortened_to_what_is_the_same_in_each_run() -> None:
    line = (
        "no connection: UNAVAILABLE ('failed to connect to all addresses; last error: UNKNOWN: "
        "ipv4:127.0.0.1:4711: Failed to connect to remote host: Connection refused')"
    )
    assert shortened(line) == "no connection: UNAVAILABLE ('… Connection refused')"
    assert shortened(f"CN=node-2 {'ab' * 32}") == "CN=node-2 ababab…"
