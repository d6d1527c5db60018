"""What an operator may watch: a few numbers for Prometheus, none of them about users."""

from collections.abc import Iterator
from enum import StrEnum
from threading import Lock, Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from fedpriv.errors import InvalidValueError
from fedpriv.wire import RunState

if TYPE_CHECKING:
    from prometheus_client import Metric


_SMOOTHING = 0.1  # weight of the newest call in a method's mean
_OPERATOR_ONLY = "They grow with the size of cohorts, which is secret: for the operator only."


class Refusal(StrEnum):
    """Why the server turned somebody away."""

    IDENTITY = "identity"
    ENROLMENT = "enrolment"
    RATE = "rate"
    ANSWER = "answer"


class Monitor:
    """Numbers about a server, which Prometheus reads when there is a port for it.

    Guarantees:
        * No number says who was drawn, and none counts offers, answers or calls: in a round their
          number is the size of the cohort. So calls have a mean duration, and no histogram, which
          would count them; and of refused answers only whether there were any.
        * Bytes that were sent and received grow with the size of a cohort nevertheless. Therefore
          the port is of this machine only, unless told otherwise: whoever reads it is trusted as
          the operator is.
        * Its methods may be called from any thread, and cost nothing to speak of.

    What was not told yet is not shown: an ε that is unknown is not 0.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._gauges: dict[str, float] = {"fedpriv_answer_refused": 0.0}
        self._bytes = {"received": 0, "sent": 0}
        self._refusals = {reason: 0 for reason in Refusal if reason is not Refusal.ANSWER}
        self._seconds: dict[str, float] = {}
        self._state: RunState | None = None
        self._served: tuple[WSGIServer, Thread] | None = None

    def connected(self, nodes: int) -> None:
        """So many nodes are connected."""
        self._set("fedpriv_nodes_connected", nodes)

    def round(self, number: int) -> None:
        """This is the next round, from 0."""
        self._set("fedpriv_round", number)

    def epsilon(self, value: float) -> None:
        """So much ε was spent."""
        self._set("fedpriv_epsilon", value)

    def state(self, state: RunState) -> None:
        """The server does this."""
        with self._lock:
            self._state = state

    def received(self, count: int) -> None:
        """So many bytes more came from nodes."""
        with self._lock:
            self._bytes["received"] += count

    def sent(self, count: int) -> None:
        """So many bytes more went to nodes."""
        with self._lock:
            self._bytes["sent"] += count

    def refused(self, reason: Refusal) -> None:
        """A call, or an answer, was turned away."""
        if reason is Refusal.ANSWER:
            self._set("fedpriv_answer_refused", 1)
            return
        with self._lock:
            self._refusals[reason] += 1

    def handled(self, method: str, seconds: float) -> None:
        """A call of a method of the service lasted so long."""
        with self._lock:
            before = self._seconds.get(method, seconds)
            self._seconds[method] = before + _SMOOTHING * (seconds - before)

    def start(self, port: int | None, host: str = "127.0.0.1") -> int | None:
        """Serve the numbers over HTTP, in a thread of its own.

        Args:
            port: where; 0: any that is free; None: nowhere.
            host: address to bind to; others than loopback show everybody there what grows with
                the size of cohorts.

        Returns:
            The port in use, or None.

        Raises:
            InvalidValueError: it serves already, prometheus-client is not installed, or the port
                cannot be bound.
        """
        if port is None:
            return None
        if self._served is not None:
            raise InvalidValueError("this monitor serves already; it must be stopped first")
        try:
            from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
        except ImportError as error:
            raise InvalidValueError(
                "metrics need prometheus-client, which `pip install 'fedpriv[prometheus]'` installs"
            ) from error
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._served = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise InvalidValueError(
                f"metrics cannot be served at port {port} of {host}: {error}"
            ) from error
        return self._served[0].server_port

    def stop(self) -> None:
        """Serve no more; again changes nothing."""
        if self._served is None:
            return
        server, thread = self._served
        self._served = None
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
        for reason, count in refusals.items():
            counted.add_metric([reason], count)
        yield counted
        means = GaugeMetricFamily(
            "fedpriv_call_seconds", "Mean duration, newer calls count more.", labels=["method"]
        )
        for method, mean in seconds.items():
            means.add_metric([method], mean)
        yield means

    def _set(self, gauge: str, value: float) -> None:
        with self._lock:
            self._gauges[gauge] = value


_HELP = {
    "fedpriv_nodes_connected": "Nodes that are connected.",
    "fedpriv_round": "Number of the next round, from 0.",
    "fedpriv_epsilon": "User-level ε spent so far.",
    "fedpriv_answer_refused": "1 when an answer was refused since the start; the log says why.",
}
