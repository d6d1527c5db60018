"""A few numbers about the server for Prometheus, none of them about users."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    "nodes_connected": ("gauge", "Nodes that are connected.", ""),
    "round": ("gauge", "Number of the newest round, from 1; 0 before the first.", ""),
    "epsilon": ("gauge", "User-level ε spent so far.", ""),
    "answer_refused": ("gauge", _REFUSED, ""),
    "state": ("gauge", "1 for what the server does.", "state"),
    "call_seconds": ("gauge", "Mean duration, newer calls count more.", "method"),
    "received_bytes": ("counter", f"Bytes of tensors received. {_OPERATOR_ONLY}", ""),
    "sent_bytes": ("counter", f"Bytes of tensors sent. {_OPERATOR_ONLY}", ""),
    "refused_calls": ("counter", "Calls that reached no handler, by reason.", "reason"),
}


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
        self._numbers["refused_calls"] = dict.fromkeys(("identity", "enrolment", "rate"), 0.0)
        for name in ("answer_refused", "received_bytes", "sent_bytes"):
            self.set(name, 0.0)

    def set(self, name: str, number: float) -> None:
        """Set a number of `_SHOWN` that has no label."""
        with self._lock:
            self._numbers[name][""] = number

    def add(self, name: str, count: int, label: str = "") -> None:
        """Add to one of the counters."""
        with self._lock:
            self._numbers[name][label] += count

    def progress(self, state: RunState, newest_round: int, epsilon: float) -> None:
        """Set what the server does, the number of the newest round, and the ε spent."""
        self.set("round", newest_round)
        self.set("epsilon", epsilon)
        with self._lock:
            self._numbers["state"] = {known: float(known is state) for known in RunState}

    def handled(self, method: str, seconds: float) -> None:
        """Take the duration of a call into the mean of its method."""
        with self._lock:
            means = self._numbers["call_seconds"]
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
            sentence = f"metrics cannot be served at port {port} of {host}: {error}"
            raise InvalidValueError(sentence) from error
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
            family = families[kind](f"fedpriv_{name}", words, labels=[label] if label else [])
            for value, number in numbers[name].items():
                family.add_metric([value] if label else [], number)
            yield family
