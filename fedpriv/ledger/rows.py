"""What a ledger is told, what it keeps, and how the two are written down and hashed.

A digest is SHA-256 over JSON with sorted keys, no spaces and numbers as Python's repr, which is
exact for doubles; columns that are NULL are left out. The digest of a sampling event covers every
column of its row, its place in the ledger, the digests of its sum query events and the digest of
the sampling event before it.

A schedule and a strategy are text: the same kind of JSON. Where an event has no schedule, fresh
noise in every round, or no granularity, there is NULL.
"""

import hashlib
import json
import operator
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.database import Row
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)
from fedpriv.ledger.participation import ParticipationRecord

# A tampered cell can hold anything that SQLite can, so bytes and inf have a digest too.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode

_FRESH_NOISE = (1.0,)

Cells = Mapping[str, Any]
"""A row by column name as SQLite or JSON returns it: until `parse`, a cell may hold anything."""


@dataclass(frozen=True)
class ProposedCharge:
    """What a ledger is asked to charge before anything is released.

    Attributes:
        run: name of the run; printable and not empty.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        randomness: where cohort and noise come from.
        event: the one round to charge; its count is 1.
        cohort_commitment: SHA-256, 64 hexadecimal digits, from `ParticipationRecord.record`.

    Raises:
        InvalidValueError: a field is out of range.
    """

    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str

    def __post_init__(self) -> None:
        if not (self.run and self.run.isprintable()):
            raise InvalidValueError(f"run is {self.run!r}; it must be printable and not empty")
        if self.round < 0 or self.attempt < 0:
            raise InvalidValueError(
                f"round {self.round}, attempt {self.attempt}: both must be at least 0"
            )
        if self.event.count != 1:
            raise InvalidValueError(
                f"the event has count {self.event.count}; each round is charged by itself"
            )
        if not re.fullmatch("[0-9a-f]{64}", self.cohort_commitment):
            raise InvalidValueError(
                f"cohort_commitment is {self.cohort_commitment!r}; it must be 64 lower-case "
                "hexadecimal digits"
            )


@dataclass(frozen=True)
class Charge:
    """Receipt for one charge, good for one release.

    Copies share the one release: `copy`, `replace` and threads cannot double it, and it cannot
    be pickled.

    Attributes:
        run: name of the run.
        round: number of the round.
        attempt: number of the attempt.
        event: what was charged and may be released.
        hash: digest of the charge in the ledger.
    """

    run: str
    round: int
    attempt: int
    event: RoundEvent
    hash: str
    _used: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def redeem(self) -> RoundEvent:
        """The event to release, once.

        Raises:
            LedgerError: the receipt was redeemed before.
        """
        if not self._used.acquire(blocking=False):
            raise LedgerError(
                f"the charge of run {self.run}, round {self.round}, attempt {self.attempt} was "
                "redeemed before: two releases on one charge could be averaged, which removes "
                "noise that the ledger counts on"
            )
        return self.event


@dataclass(frozen=True)
class Head:
    """A point in the chain of a ledger: how many charges it had, and the digest of the last."""

    count: int
    hash: str


@dataclass(frozen=True)
class ChargedRow:
    """One sampling event of a ledger, with its sum queries.

    Attributes:
        position: place in the ledger, from 1.
        charged_at: when, in UTC, ISO 8601.
        previous_hash: digest of the sampling event before, or of the ledger itself.
        hash: digest of this sampling event.

    The other attributes are those of `ProposedCharge`.
    """

    position: int
    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str
    charged_at: str
    previous_hash: str
    hash: str

    @property
    def head(self) -> Head:
        """The point of the chain that this sampling event makes."""
        return Head(self.position, self.hash)

    def __str__(self) -> str:
        return name_of(self.position, self.run, self.round, self.attempt)


def name_of(position: object, run: object, round_: object, attempt: object) -> str:
    """How messages call a sampling event."""
    return f"sampling event {position} (run {run}, round {round_}, attempt {attempt})"


def confirm(row: ChargedRow, participation: ParticipationRecord) -> None:
    """Check that the cohort of a charge is recorded and can have been drawn in its round.

    Raises:
        LedgerError: names the sampling event whose cohort is missing, changed, of another attempt,
            or not of the population.
    """
    try:
        cohort = participation.cohort_of(row.cohort_commitment)
    except LedgerError as error:
        raise LedgerError(f"{row}: {error}") from error
    if (cohort.run, cohort.round, cohort.attempt) != (row.run, row.round, row.attempt):
        raise LedgerError(
            f"{row}: its cohort is that of run {cohort.run}, round {cohort.round}, "
            f"attempt {cohort.attempt}"
        )
    population = row.event.sampling.population
    if cohort.users.size and cohort.users[-1] >= population:
        raise LedgerError(
            f"{row}: its cohort has user {cohort.users[-1]} of a population of {population}"
        )


def first_rows(population: str) -> dict[str, dict[str, object]]:
    """The rows of a new ledger, by table: what names it, and its head before any charge.

    Raises:
        InvalidValueError: the population's name is empty or not printable.
    """
    if not (population and population.isprintable()):
        raise InvalidValueError(
            f"the population is named {population!r}; a name must be printable and not empty"
        )
    named = {"ledger_id": secrets.token_hex(16), "population": population, "created_at": _now()}
    return {"ledger": {**named}, "head": {"count": 0, "hash": digest(named)}}


def follow(last: Head, charge: ProposedCharge) -> ChargedRow:
    """The row by which `charge` extends, now, a ledger whose head is `last`."""
    row = ChargedRow(
        position=last.count + 1,
        run=charge.run,
        round=operator.index(charge.round),
        attempt=operator.index(charge.attempt),
        randomness=charge.randomness,
        event=charge.event,
        cohort_commitment=charge.cohort_commitment,
        charged_at=_now(),
        previous_hash=last.hash,
        hash="",
    )
    return replace(row, hash=sampling_digest(sampling_columns(row), query_columns(row)))


def sampling_columns(row: ChargedRow) -> dict[str, object]:
    """Columns of the row's sampling event, but for those that are NULL."""
    sampling, strategy = row.event.sampling, row.event.strategy
    columns = {
        "id": row.position,
        "run": row.run,
        "round": row.round,
        "attempt": row.attempt,
        "policy": str(sampling.policy),
        "sampling_probability": float(sampling.sampling_probability),
        "population": operator.index(sampling.population),
        "relation": str(sampling.relation),
        "schedule": sampling.schedule and _canonical(asdict(sampling.schedule)),
        "strategy": None if strategy == _FRESH_NOISE else _canonical([*map(float, strategy)]),
        "randomness": str(row.randomness),
        "cohort_commitment": row.cohort_commitment,
        "charged_at": row.charged_at,
        "previous_hash": row.previous_hash,
        "hash": row.hash,
    }
    return {name: value for name, value in columns.items() if value is not None}


def query_columns(row: ChargedRow) -> list[dict[str, object]]:
    """Columns of each of the row's sum query events, in order."""
    return [_query_columns(row.position, *item) for item in enumerate(row.event.queries)]


def _query_columns(sampling_event: int, position: int, query: SumQueryEvent) -> dict[str, object]:
    columns: dict[str, object] = {
        "sampling_event": sampling_event,
        "position": position,
        "group_name": query.group,
        "clipping_norm": float(query.clipping_norm),
        "noise_stddev": float(query.noise_stddev) + 0.0,  # SQLite keeps -0.0 as 0.0
    }
    if query.granularity is not None:
        columns["granularity"] = float(query.granularity)
    return {**columns, "hash": digest(columns)}


def parse(sampling: Cells, queries: Sequence[Cells]) -> ChargedRow:
    """The value of a row and its sum query events.

    Raises:
        ValueError: a policy, relation or source of randomness is unknown, a number is out of
            its range, or a schedule or strategy is not written as `sampling_columns` does.
        TypeError: a number is not one, or a schedule has other fields.
    """
    event = RoundEvent(
        SamplingEvent(
            SamplingPolicy(sampling["policy"]),
            sampling["sampling_probability"],
            sampling["population"],
            NeighbouringRelation(sampling["relation"]),
            _schedule(sampling.get("schedule")),
        ),
        tuple(
            SumQueryEvent(
                q["group_name"], q["clipping_norm"], q["noise_stddev"], q.get("granularity")
            )
            for q in queries
        ),
        strategy=_strategy(sampling.get("strategy")),
    )
    return ChargedRow(
        position=sampling["id"],
        run=sampling["run"],
        round=sampling["round"],
        attempt=sampling["attempt"],
        randomness=Randomness(sampling["randomness"]),
        event=event,
        cohort_commitment=sampling["cohort_commitment"],
        charged_at=sampling["charged_at"],
        previous_hash=sampling["previous_hash"],
        hash=sampling["hash"],
    )


def _schedule(cell: object) -> Schedule | None:
    if cell is None:
        return None
    written = _value(cell)
    if isinstance(written, dict):
        return Schedule(**written)
    raise ValueError(f"{cell!r} is no schedule")


def _strategy(cell: object) -> tuple[float, ...]:
    if cell is None:
        return _FRESH_NOISE
    written = _value(cell)
    if isinstance(written, list) and written != [*_FRESH_NOISE]:
        coefficients = tuple(c for c in written if isinstance(c, float))
        if len(coefficients) == len(written):
            return coefficients
    raise ValueError(f"{cell!r} is no strategy")


def _value(cell: object) -> object:
    """The value of a cell of JSON, or None if it is not written as it would be here."""
    try:
        value: object = json.loads(cell) if isinstance(cell, str) else None
        return value if _canonical(value) == cell else None
    except (ValueError, RecursionError):
        return None


def digest(columns: Row) -> str:
    """SHA-256 in hexadecimal of all columns but `hash` and those that are NULL."""
    hashed = {
        name: value for name, value in columns.items() if name != "hash" and value is not None
    }
    return hashlib.sha256(_canonical(hashed).encode()).hexdigest()


def sampling_digest(columns: Row, queries: Iterable[Row]) -> str:
    """Digest of a sampling event, which covers its sum query events."""
    return digest({**columns, "sum_queries": [query["hash"] for query in queries]})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
