"""The hash chain of a ledger: reading it, and naming the first place where it is broken.

The chain finds every change that leaves its last digest as it was. Whoever can write to the file
can also recompute all digests after a change, so what makes a ledger believable is a head that is
kept elsewhere, in a checkpoint or a report.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from fedpriv.errors import LedgerError
from fedpriv.ledger.rows import (
    Cells,
    ChargedRow,
    Head,
    digest,
    name_of,
    parse,
    query_columns,
    sampling_columns,
    sampling_digest,
)

Read = Callable[[str, Sequence[object]], list[sqlite3.Row]]
"""Runs one SQL query on a ledger."""

EXPORT_FORMAT = "fedpriv ledger 1"
"""What the first line of an export says it is."""

_ROWS_AT_ONCE = 1000


def ledger_columns(read: Read) -> dict[str, str]:
    """What names the ledger: its id, its population and when it was created."""
    return dict(_only_row(read, "SELECT ledger_id, population, created_at FROM ledger"))


def genesis(read: Read) -> Head:
    """The head of the ledger before its first charge: the digest of what names it."""
    return Head(0, digest(ledger_columns(read)))


def stored_head(read: Read) -> Head:
    """The head that the ledger says it has."""
    row = _only_row(read, "SELECT count, hash FROM head")
    return Head(row["count"], row["hash"])


def walk(read: Read, start: Head, end: Head) -> Iterator[ChargedRow]:
    """The rows after `start` up to `end`, in order, each checked before it is yielded.

    Raises:
        LedgerError: names the first sampling event or sum query event that is missing, changed
            or out of order, or says that the chain does not lead from `start` to `end`.
    """
    last = start
    for sampling, queries in _stored_rows(read, start, end):
        row = checked(last, dict(sampling), [*map(dict, queries)], partial(_is_known, read))
        yield row
        last = row.head
    refuse_other_end(last, end)


def refuse_other_end(last: Head, end: Head) -> None:
    """Raise LedgerError if a chain that leads to `last` does not end as the ledger says."""
    if last.count < end.count:
        raise LedgerError(f"sampling event {last.count + 1} is missing")
    if last != end:
        raise LedgerError(
            f"the head is sampling event {end.count} with hash {end.hash}, but the chain leads to "
            f"sampling event {last.count} with hash {last.hash}"
        )


def contains(read: Read, head: Head) -> bool:
    """Whether the ledger has, or once had, this head."""
    if head.count == 0:
        return head == genesis(read)
    rows = read("SELECT hash FROM sampling_events WHERE id = ?", (head.count,))
    return [row["hash"] for row in rows] == [head.hash]


def exported(read: Read) -> Iterator[str]:
    """The lines of `Ledger.export`, each checked before it is yielded."""
    head = stored_head(read)
    yield header_line(ledger_columns(read), head)
    for row in walk(read, genesis(read), head):
        yield row_line(row)


def header_line(columns: Mapping[str, str], head: Head) -> str:
    """The first line of an export: what names the ledger, and its head."""
    return json.dumps({"format": EXPORT_FORMAT, **columns, "head": asdict(head)})


def row_line(row: ChargedRow) -> str:
    """The line of a sampling event in an export."""
    return json.dumps({**sampling_columns(row), "sum_queries": query_columns(row)})


def refuse_strays(read: Read) -> None:
    """Raise LedgerError if there is a row that no walk along the chain meets."""
    outside = "NOT BETWEEN 1 AND (SELECT count FROM head)"
    for row in read(f"SELECT * FROM sampling_events WHERE id {outside} ORDER BY id LIMIT 1", ()):
        raise LedgerError(f"{_name(row)} was added outside the chain")
    of = f"SELECT * FROM sum_query_events WHERE sampling_event {outside} LIMIT 1"
    for row in read(of, ()):
        raise LedgerError(
            f"sum query event {row['position']} of sampling event {row['sampling_event']} was "
            "added outside the chain"
        )


def _stored_rows(
    read: Read, start: Head, end: Head
) -> Iterator[tuple[sqlite3.Row, list[sqlite3.Row]]]:
    """Sampling events with their sum query events; rows that were read stay, so pages agree."""
    after = start.count
    page = "SELECT * FROM sampling_events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
    while after < end.count and (rows := read(page, (after, end.count, _ROWS_AT_ONCE))):
        queries = defaultdict[int, list[sqlite3.Row]](list)
        for query in read(
            "SELECT * FROM sum_query_events WHERE sampling_event > ? AND sampling_event <= ? "
            "ORDER BY sampling_event, position",
            (after, rows[-1]["id"]),
        ):
            queries[query["sampling_event"]].append(query)
        for row in rows:
            yield row, queries[row["id"]]
        after = rows[-1]["id"]


def checked(
    last: Head, sampling: Cells, queries: Sequence[Cells], is_known: Callable[[object], bool]
) -> ChargedRow:
    """The value of a row that follows `last`.

    Args:
        last: the head before it.
        sampling: its columns.
        queries: columns of its sum query events, in order.
        is_known: whether a digest is that of another sampling event or of the ledger itself.

    Raises:
        LedgerError: says what is wrong with the row.
    """
    name = _name(sampling)
    if sampling["id"] != last.count + 1:
        raise LedgerError(f"sampling event {last.count + 1} is missing")
    follows = sampling["previous_hash"] == last.hash
    if not follows and is_known(sampling["previous_hash"]):
        raise LedgerError(f"{name} is out of order")
    _refuse_changed_queries(name, queries)
    if sampling_digest(sampling, queries) != sampling["hash"]:
        raise LedgerError(f"{name} was changed, or the number of its sum query events was")
    if not follows:
        before = f"sampling event {last.count}" if last.count else "the ledger's own row"
        raise LedgerError(f"{name} does not follow {before}: one of them was replaced")
    try:
        return parse(sampling, queries)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{name} is none that this fedpriv knows: {error}") from error


def _refuse_changed_queries(name: str, queries: Sequence[Cells]) -> None:
    for position, query in enumerate(queries):
        if query["position"] != position:
            raise LedgerError(f"sum query event {position} of {name} is missing")
        if digest(query) != query["hash"]:
            raise LedgerError(f"sum query event {position} of {name} was changed")
    if not queries:
        raise LedgerError(f"sum query event 0 of {name} is missing")


def _is_known(read: Read, digest_: object) -> bool:
    known = read("SELECT 1 FROM sampling_events WHERE hash = ? LIMIT 1", (digest_,))
    return bool(known) or digest_ == genesis(read).hash


def _name(sampling: Cells | sqlite3.Row) -> str:
    return name_of(*(sampling[column] for column in ("id", "run", "round", "attempt")))


def _only_row(read: Read, sql: str) -> sqlite3.Row:
    rows = read(sql, ())
    if len(rows) != 1:
        raise LedgerError(f"the ledger has {len(rows)} rows for {sql!r}; it must have one")
    return rows[0]
