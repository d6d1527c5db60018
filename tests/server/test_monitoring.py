"""Metrics: what happened is shown, nothing counts a cohort, and only who may look can."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedpriv.errors import InvalidValueError
from fedpriv.report.records import Trouble
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.monitoring import STRANGER, Metrics, Sites
from fedpriv.wire import RunState, Status

HOSTING = Enrolment("0" * 32, {"four": ["4"], "hospital": ["a", "b"]})
STATUS = Status("run", 7, 9, 1.5, 8.0, 1e-6, 2, 0, 3, RunState.COLLECTING)


@pytest.fixture
def sites() -> Sites:
    return Sites(HOSTING)


@pytest.fixture
def metrics(sites: Sites) -> Metrics:
    return Metrics(lambda: STATUS, sites)


@pytest.fixture
def port(metrics: Metrics) -> Iterator[int]:
    with metrics.served("127.0.0.1", 0) as port:
        yield port


def page(port: int, host: str = "127.0.0.1") -> str:
    with urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def shown(port: int) -> dict[str | tuple[str, ...], float]:
    """Every number on the page, by its name, or its name and its labels."""
    found = {}
    for family in text_string_to_metric_families(page(port)):
        for sample in family.samples:
            labels = list(sample.labels.values())
            found[(sample.name, *labels) if labels else sample.name] = sample.value
    return found


def test_what_happened_is_shown(sites: Sites, port: int) -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    sites.came("hospital", end)
    sites.trouble("hospital", Trouble.LATE, "first")
    sites.trouble("hospital", Trouble.LATE, "second")
    sites.trouble("four", Trouble.LATE, "first")
    sites.trouble("four", Trouble.UNWILLING, "all nodes vote")
    sites.trouble(STRANGER, Trouble.CALL, "not enrolled")
    numbers = shown(port)
    assert numbers["fedpriv_nodes_connected"] == 1
    assert numbers["fedpriv_round"] == 7
    assert numbers["fedpriv_epsilon"] == 1.5
    states = {state: numbers["fedpriv_state", state] for state in RunState}
    assert [state for state, is_it in states.items() if is_it] == [RunState.COLLECTING]
    assert numbers["fedpriv_troubles_total", "hospital", "late"] == 2
    assert numbers["fedpriv_troubles_total", "a node of one user", "late"] == 1
    assert ("fedpriv_troubles_total", "four", "late") not in numbers
    assert numbers["fedpriv_troubles_total", "four", "does not agree"] == 1
    assert numbers["fedpriv_troubles_total", STRANGER, "call refused"] == 1
    assert numbers["fedpriv_node_connected", "hospital"] == 1
    assert numbers["fedpriv_node_connected", "four"] == 0
    assert numbers["fedpriv_certificate_end", "hospital"] == end.timestamp()
    sites.left("hospital")
    assert shown(port)["fedpriv_nodes_connected"] == 0


def test_what_is_unknown_is_not_shown(sites: Sites) -> None:
    with Metrics(lambda: None, sites).served("127.0.0.1", 0) as port:
        names = {name if isinstance(name, str) else name[0] for name in shown(port)}
    assert "fedpriv_nodes_connected" in names
    unknown = {"fedpriv_epsilon", "fedpriv_round", "fedpriv_state", "fedpriv_certificate_end"}
    assert not names & unknown


def test_no_number_counts_answers_that_count() -> None:
    """Whether 2 or 50 answers were accepted, the page is the same."""

    def after(answers: int) -> dict[str | tuple[str, ...], float]:
        sites = Sites(HOSTING)
        for _ in range(answers):
            sites.answered("hospital")
        with Metrics(lambda: STATUS, sites).served("127.0.0.1", 0) as its_port:
            return shown(its_port)

    assert after(2) == after(50)


def test_the_help_of_what_depends_on_cohorts_says_whom_it_is_for(port: int) -> None:
    helps = [line for line in page(port).splitlines() if line.startswith("# HELP")]
    (troubles,) = [line for line in helps if "_troubles" in line]
    assert "for the operator only" in troubles.lower()


def test_it_binds_to_the_host_alone(metrics: Metrics) -> None:
    with (
        metrics.served("127.0.0.1", 0) as port,
        # All of 127/8 is this machine; a server on all addresses would answer here too.
        pytest.raises(OSError, match="refused"),
    ):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    with metrics.served("0.0.0.0", 0) as port:
        assert "fedpriv" in page(port, "127.0.0.2")


def test_after_the_end_the_port_is_free(metrics: Metrics) -> None:
    with metrics.served("127.0.0.1", 0) as port:
        pass
    with metrics.served("127.0.0.1", port) as again:
        assert again == port
        assert "fedpriv" in page(port)


def test_a_port_that_cannot_be_bound_is_refused_in_one_sentence(
    metrics: Metrics, port: int
) -> None:
    for wrong in (port, 65536):
        with (
            pytest.raises(InvalidValueError, match=f"at port {wrong} of 127.0.0.1"),
            metrics.served("127.0.0.1", wrong),
        ):
            pass


def test_without_the_library_only_serving_is_refused() -> None:
    code = """
import sys

sys.modules["prometheus_client"] = None
from fedpriv.errors import InvalidValueError
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.monitoring import Metrics, Sites

metrics = Metrics(lambda: None, Sites(Enrolment("0" * 32, {"a": ["1"]})))
try:
    metrics.served("127.0.0.1", 0).__enter__()
except InvalidValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'fedpriv[prometheus]'" in done.stdout
