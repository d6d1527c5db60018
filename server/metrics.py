"""What an operator may watch: a few numbers for Prometheus, none of them about users."""

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
        self._gauges: dict[str, float] = {"fedpriv_answer_refused": 0.0}
        self._bytes = {"received": 0, "sent": 0}
        self._refusals = dict.fromkeys(Refusal, 0)
        self._seconds: dict[str, float] = {}
        self._state: RunState | None = None

    def connected(self, nodes: int) -> None:
        """Set the number of connected nodes."""
        with self._lock:
            self._gauges["fedpriv_nodes_connected"] = nodes

    def progress(self, state: RunState, next_round: int, epsilon: float) -> None:
        """Set what the server does, the number of the next round, from 0, and the ε spent."""
        with self._lock:
            self._state = state
            self._gauges |= {"fedpriv_round": next_round, "fedpriv_epsilon": epsilon}

    def received(self, count: int) -> None:
        """Count bytes that came from nodes."""
        with self._lock:
            self._bytes["received"] += count

    def sent(self, count: int) -> None:
        """Count bytes that went to nodes."""
        with self._lock:
            self._bytes["sent"] += count

    def refused(self, reason: Refusal) -> None:
        """Count a call that was turned away."""
        with self._lock:
            self._refusals[reason] += 1

    def answer_refused(self) -> None:
        """Note that a node's answer was refused, not how many were."""
        with self._lock:
            self._gauges["fedpriv_answer_refused"] = 1.0

    def handled(self, method: str, seconds: float) -> None:
        """Take the duration of a call into the mean of its method."""
        with self._lock:
            before = self._seconds.get(method, seconds)
            self._seconds[method] = before + _SMOOTHING * (seconds - before)

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serve the numbers over HTTP, in a thread of its own, until the block is left.

        Args:
            host: address to bind to; beyond loopback, all who reach it see what grows with cohorts.
            port: 0: any that is free.

        Yields:
            The port in use.

        Raises:
            InvalidValueError: prometheus-client is not installed, or the port cannot be bound.
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
        """The numbers as they are now, as a registry of prometheus-client asks for them."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        with self._lock:
            gauges, volumes, refusals = dict(self._gauges), dict(self._bytes), dict(self._refusals)
            seconds, state = dict(self._seconds), self._state
        for name, value in gauges.items():
            yield GaugeMetricFamily(name, _HELP[name], value)
        states = GaugeMetricFamily("fedpriv_state", "1 for what the server does.", labels=["state"])
        for known in RunState if state is not None else ():
            states.add_metric([known], float(known is state))
        yield states
        for direction, count in volumes.items():
            words = f"Bytes of tensors {direction}. {_OPERATOR_ONLY}"
            yield CounterMetricFamily(f"fedpriv_{direction}_bytes", words, count)
        counted = CounterMetricFamily(
            "fedpriv_refused_calls", "Calls that reached no handler, by reason.", labels=["reason"]
        )
        for reason, number in refusals.items():
            counted.add_metric([reason], number)
        yield counted
        means = GaugeMetricFamily(
            "fedpriv_call_seconds", "Mean duration, newer calls count more.", labels=["method"]
        )
        for method, mean in seconds.items():
            means.add_metric([method], mean)
        yield means


_HELP = {
    "fedpriv_nodes_connected": "Nodes that are connected.",
    "fedpriv_round": "Number of the next round, from 0.",
    "fedpriv_epsilon": "User-level ε spent so far.",
    "fedpriv_answer_refused": "1 when an answer was refused since the start; the log says why.",
}
