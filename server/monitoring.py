"""A few numbers about the server for Prometheus, none of them about users."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING

from fedpriv.errors import InvalidValueError
from fedpriv.wire import RunState

if TYPE_CHECKING:
    from prometheus_client import Metric

_SMOOTHING = 0.1  # weight of the newest call in a method's mean
_OPERATOR_ONLY = "They grow with the size of cohorts, which is secret: for the operator only."
_REFUSED = "1 when an answer was refused since the start; the log says why."
_SHOWN = {  # name: kind, help, and the name of the label if there is one
    "fedpriv_nodes_connected": ("gauge", "Nodes that are connected.", ""),
    "fedpriv_round": ("gauge", "Number of the next round, from 0.", ""),
    "fedpriv_epsilon": ("gauge", "User-level ε spent so far.", ""),
    "fedpriv_answer_refused": ("gauge", _REFUSED, ""),
    "fedpriv_state": ("gauge", "1 for what the server does.", "state"),
    "fedpriv_call_seconds": ("gauge", "Mean duration, newer calls count more.", "method"),
    "fedpriv_received_bytes": ("counter", f"Bytes of tensors received. {_OPERATOR_ONLY}", ""),
    "fedpriv_sent_bytes": ("counter", f"Bytes of tensors sent. {_OPERATOR_ONLY}", ""),
    "fedpriv_refused_calls": ("counter", "Calls that reached no handler, by reason.", "reason"),
}


class Refusal(StrEnum):
    """Why the server turned a caller away."""

    IDENTITY = "identity"
    ENROLMENT = "enrolment"
    RATE = "rate"


class Monitor:
    """Numbers about a server, which Prometheus reads where they are served.

    Guarantees:
        * No number says who was drawn, and none counts offers, answers or calls: in a round their
          number is the size of the cohort. So calls have a mean duration and no histogram, which
          would count them; and of refused answers it is only shown whether there were any.
        * Bytes sent and received grow with the size of a cohort nevertheless. Therefore they are
          served on loopback unless configured otherwise: a reader is trusted as the operator is.
        * Its methods may be called from any thread, and are cheap.

    What has not been set is not shown: an unknown ε is not 0.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # By name, and by label, which is "" where there is none.
        self._numbers: dict[str, dict[str, float]] = {name: {} for name in _SHOWN}
        self._numbers["fedpriv_refused_calls"] |= dict.fromkeys(Refusal, 0.0)
        for name in ("fedpriv_answer_refused", "fedpriv_received_bytes", "fedpriv_sent_bytes"):
            self._set(name, 0.0)

    def _set(self, name: str, number: float) -> None:
        with self._lock:
            self._numbers[name][""] = number

    def _add(self, name: str, number: int, label: str = "") -> None:
        with self._lock:
            self._numbers[name][label] += number

    def connected(self, nodes: int) -> None:
        """Set the number of connected nodes."""
        self._set("fedpriv_nodes_connected", nodes)

    def progress(self, state: RunState, next_round: int, epsilon: float) -> None:
        """Set what the server does, the number of the next round, from 0, and the ε spent."""
        self._set("fedpriv_round", next_round)
        self._set("fedpriv_epsilon", epsilon)
        with self._lock:
            self._numbers["fedpriv_state"] = {known: float(known is state) for known in RunState}

    def received(self, count: int) -> None:
        """Count bytes that came from nodes."""
        self._add("fedpriv_received_bytes", count)

    def sent(self, count: int) -> None:
        """Count bytes that went to nodes."""
        self._add("fedpriv_sent_bytes", count)

    def refused(self, reason: Refusal) -> None:
        """Count a call that was turned away."""
        self._add("fedpriv_refused_calls", 1, reason)

    def answer_refused(self) -> None:
        """Note that a node's answer was refused, not how many were."""
        self._set("fedpriv_answer_refused", 1.0)

    def handled(self, method: str, seconds: float) -> None:
        """Take the duration of a call into the mean of its method."""
        with self._lock:
            means = self._numbers["fedpriv_call_seconds"]
            before = means.get(method, seconds)
            means[method] = before + _SMOOTHING * (seconds - before)

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serve the numbers over HTTP until the block is left; yields the port in use.

        Port 0 takes a free one. Beyond loopback, all who reach it see what grows with cohorts.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
        except ImportError as error:
            raise InvalidValueError(
                "metrics need prometheus-client, which `pip install 'fedpriv[prometheus]'` installs"
            ) from error
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise InvalidValueError(
                f"metrics cannot be served at port {port} of {host}: {error}"
            ) from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def collect(self) -> "Iterator[Metric]":
        """The current numbers; a registry of prometheus-client calls this."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        with self._lock:
            numbers = {name: dict(labelled) for name, labelled in self._numbers.items()}
        for name, (kind, words, label) in _SHOWN.items():
            family = families[kind](name, words, labels=[label] if label else [])
            for value, number in numbers[name].items():
                family.add_metric([value] if label else [], number)
            yield family
