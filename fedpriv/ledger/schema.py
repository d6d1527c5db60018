"""What is in the SQLite file of a ledger, and what it refuses.

SQLite itself holds a ledger to its rules, whoever writes to it: rows are only ever added, one
sampling event after the other, each with the hash of the one before. `ledger_chain` finds out
about writers that removed these rules first.
"""

from fedpriv.ledger.database import FileFormat


def _frozen(table: str, *verbs: str) -> str:
    """SQL of triggers that refuse `verbs` on `table`."""
    return "".join(
        f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'a ledger only grows: no {verb} of {table}'); END;\n"
        for verb in verbs
    )


# The insert triggers also stop INSERT OR REPLACE, which deletes without firing delete triggers.
_LEDGER_SCHEMA = f"""
CREATE TABLE ledger (
    singleton INTEGER PRIMARY KEY CHECK (singleton = 1),
    ledger_id TEXT NOT NULL,
    population TEXT NOT NULL,
    created_at TEXT NOT NULL
);
CREATE TABLE head (
    singleton INTEGER PRIMARY KEY CHECK (singleton = 1),
    count INTEGER NOT NULL,
    hash TEXT NOT NULL
);
CREATE TABLE sampling_events (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    policy TEXT NOT NULL,
    sampling_probability REAL NOT NULL,
    population INTEGER NOT NULL,
    relation TEXT NOT NULL,
    schedule TEXT,
    strategy TEXT,
    randomness TEXT NOT NULL,
    cohort_commitment TEXT NOT NULL,
    charged_at TEXT NOT NULL,
    previous_hash TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (run, round, attempt)
);
CREATE TABLE sum_query_events (
    sampling_event INTEGER NOT NULL REFERENCES sampling_events (id),
    position INTEGER NOT NULL,
    group_name TEXT NOT NULL,
    clipping_norm REAL NOT NULL,
    noise_stddev REAL NOT NULL,
    granularity REAL,
    hash TEXT NOT NULL,
    PRIMARY KEY (sampling_event, position)
) WITHOUT ROWID;
{_frozen("ledger", "UPDATE", "DELETE")}
{_frozen("head", "DELETE")}
{_frozen("sampling_events", "UPDATE", "DELETE")}
{_frozen("sum_query_events", "UPDATE", "DELETE")}
CREATE TRIGGER ledger_once BEFORE INSERT ON ledger WHEN EXISTS (SELECT 1 FROM ledger)
BEGIN SELECT RAISE(ABORT, 'a ledger is named once'); END;
CREATE TRIGGER head_once BEFORE INSERT ON head WHEN EXISTS (SELECT 1 FROM head)
BEGIN SELECT RAISE(ABORT, 'a ledger has one head'); END;
CREATE TRIGGER sampling_events_follow_the_head BEFORE INSERT ON sampling_events
WHEN NEW.id IS NOT (SELECT count + 1 FROM head)
    OR NEW.previous_hash IS NOT (SELECT hash FROM head)
    OR EXISTS (
        SELECT 1 FROM sampling_events
        WHERE run = NEW.run AND round = NEW.round AND attempt = NEW.attempt
    )
BEGIN SELECT RAISE(ABORT, 'a sampling event must follow the head and be new'); END;
CREATE TRIGGER sum_query_events_precede_the_head BEFORE INSERT ON sum_query_events
WHEN NEW.sampling_event IS NOT (SELECT count + 1 FROM head)
    OR NOT EXISTS (SELECT 1 FROM sampling_events WHERE id = NEW.sampling_event)
BEGIN SELECT RAISE(ABORT, 'a sum query event must belong to the sampling event charged'); END;
CREATE TRIGGER head_moves_by_one BEFORE UPDATE ON head
WHEN NEW.count IS NOT OLD.count + 1
    OR NEW.hash IS NOT (SELECT hash FROM sampling_events WHERE id = NEW.count)
    OR NOT EXISTS (SELECT 1 FROM sum_query_events WHERE sampling_event = NEW.count)
BEGIN SELECT RAISE(ABORT, 'the head must move to the next sampling event'); END;
"""

LEDGER = FileFormat("ledger", 0x66707276, _LEDGER_SCHEMA, 0o666)
