"""Monitoring for the operator of a server: the state of each site, and numbers for Prometheus."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING

from fedpriv.errors import DataError, InvalidValueError, reason_of
from fedpriv.report.records import Happening, SiteRecord, SiteTable, Trouble
from fedpriv.run.folder import RunFolder
from fedpriv.server.enrolment import Enrolment
from fedpriv.support.importing import check_installed
from fedpriv.support.logs import expiry, one_line, trouble
from fedpriv.wire import RunState, Status

if TYPE_CHECKING:
    from prometheus_client import Metric

_log = logging.getLogger(__name__)
SERVER = "the server"
STRANGER = "a caller that is not enrolled"
# Troubles that do not depend on the cohort: all nodes vote on a round, no matter who is drawn.
# With any other trouble, a line that named a node of one user would reveal that it was drawn.
_INDEPENDENT_OF_COHORT = {Trouble.UNWILLING, Trouble.ENROLMENT, Trouble.AWAY, Trouble.CERTIFICATE}
_AWAY = timedelta(minutes=10)  # a node that is disconnected for so long is logged
_DAY, _MINUTE, _SECOND = timedelta(days=1), timedelta(minutes=1), 1.0
_Numbers = dict[tuple[str, ...], float]  # by values of labels
_TROUBLES = "What went wrong, by node; nodes of one user together. For the operator only."


class Sites:
    """The state of each node of a server; troubles are counted and logged.

    Guarantees:
        * No line of the log and no number of `troubles` connects a node of one user with events
          of a round. The table names all nodes and counts their answers, so it is secret: it is in
          the run's folder, readable by its owner only, and nodes cannot request it.
        * Each kind of trouble at a node is logged at most once a minute; certificates that expire
          and absent nodes, once a day.
        * If the table cannot be written, the run continues.

    Only the event loop may change sites; other threads read them.
    """

    def __init__(
        self, enrolment: Enrolment, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._enrolment, self._now = enrolment, now
        self._began, self._changed = now(), False
        self._certificate_end: datetime | None = None  # of the server
        self._sites = dict.fromkeys(enrolment.nodes, SiteRecord())
        self._counts = Counter[tuple[str, ...]]()  # troubles by name in the log, and kind
        self._logged: dict[tuple[str, Trouble], datetime] = {}  # the last line of each kind

    def came(self, node: str, certificate_end: datetime | None) -> None:
        """Record that a node has connected, and when its certificate ends."""
        self._update(node, connected=True, last_seen=self._now(), certificate_end=certificate_end)
        self._logged.pop((node, Trouble.AWAY), None)

    def left(self, node: str) -> None:
        """Record that a node has disconnected."""
        self._update(node, connected=False, last_seen=self._now())

    def answered(self, node: str) -> None:
        """Record that an answer of a node was accepted."""
        self._update(node, answered=self._sites[node].answered + 1)

    def serves_until(self, certificate_end: datetime) -> None:
        """Record when the server's own certificate ends."""
        self._certificate_end = certificate_end

    def trouble(self, node: str, what: Trouble, why: str) -> None:
        """Count and log a trouble at a node, at SERVER or at a STRANGER."""
        name = node if what in _INDEPENDENT_OF_COHORT else self._enrolment.log_name(node)
        why = one_line(why)
        if (site := self._sites.get(node)) is not None:
            counts = {**site.troubles, what: site.troubles.get(what, 0) + 1}
            last = {**site.last, what: Happening(self._now(), why)}
            self._update(node, troubles=counts, last=last)
        self._counts[name, what] += 1
        self._log_at_most_every(_MINUTE, name, what, why)

    def look(self) -> None:
        """Log nodes that have been disconnected for long, and certificates that end soon."""
        now = self._now()
        ends = {SERVER: self._certificate_end}
        for node, site in self._sites.items():
            ends[node] = site.certificate_end
            since = max(site.last_seen or self._began, self._began)
            if not site.connected and now - since >= _AWAY:
                reason = f"not connected since {since:%Y-%m-%d %H:%M UTC}"
                self._log_at_most_every(_DAY, node, Trouble.AWAY, reason)
        for name, certificate_end in ends.items():
            if certificate_end is not None and (notice := expiry(certificate_end, now)):
                self._log_at_most_every(_DAY, name, Trouble.CERTIFICATE, notice)

    def troubles(self) -> dict[tuple[str, ...], float]:
        """Return the numbers of troubles since the start, by name in the log and kind."""
        return dict(self._counts)

    def table(self) -> SiteTable:
        """Return the present state of all nodes."""
        return SiteTable(self._now(), self._certificate_end, dict(self._sites))

    @contextmanager
    def kept(self, folder: RunFolder) -> Iterator[None]:
        """Within the context, call `look` each second and write the table to a run's folder.

        A table that the folder already holds is continued.
        """
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
            saved = folder.read_sites().sites
        except (DataError, OSError) as error:
            _log.warning("%s; its counts begin anew", error)
            return
        for node in self._sites.keys() & saved.keys():
            self._sites[node] = replace(saved[node], connected=False)

    def _keep(self, folder: RunFolder, over: Event) -> None:
        last_written, failed = self._began - _MINUTE, False
        while not over.wait(_SECOND) or self._changed:
            self.look()
            if not self._changed and abs(self._now() - last_written) < _MINUTE:
                continue
            self._changed, last_written = False, self._now()
            try:
                folder.write_sites(self.table())
                failed = False
            except OSError as error:
                if not failed:
                    _log.warning("the table of sites cannot be written: %s", error)
                failed = True

    def _update(self, node: str, **changes: object) -> None:
        self._sites[node] = replace(self._sites[node], **changes)  # type: ignore[arg-type]
        self._changed = True

    def _log_at_most_every(self, pause: timedelta, name: str, what: Trouble, why: str) -> None:
        now, last = self._now(), self._logged.get((name, what))
        if last is None or abs(now - last) >= pause:  # a clock may be set back
            self._logged[name, what] = now
            trouble(_log, name, what, why)


@dataclass(frozen=True)
class Metrics:
    """Numbers about a server, which Prometheus reads over HTTP.

    Guarantees:
        * No number counts offers, accepted answers, calls or bytes, because these depend on the
          number of nodes in a cohort.
        * Troubles are counted by node, and a trouble in a round at a node of several users reveals
          that one of them was drawn, but not which. The operator needs it to find a broken site,
          and the log reveals as much. So numbers are served on loopback unless configured
          otherwise: readers are trusted like the operator.
        * For a node of one user, the numbers show only whether it is connected and when its
          certificate ends, which do not depend on who is drawn.
    """

    status: Callable[[], Status | None]  # None before it is known; called in threads
    sites: Sites

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serve the numbers over HTTP within the context; yields the port in use.

        Port 0 selects a free one. If the host is not loopback, everyone who can reach it sees
        numbers that depend on cohorts. InvalidValueError: prometheus-client is not installed, or
        the port cannot be used.
        """
        check_installed("prometheus", "prometheus_client")
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415

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
        """Yield the current numbers; called by the registry of prometheus-client.

        The library's own Counter would show the time at which it began, which may depend on the
        cohort.
        """
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        status, table = self.status(), self.sites.table()
        connected: _Numbers = {(name,): site.connected for name, site in table.sites.items()}
        ends = {name: site.certificate_end for name, site in table.sites.items()}
        ends[SERVER] = table.server_certificate_end
        seconds: _Numbers = {(name,): end.timestamp() for name, end in ends.items() if end}
        families: list[tuple[str, str, str, _Numbers]] = [
            ("nodes_connected", "Nodes that are connected.", "", {(): sum(connected.values())}),
            ("node_connected", "1 if the node is connected.", "node", connected),
            ("certificate_end", "When a certificate ends, in seconds since 1970.", "node", seconds),
            ("troubles", _TROUBLES, "node what", self.sites.troubles()),
        ]
        if status is not None:  # an unknown ε is not shown as 0
            description_of_round = "Number of the newest round, from 1; 0 before the first."
            states: _Numbers = {(state,): state is status.state for state in RunState}
            families.append(("round", description_of_round, "", {(): status.round}))
            families.append(("epsilon", "User-level ε spent so far.", "", {(): status.epsilon}))
            families.append(("state", "1 for what the server does.", "state", states))
        for name, description, labels, numbers in families:
            kind = CounterMetricFamily if name == "troubles" else GaugeMetricFamily
            family = kind(f"fedpriv_{name}", description, labels=labels.split())
            for values, number in numbers.items():
                family.add_metric(values, number)
            yield family
