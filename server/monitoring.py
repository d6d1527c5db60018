"""What the operator sees of a server: numbers for Prometheus, and how each site does."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from fedpriv.errors import DataError, InvalidValueError, reason_of
from fedpriv.report.records import Happening, SiteRecord, SiteTable, Trouble
from fedpriv.run.folder import RunFolder
from fedpriv.server.enrolment import Hosting
from fedpriv.support.logs import expiry, one_line, trouble
from fedpriv.wire import RunState

if TYPE_CHECKING:
    from prometheus_client import Metric

_log = logging.getLogger(__name__)
SERVER = "the server"
STRANGER = "a caller that is not enrolled"
# No line names a node of one user with these: it would say that the user was drawn.
# All nodes vote on a round, whoever is drawn; so that may name any.
_OF_NO_ROUND = {Trouble.UNWILLING, Trouble.ENROLMENT, Trouble.AWAY, Trouble.CERTIFICATE}
_AWAY = timedelta(minutes=10)  # after which a node that is not connected is worth a line
_DAY, _MINUTE, _SECOND = timedelta(days=1), timedelta(minutes=1), 1.0
_SMOOTHING = 0.1  # weight of the newest call in a method's mean
_OPERATOR_ONLY = "They grow with the size of cohorts, which is secret: for the operator only."
_TROUBLES = "What went wrong, by node; nodes of one user together. For the operator only."
_SHOWN = {  # name: kind, help, and names of labels
    "nodes_connected": ("gauge", "Nodes that are connected.", ""),
    "node_connected": ("gauge", "1 if the node is connected.", "node"),
    "certificate_end": ("gauge", "When a certificate ends, in seconds since 1970.", "node"),
    "troubles": ("counter", _TROUBLES, "node what"),
    "round": ("gauge", "Number of the newest round, from 1; 0 before the first.", ""),
    "epsilon": ("gauge", "User-level ε spent so far.", ""),
    "state": ("gauge", "1 for what the server does.", "state"),
    "call_seconds": ("gauge", "Mean duration, newer calls count more.", "method"),
    "received_bytes": ("counter", f"Bytes of tensors received. {_OPERATOR_ONLY}", ""),
    "sent_bytes": ("counter", f"Bytes of tensors sent. {_OPERATOR_ONLY}", ""),
    "refused_calls": ("counter", "Calls that reached no handler, by reason.", "reason"),
}


class Monitor:
    """Numbers about a server, which Prometheus reads where they are served.

    Guarantees:
        * None counts offers, answers that count, or calls: in a round their number is the size of
          the cohort. So calls have a mean duration and no histogram, which would count them.
        * Bytes grow with the size of a cohort nevertheless, and what goes wrong in a round at a
          node of several users, which are counted by node, says that one of them was drawn; no
          number says which. An operator who must find a broken site among many needs these
          numbers, and learns as much from the log. Therefore all are served on loopback unless
          configured otherwise: a reader is trusted as the operator is.
        * Of a node of one user it is shown only whether it is connected and when its certificate
          ends, which do not depend on who is drawn.
        * Its methods may be called from any thread, and are cheap.

    What has not been set is not shown: an unknown ε is not 0.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # By name, and by the values of its labels.
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _SHOWN}
        for reason in ("identity", "enrolment", "rate"):
            self.set("refused_calls", 0.0, reason)
        for name in ("received_bytes", "sent_bytes"):
            self.set(name, 0.0)

    def set(self, name: str, number: float, *labels: str) -> None:
        """Set a number of `_SHOWN`."""
        with self._lock:
            self._numbers[name][labels] = number

    def add(self, name: str, count: int, *labels: str) -> None:
        """Add to one of the counters."""
        with self._lock:
            numbers = self._numbers[name]
            numbers[labels] = numbers.get(labels, 0.0) + count

    def progress(self, state: RunState, newest_round: int, epsilon: float) -> None:
        """Set what the server does, the number of the newest round, and the ε spent."""
        self.set("round", newest_round)
        self.set("epsilon", epsilon)
        with self._lock:
            self._numbers["state"] = {(known,): float(known is state) for known in RunState}

    def handled(self, method: str, seconds: float) -> None:
        """Take the duration of a call into the mean of its method."""
        with self._lock:
            means = self._numbers["call_seconds"]
            before = means.get((method,), seconds)
            means[method,] = before + _SMOOTHING * (seconds - before)

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
            sentence = f"metrics cannot be served at port {port} of {host}: {reason_of(error)}"
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
        for name, (kind, words, labels) in _SHOWN.items():
            family = families[kind](f"fedpriv_{name}", words, labels=labels.split())
            for values, number in numbers[name].items():
                family.add_metric(values, number)
            yield family


class Sites:
    """How each node of a server does, and one line when something goes wrong at one.

    Guarantees:
        * No line and no number of the monitor names a node of one user with what happens in a
          round. The table names all nodes and counts their answers: it is secret, lies in the run's
          folder readable by its owner only, and no call of a node returns any of it.
        * Of each kind of trouble at a node there is at most one line a minute; of certificates and
          of nodes that are away, one a day.
        * A table that cannot be written ends no run.

    Told of by the event loop alone; `kept` looks in a thread of its own, and changes no site.
    """

    def __init__(
        self,
        hosting: Hosting,
        monitor: Monitor,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._hosting, self._monitor, self._now = hosting, monitor, now
        self._began, self._changed = now(), False
        self._end: datetime | None = None  # of the server's certificate
        self._sites = dict.fromkeys(hosting.nodes, SiteRecord())
        self._said: dict[tuple[str, Trouble], datetime] = {}

    def came(self, node: str, certificate_end: datetime | None) -> None:
        """A node has connected, with a certificate that ends then."""
        end = certificate_end
        self._update(node, connected=True, last_seen=self._now(), certificate_end=end)
        self._monitor.set("node_connected", 1.0, node)
        if end is not None:
            self._monitor.set("certificate_end", end.timestamp(), node)
        self._said.pop((node, Trouble.AWAY), None)

    def left(self, node: str) -> None:
        """A node has no connection any more."""
        self._update(node, connected=False, last_seen=self._now())
        self._monitor.set("node_connected", 0.0, node)

    def answered(self, node: str) -> None:
        """A node has answered a round, and its answer counts."""
        self._update(node, answered=self._sites[node].answered + 1)

    def serves_until(self, certificate_end: datetime | None) -> None:
        """The server's own certificate ends then."""
        self._end = certificate_end
        if certificate_end is not None:
            self._monitor.set("certificate_end", certificate_end.timestamp(), SERVER)

    def trouble(self, node: str, what: Trouble, why: str) -> None:
        """Something went wrong at a node, or at SERVER or a STRANGER: count it, and say it."""
        why, name = one_line(why), self._name(node, what)
        if (site := self._sites.get(node)) is not None:
            counts = {**site.troubles, what: site.troubles.get(what, 0) + 1}
            last = {**site.last, what: Happening(self._now(), why)}
            self._update(node, troubles=counts, last=last)
        self._monitor.add("troubles", 1, name, what)
        self._say(name, what, why, _MINUTE)

    def look(self) -> None:
        """Say which nodes have been away for long, and which certificates are about to end."""
        now = self._now()
        ends = {SERVER: self._end}
        for node, site in self._sites.items():
            ends[node] = site.certificate_end
            since = max(site.last_seen or self._began, self._began)
            if not site.connected and now - since >= _AWAY:
                words = f"not connected since {since:%Y-%m-%d %H:%M UTC}"
                self._say(node, Trouble.AWAY, words, _DAY)
        for name, end in ends.items():
            if end is not None and (why := expiry(end, now)):
                self._say(name, Trouble.CERTIFICATE, why, _DAY)

    def table(self) -> SiteTable:
        """How all nodes do now."""
        return SiteTable(self._now(), self._end, dict(self._sites))

    @contextmanager
    def kept(self, folder: RunFolder) -> Iterator[None]:
        """Look each second, and keep the table in a run's folder; go on with the one there."""
        self._resume(folder)
        self._changed, over = True, Event()
        keeper = Thread(target=self._keep, args=(folder, over), name="fedpriv sites")
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    def _resume(self, folder: RunFolder) -> None:
        if not folder.sites.exists():
            return
        try:
            before = folder.read_sites().sites
        except DataError as error:
            _log.warning("%s; its counts begin anew", error)
            return
        for node in self._sites.keys() & before.keys():
            self._sites[node] = replace(before[node], connected=False)

    def _keep(self, folder: RunFolder, over: Event) -> None:
        written, failed = self._began - _MINUTE, False
        while not over.wait(_SECOND) or self._changed:
            self.look()
            if not self._changed and abs(self._now() - written) < _MINUTE:
                continue
            self._changed, written = False, self._now()
            try:
                folder.write_sites(self.table())
            except OSError as error:
                if not failed:
                    _log.warning("the table of sites cannot be written: %s", error)
                failed = True
            else:
                failed = False

    def _update(self, node: str, **changes: object) -> None:
        self._sites[node] = replace(self._sites[node], **changes)  # type: ignore[arg-type]
        self._changed = True

    def _name(self, node: str, what: Trouble) -> str:
        return node if what in _OF_NO_ROUND else self._hosting.log_name(node)

    def _say(self, name: str, what: Trouble, why: str, pause: timedelta) -> None:
        now, before = self._now(), self._said.get((name, what))
        if before is None or abs(now - before) >= pause:  # a clock may be set back
            self._said[name, what] = now
            trouble(_log, name, what, why)
