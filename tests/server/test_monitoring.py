"""Metrics: what is told is shown, nothing counts a cohort, and only who may look can."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedpriv.errors import InvalidValueError
from fedpriv.server.monitoring import Monitor
from fedpriv.wire import RunState


@pytest.fixture
def monitor() -> Monitor:
    return Monitor()


@pytest.fixture
def port(monitor: Monitor) -> Iterator[int]:
    with monitor.served("127.0.0.1", 0) as port:
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


def test_what_was_told_is_shown(monitor: Monitor, port: int) -> None:
    monitor.set("nodes_connected", 3)
    monitor.progress(RunState.COLLECTING, 7, 1.5)
    monitor.add("received_bytes", 100)
    monitor.add("received_bytes", 20)
    monitor.add("sent_bytes", 2**40)
    for reason in ("identity", "rate", "rate"):
        monitor.add("refused_calls", 1, reason)
    monitor.add("troubles", 1, "hospital", "late")
    monitor.add("troubles", 1, "hospital", "late")
    monitor.set("node_connected", 1.0, "hospital")
    monitor.handled("Upload", 2.0)
    numbers = shown(port)
    assert numbers["fedpriv_nodes_connected"] == 3
    assert numbers["fedpriv_round"] == 7
    assert numbers["fedpriv_epsilon"] == 1.5
    states = {state: numbers["fedpriv_state", state] for state in RunState}
    assert [state for state, is_it in states.items() if is_it] == [RunState.COLLECTING]
    assert numbers["fedpriv_received_bytes_total"] == 120
    assert numbers["fedpriv_sent_bytes_total"] == 2**40
    assert numbers["fedpriv_troubles_total", "hospital", "late"] == 2
    assert numbers["fedpriv_node_connected", "hospital"] == 1
    refusals = [("identity", 1), ("enrolment", 0), ("rate", 2)]
    assert [(r, numbers["fedpriv_refused_calls_total", r]) for r, _ in refusals] == refusals
    assert numbers["fedpriv_call_seconds", "Upload"] == 2.0
    monitor.handled("Upload", 4.0)
    assert 2.0 < shown(port)["fedpriv_call_seconds", "Upload"] < 4.0


def test_what_was_not_told_is_not_shown(port: int) -> None:
    names = {name if isinstance(name, str) else name[0] for name in shown(port)}
    assert "fedpriv_received_bytes_total" in names
    unknown = {"fedpriv_epsilon", "fedpriv_round", "fedpriv_nodes_connected", "fedpriv_state"}
    assert not names & unknown


def test_no_number_counts_calls_offers_or_answers_that_count() -> None:
    """Whether 2 or 50 nodes answer alike, the page is the same but for bytes."""

    def after(answers: int) -> dict[str | tuple[str, ...], float]:
        one = Monitor()
        for _ in range(answers):
            one.handled("Download", 0.5)
            one.handled("Upload", 0.5)
            one.add("sent_bytes", 8)
            one.add("received_bytes", 8)
        with one.served("127.0.0.1", 0) as its_port:
            return shown(its_port)

    few, many = after(2), after(50)
    differing = {name for name in many if few.get(name) != many[name]}
    assert differing == {"fedpriv_sent_bytes_total", "fedpriv_received_bytes_total"}


def test_the_help_of_what_depends_on_cohorts_says_whom_it_is_for(port: int) -> None:
    helps = [line for line in page(port).splitlines() if line.startswith("# HELP")]
    helps = [line for line in helps if "_bytes" in line or "_troubles" in line]
    assert len(helps) == 3
    assert all("for the operator only" in line.lower() for line in helps)


def test_two_monitors_do_not_share_numbers(monitor: Monitor, port: int) -> None:
    other = Monitor()
    monitor.set("nodes_connected", 5)
    other.set("nodes_connected", 1)
    with other.served("127.0.0.1", 0) as second:
        found = [shown(at)["fedpriv_nodes_connected"] for at in (port, second)]
    assert found == [5, 1]


def test_it_binds_to_the_host_alone(monitor: Monitor) -> None:
    with (
        monitor.served("127.0.0.1", 0) as port,
        # All of 127/8 is this machine; a server on all addresses would answer here too.
        pytest.raises(OSError, match="refused"),
    ):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    with monitor.served("0.0.0.0", 0) as port:
        assert "fedpriv" in page(port, "127.0.0.2")


def test_after_the_end_the_port_is_free(monitor: Monitor) -> None:
    with monitor.served("127.0.0.1", 0) as port:
        pass
    with monitor.served("127.0.0.1", port) as again:
        assert again == port
        assert "fedpriv" in page(port)


def test_a_port_that_cannot_be_bound_is_refused_in_one_sentence(port: int) -> None:
    for wrong in (port, 65536):
        with (
            pytest.raises(InvalidValueError, match=f"at port {wrong} of 127.0.0.1"),
            Monitor().served("127.0.0.1", wrong),
        ):
            pass


def test_all_that_threads_tell_is_counted(monitor: Monitor, port: int) -> None:
    def tell(_: int) -> None:
        for _ in range(2000):
            monitor.add("sent_bytes", 1)
            monitor.add("refused_calls", 1, "rate")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tell, range(8)))
    numbers = shown(port)
    assert numbers["fedpriv_sent_bytes_total"] == 16_000
    assert numbers["fedpriv_refused_calls_total", "rate"] == 16_000


def test_without_the_library_only_serving_is_refused() -> None:
    code = """
import sys

sys.modules["prometheus_client"] = None
from fedpriv.errors import InvalidValueError
from fedpriv.server.monitoring import Monitor

monitor = Monitor()
monitor.set("nodes_connected", 1)
try:
    monitor.served("127.0.0.1", 0).__enter__()
except InvalidValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'fedpriv[prometheus]'" in done.stdout
