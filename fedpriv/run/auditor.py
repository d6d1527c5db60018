"""The audit of a run: canaries among its users, measurements of its releases, and its result.

The folder of the run holds the key of the canaries and the measurements, so that a resumed run has
the same canaries. The key reveals nothing about users. Until the run ends it distinguishes canaries
from users, so only the owner of the file can read it.
"""

import base64
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import TypeAdapter
from pydantic_core import to_json

from fedpriv.audit.canaries import (
    Canaries,
    Measurement,
    Past,
    Positions,
    audited_groups,
    measure,
)
from fedpriv.audit.verdict import AuditResult, GuessCounts, conclude
from fedpriv.errors import DataError
from fedpriv.experiment.build import Experiment
from fedpriv.ledger.events import RoundEvent, SamplingPolicy
from fedpriv.privacy.clipping_torch import integer_sum
from fedpriv.privacy.gaussian_mechanism import INDEPENDENT, GaussianMechanism
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.round import PartialSum, Release
from fedpriv.run.folder import RunFolder
from fedpriv.support.disk import with_room, write_atomically
from fedpriv.training.request import RoundRequest, Transport

LONGER = 10.0  # norm of a canary's update in clipping norms
_NODE = "/canaries"  # no node has this name, since names of nodes have no slash
_FORMAT = "fedpriv audit 1"
_NUMBERS = 2**20  # largest size of canaries' updates in memory at once, unless one is larger
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Auditor:
    """Watches a run from its first release, or its resumption, to its end."""

    folder: RunFolder
    experiment: Experiment
    canaries: Canaries
    counts: GuessCounts  # fixed before the first release
    _past: Past = field(default_factory=Past)
    _drawn: Sequence[int] = ()  # canaries of the present round

    @classmethod
    def of(cls, folder: RunFolder, experiment: Experiment) -> Self | None:
        """Begin or continue the audit of an experiment; return None if it has no audit.

        DataError: the run is under way, and the file of its audit is missing, damaged or from
        another plan.
        """
        if (section := experiment.config.audit) is None:
            return None
        plan, privacy = experiment.plan, experiment.config.privacy
        with _whole(folder.measurements):
            header = next(folder.read_measurements(), None)
        if header is None:
            if any(folder.read_metrics()):
                raise DataError(f"{folder.measurements} is missing; the run is audited by it")
            key = experiment.entropy.key("audit")
            counts = GuessCounts.of(section.canaries, plan.event, privacy.delta, privacy.accountant)
            header = {"format": _FORMAT, "key": key.hex(), "canaries": section.canaries}
            header |= asdict(counts)
            with_room(partial(folder.append_measurement, header))
        with _whole(folder.measurements):
            if (header.get("format"), header.get("canaries")) != (_FORMAT, section.canaries):
                raise DataError(f"{folder.measurements} is not from an audit of this plan")
            counts = TypeAdapter(GuessCounts).validate_python(header)
            key = bytes.fromhex(str(header["key"]))
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
        """Return the transport to the users of the run and to the canaries."""
        event = self.experiment.plan.sampling.event()
        places = event.examples_per_user or 1

        def on_drawn(canaries: Positions) -> None:
            self._drawn = canaries.tolist()

        return CanaryTransport(
            transport, self.canaries, event.population * places, places, on_drawn
        )

    def observe(self, mechanism: GaussianMechanism, number: int, release: Release) -> None:
        """Measure the release of a round, and store the measurement."""
        place = number, release.attempt, release.part
        measured, self._past = measure(self.canaries, mechanism, release.average, place, self._past)
        row: dict[str, object] = asdict(measured)
        row |= {name: _packed(row[name]) for name in ("scores", "probe")}
        public = self.experiment.plan.sampling.event().policy is SamplingPolicy.SEPARATED
        row["drawn"] = self._drawn if public else None
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
        content = to_json(asdict(result), inf_nan_mode="constants")
        with_room(lambda: write_atomically(self.folder.audit, content))
        return result

    def _measured(self) -> Iterator[Measurement]:
        rows: Iterator[dict[str, Any]] = islice(self.folder.read_measurements(), 1, None)
        with _whole(self.folder.measurements):
            for row in rows:
                values = row | {name: _unpacked(row[name]) for name in ("scores", "probe")}
                if row["drawn"] is not None:
                    values["drawn"] = np.isin(np.arange(self.canaries.count), row["drawn"])
                yield Measurement(**values)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raise DataError if a file does not have the form that an audit writes."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        advice = "restore it from a backup, or start another run"
        raise DataError(f"{path} is damaged; {advice}") from error


def _packed(numbers: object) -> str:
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


def _unpacked(text: object) -> FloatVector:
    return np.frombuffer(base64.b64decode(str(text)), "<f4").astype(np.float64)


@dataclass(frozen=True, eq=False)
class CanaryTransport(Transport):
    """Adds canaries to another transport, as users at the server."""

    transport: Transport  # of the users
    canaries: Canaries
    first: int  # position of the first canary's first place
    places: int = 1  # of each canary: k if the examples of users are drawn
    on_drawn: Callable[[Positions], object] = lambda _: None  # called with a round's drawn canaries

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of the users, and then that of the canaries."""
        are_canaries = request.users >= self.first
        drawn = (request.users[are_canaries] - self.first) // self.places
        self.on_drawn(drawn)
        yield from self.transport.collect(replace(request, users=request.users[~are_canaries]))
        yield canary_sum(self.canaries, request, drawn)

    def prepare(self, request: RoundRequest) -> None:
        """Prepare the users' transport; canaries need no preparation."""
        self.transport.prepare(request)

    def release_resources(self) -> None:
        """Release the resources of the users' transport."""
        self.transport.release_resources()


def canary_sum(canaries: Canaries, request: RoundRequest, drawn: Positions) -> PartialSum:
    """Return the sum of the updates of the drawn canaries that are included.

    A canary is a user of full weight who sends only its update, so metrics and counts of users do
    not change.
    """
    clipping, at = request.clipping, (request.round, request.attempt)
    layout, total = clipping.layout, np.zeros(clipping.layout.dimension, np.int64)
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    groups = {g: canaries.directions(g, g.dimension(layout), *at) for g in audited_groups(clipping)}
    senders, at_once = drawn[canaries.included[drawn]], max(1, _NUMBERS // layout.dimension)
    for number in range(0, len(senders), at_once):
        batch = senders[number : number + at_once]
        signs = canaries.signs(*at)[batch, np.newaxis]
        updates = {n: torch.zeros(()).expand(len(batch), *shape) for n, shape in shapes.items()}
        for group, directions in groups.items():
            moves, start = directions.rows(batch), 0
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                size, length = layout.sizes[tensor], LONGER * group.clipping_norm * scale
                move = moves[:, start : start + size] * (signs * length).astype(np.float32)
                updates[tensor] = torch.from_numpy(move).view(len(batch), *shapes[tensor])
                start += size
        weights = np.full(len(batch), clipping.weight_cap)
        total += integer_sum(updates, clipping, weights).numpy()
    if clipping.indicator is not None:
        total[layout.slices[clipping.indicator.tensor]] = 0
    return PartialSum(_NODE, len(senders), total, len(senders) * clipping.weight_cap)
