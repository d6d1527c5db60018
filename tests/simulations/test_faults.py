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


def outcome(text: str) -> tuple[int, int]:
    released, charged = re.findall(r"(\d+) released, (\d+) charged", text)[0]
    return int(released), int(charged)


@pytest.mark.slow
def test_a_sum_that_is_too_long_leaves_the_run_as_it_was() -> None:
    _, run = provoked("sum longer than its users allow")
    released, charged = outcome(run)
    assert run.startswith("goes on")
    assert released == charged >= 4


@pytest.mark.slow
def test_a_certificate_that_is_struck_off_is_told_to_the_node() -> None:
    seen, run = provoked("certificate struck off")
    assert "struck off" in seen
    assert "goes on" in run


@pytest.mark.slow
def test_a_ledger_that_is_set_back_is_refused() -> None:
    seen, run = provoked("ledger set back")
    released, charged = outcome(run)
    assert "ends with exit code 2" in run
    assert "ledger" in seen
    assert charged < released
