"""The audit of a run: canaries beside its users, measurements of its releases, and its result.

The folder of the run holds the key of the canaries and the measurements, so that a resumed run has
the same canaries. The key reveals nothing about users. Before the end of the run it would tell
canaries from users, so only the owner of the file can read it.
"""

import base64
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from fedpriv.audit.canaries import Canaries, Measurement, Past, Positions, measure
from fedpriv.audit.canary_transport import CanaryTransport
from fedpriv.audit.verdict import AuditResult, GuessCounts, conclude
from fedpriv.errors import DataError
from fedpriv.experiment.build import Experiment
from fedpriv.ledger.events import RoundEvent, SamplingPolicy
from fedpriv.privacy.gaussian_mechanism import INDEPENDENT, GaussianMechanism
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.round import Release
from fedpriv.run.folder import RunFolder
from fedpriv.support.disk import with_room, write_atomically
from fedpriv.training.request import Transport

_FORMAT = "fedpriv audit 1"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Auditor:
    """Watches a run from its first release, or its resumption, to its end."""

    folder: RunFolder
    experiment: Experiment
    canaries: Canaries
    counts: GuessCounts  # fixed before the first release
    _past: Past = field(default_factory=Past)
    _drawn: tuple[int, ...] = ()  # canaries of the present round, where cohorts are public

    @classmethod
    def of(cls, folder: RunFolder, experiment: Experiment) -> Self | None:
        """Begin or continue the audit of an experiment; return None if it has no audit.

        DataError: the run is under way, and the file of its audit is missing, damaged or of another
        plan.
        """
        if (section := experiment.config.audit) is None:
            return None
        plan, privacy = experiment.plan, experiment.config.privacy
        with _whole(folder.measurements):
            first = next(folder.read_measurements(), None)
        if first is None:
            if any(folder.read_metrics()):
                raise DataError(f"{folder.measurements} is missing; the run is audited by it")
            key = experiment.entropy.key("audit")
            counts = GuessCounts.of(section.canaries, plan.event, privacy.delta, privacy.accountant)
            first = {"format": _FORMAT, "key": key.hex(), "canaries": section.canaries}
            first |= asdict(counts)
            with_room(partial(folder.append_measurement, first))
        with _whole(folder.measurements):
            if (first.get("format"), first.get("canaries")) != (_FORMAT, section.canaries):
                raise DataError(f"{folder.measurements} is not of an audit of this plan")
            kept = {field.name: first[field.name] for field in fields(GuessCounts)}
            counts = TypeAdapter(GuessCounts).validate_python(kept)
            key = bytes.fromhex(str(first["key"]))
        if counts.most < counts.epsilon:
            _log.warning(
                "%d canaries can show ε ≥ %.2f at most, if all guesses are right, so they cannot "
                "refute ε ≤ %.2f; more are needed",
                section.canaries,
                counts.most,
                counts.epsilon,
            )
        steady = plan.strategy != INDEPENDENT
        auditor = cls(folder, experiment, Canaries(section.canaries, key, steady), counts)
        for _ in auditor._measured():  # a damaged file is refused now, not at the end of the run
            pass
        return auditor

    def beside(self, transport: Transport) -> Transport:
        """Return the transport to the users of the run, with the canaries beside them."""
        event = self.experiment.plan.sampling.event()
        places = event.examples_per_user or 1

        def on_drawn(canaries: Positions) -> None:
            self._drawn = tuple(canaries.tolist()) if self._in_turns else ()

        return CanaryTransport(
            transport, self.canaries, event.population * places, places, on_drawn
        )

    @property
    def _in_turns(self) -> bool:
        policy = self.experiment.plan.sampling.event().policy
        return policy is SamplingPolicy.SEPARATED

    def observe(self, mechanism: GaussianMechanism, number: int, release: Release) -> None:
        """Measure the release of a round, and keep the measurement."""
        at = number, release.attempt, release.part
        measured, self._past = measure(self.canaries, mechanism, release.average, at, self._past)
        row: dict[str, object] = asdict(measured)
        row |= {name: _packed(row[name]) for name in ("scores", "probe")}
        row["drawn"] = list(self._drawn) if self._in_turns else None
        with_room(partial(self.folder.append_measurement, row))

    def conclude(self, charged: Iterable[RoundEvent]) -> AuditResult:
        """Return the result for all measurements and charges, and write it into the folder."""
        plan, privacy = self.experiment.plan, self.experiment.config.privacy
        result = conclude(
            self.canaries,
            self.counts,
            plan.event,
            list(self._measured()),
            charged,
            privacy.delta,
            privacy.accountant,
        )
        written = to_json(asdict(result), inf_nan_mode="constants")
        with_room(lambda: write_atomically(self.folder.audit, written))
        return result

    def _measured(self) -> Iterator[Measurement]:
        rows: Iterator[dict[str, Any]] = islice(self.folder.read_measurements(), 1, None)
        with _whole(self.folder.measurements):
            for row in rows:
                found = row | {name: _unpacked(row[name]) for name in ("scores", "probe")}
                if row["drawn"] is not None:
                    found["drawn"] = np.isin(np.arange(self.canaries.count), row["drawn"])
                yield Measurement(**found)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raise DataError if a file does not have the form in which an audit writes it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        ways = "restore it from a backup, or start another run"
        raise DataError(f"{path} is damaged; {ways}") from error


def _packed(numbers: object) -> str:
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


def _unpacked(text: object) -> FloatVector:
    return np.frombuffer(base64.b64decode(str(text)), "<f4").astype(np.float64)
