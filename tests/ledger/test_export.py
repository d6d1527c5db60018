"""What an export says is believed as it was written, or the first wrong line is named.

Forgers here hash like `Ledger.export` documents, with code of their own.
"""

import csv
import hashlib
import io
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.fdp import trade_off
from fedpriv.accounting.policies import (
    poisson_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.errors import LedgerError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    Selection,
    SumQueryEvent,
    Trial,
)
from fedpriv.ledger.ledger import MAX_LINE, ExportedLedger, Head, Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord
from tests.commandline import fedpriv, printed, refused

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
EVENTS = (
    poisson_gaussian(0.1, 1.5, population=300),
    RoundEvent(
        poisson_gaussian(0.25, 1.0, population=300).sampling,
        (SumQueryEvent("a", 1.0, 2.0, 2.0**-24), SumQueryEvent("b ε\n\x1b", 0.5, 4.0)),
    ),
    separated_gaussian((1.0, 0.5, 1 / 3), 9, 3, 2, 2.0, RELATION),
    random_allocation_gaussian(7, 1, 2.0),
    poisson_gaussian(0.1, 0.0, population=300),
    RoundEvent(
        poisson_gaussian(0.1, 1.5, population=300).sampling,
        poisson_gaussian(0.1, 1.5, population=300).queries,
        selection=Selection((Trial(0.1, 1.5, 20), Trial(0.3, 1 / 3, 9)), 20.0, 0.5),
    ),
)
LAST = len(EVENTS) + 2
"""Number of the last line, which has the head."""
FUZZED = 6000


def ledger_of(path: Path, events=EVENTS, seeded=Randomness.OPERATING_SYSTEM) -> Path:
    with Ledger.open_or_create(path, "people") as ledger:
        for number, event in enumerate(events):
            ledger.charge(ProposedCharge("r", number, 0, seeded, event, f"{number:064x}"))
    return path


def exported(path: Path) -> list[str]:
    stream = io.StringIO()
    with Ledger.open(path) as ledger:
        ledger.export(stream)
    return stream.getvalue().splitlines(keepends=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return ledger_of(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")


@pytest.fixture(scope="module")
def lines(path):
    return exported(path)


def complaint(lines, number=None):
    with pytest.raises(LedgerError) as error:
        ExportedLedger.read(lines)
    message = str(error.value)
    assert len(message) < 500
    if number is not None:
        assert message.startswith(f"line {number} of the export: ")
    return message


def value_or_complaint(read):
    """What is read, or the sentence of a LedgerError; any other exception fails the test."""
    try:
        return read()
    except LedgerError as error:
        return str(error)


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def relinked(header, rows):
    """Lines of an export with every digest as it must be for what the rows say."""
    texts = [json.dumps(header)]
    for row in rows:
        texts.append(json.dumps({**row, "previous_hash": sha256(texts[-1])}))
    head = {"count": len(rows), "hash": sha256(texts[-1])}
    return [*texts, json.dumps({"head": head})]


def parsed(lines):
    header, *rows, _ = map(json.loads, lines)
    return header, rows


class TestReading:
    def test_gives_what_the_ledger_holds(self, path, lines):
        found = ExportedLedger.read(lines)
        with Ledger.open(path) as ledger:
            assert found.rows == tuple(ledger.charges())
            assert found.head == ledger.head
            assert (found.ledger_id, found.population) == (ledger.ledger_id, "people")
        assert [row.event for row in found.rows] == [*EVENTS]

    def test_of_a_ledger_without_charges(self, tmp_path):
        lines = exported(ledger_of(tmp_path / "empty", ()))
        found = ExportedLedger.read(lines)
        assert (found.rows, found.head) == ((), found.first)
        complaint([lines[0]], 2)
        complaint([lines[0], lines[1].replace('"hash": "', '"hash": "0')], 2)
        complaint([*lines, "{}"], 3)

    def test_line_feeds_are_optional_and_files_are_read_alike(self, lines, tmp_path):
        whole = ExportedLedger.read(lines)
        assert ExportedLedger.read("".join(lines).splitlines()) == whole
        for name, text in (("a", "".join(lines)), ("b", "\r\n".join(map(str.strip, lines)))):
            (tmp_path / name).write_bytes(text.encode())
            assert ExportedLedger.load(tmp_path / name) == whole

    def test_every_head_that_the_ledger_ever_had_is_contained_and_no_other(self, tmp_path):
        heads = []
        with Ledger.open_or_create(tmp_path / "ledger", "people") as ledger:
            heads.append(ledger.head)
            for number, event in enumerate(EVENTS):
                proposed = ProposedCharge("r", number, 0, Randomness.SEEDED, event, "0" * 64)
                ledger.charge(proposed)
                heads.append(ledger.head)
        found = ExportedLedger.read(exported(tmp_path / "ledger"))
        assert all(map(found.contains, heads))
        hashes = [head.hash for head in heads]
        others = [Head(n, h) for n in range(-2, 9) for h in [*hashes, "x"]]
        assert not any(found.contains(head) for head in others if head not in heads)
        found.verify(head=heads[2])
        with pytest.raises(LedgerError, match="never had the head of 2 charges with hash x"):
            found.verify(head=Head(2, "x"))

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.builds(
                lambda q, z, group, s, n, k: RoundEvent(
                    poisson_gaussian(q, z, population=n).sampling,
                    (
                        SumQueryEvent(group, s, z),
                        SumQueryEvent("", s, s, math.ldexp(1.0, math.frexp(s)[1] - k)),
                    ),
                ),
                st.floats(0.0, 1.0, exclude_min=True),
                st.floats(0.0, 1e300),
                st.text(st.characters(codec="utf-8")),
                st.floats(1e-300, 1e300),
                st.integers(1, 2**63 - 1),
                st.integers(1, 60),
            ),
            max_size=4,
        ),
        st.sampled_from(Randomness),
    )
    def test_whatever_is_charged_is_read_as_it_was(self, tmp_path_factory, events, randomness):
        path = ledger_of(tmp_path_factory.mktemp("any") / "ledger", events, randomness)
        found = ExportedLedger.read(exported(path))
        assert [row.event for row in found.rows] == events
        assert {row.randomness for row in found.rows} <= {randomness}


class TestChangedLines:
    @pytest.mark.parametrize("number", range(1, LAST + 1))
    def test_missing(self, lines, number):
        message = complaint(lines[: number - 1], number)
        assert message.endswith(
            "it is not the first line of a ledger: it is not JSON"
            if number == 1
            else f"charge {number - 1} is missing, or the head"
        )

    @pytest.mark.parametrize("number", range(2, LAST))
    def test_left_out(self, lines, number):
        message = complaint(lines[: number - 1] + lines[number:], number)
        if number < LAST - 1:
            assert f": charge {number - 1} is missing: charge {number} (run r, round" in message
        else:
            assert "the head is not" in message

    @pytest.mark.parametrize("number", range(2, LAST))
    def test_swapped(self, lines, number):
        swapped = [*lines]
        swapped[number - 1], swapped[number] = swapped[number], swapped[number - 1]
        complaint(swapped, number)

    @pytest.mark.parametrize("number", range(1, LAST + 1))
    def test_repeated(self, lines, number):
        complaint(lines[:number] + lines[number - 1 :], number + 1)

    def test_followed_by_anything(self, lines):
        for more in ("\n", "{}", lines[-1]):
            assert "there is more after the head" in complaint([*lines, more], LAST + 1)

    @pytest.mark.parametrize("number", range(1, LAST + 1))
    @pytest.mark.parametrize("cut", [1, 0.5, 0.99])
    def test_cut(self, lines, number, cut):
        line = lines[number - 1].strip()
        complaint([*lines[: number - 1], line[: int(len(line) * cut) - 1]], number)

    @pytest.mark.parametrize("number", range(2, LAST))
    def test_any_cell(self, lines, number):
        row = json.loads(lines[number - 1])
        cells = [(row, name) for name in row]
        cells += [(query, name) for query in row["sum_queries"] for name in query]
        for holder, name in cells:
            value = holder[name]
            holder[name] = f"{value}0" if isinstance(value, str) else 0.75
            message = complaint([*lines[: number - 1], json.dumps(row), *lines[number:]])
            assert re.match(f"line ({number}|{number + 1}) of the export: ", message)
            holder[name] = value
        assert ExportedLedger.read([*lines[: number - 1], json.dumps(row), *lines[number:]])

    @pytest.mark.parametrize("name", ["ledger_id", "population", "created_at"])
    def test_the_name_of_the_ledger(self, lines, name):
        header = json.loads(lines[0])
        header[name] = header[name][::-1]
        message = complaint([json.dumps(header), *lines[1:]], 2)
        assert message.endswith(
            "does not follow the text that identifies the ledger: one of them was replaced"
        )

    @pytest.mark.parametrize(("name", "value"), [("hash", "0" * 64), ("count", 2), ("count", 6.0)])
    def test_the_head(self, lines, name, value):
        head = json.loads(lines[-1])
        head["head"][name] = value
        assert "the head is not 6 charges" in complaint([*lines[:-1], json.dumps(head)], LAST)

    @pytest.mark.parametrize(
        "written",
        [
            lambda line: " " + line,
            lambda line: line.replace(": ", ":"),
            lambda line: line.replace('"run": "r"', '"run": "\\u0072"'),
            lambda line: line.replace('"run": "r"', '"run": "x", "run": "r"'),
            lambda line: line.replace("0.1,", "1e-1,"),
            lambda line: line.replace('"schedule": null, ', ""),
            lambda line: json.dumps(dict(reversed(json.loads(line).items()))),
        ],
    )
    def test_the_same_in_other_writing_is_refused(self, lines, written):
        line = lines[1].strip()
        assert written(line) != line
        complaint([lines[0], written(line), *lines[2:]], 2)


HOSTILE_LINES = [
    "", "{", "null", "[]", '""', "1e999", "NaN", "{}" * 2, "\ud800", "é", "\0",
    "[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"format": ' + "9" * 5000 + "}",
    '{"id": [[[[[]]]]]}', "x" * (MAX_LINE + 1),
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE_LINES, ids=lambda line: ascii(line[:8]))
@pytest.mark.parametrize("number", [1, 2, LAST])
def test_hostile_lines_are_named(lines, hostile, number):
    complaint([*lines[: number - 1], hostile, *lines[number:]], number)


def test_a_long_line_of_a_file_is_not_read_whole(lines, tmp_path):
    file = tmp_path / "long"
    file.write_text("".join(lines[:2]) + "[" * (3 * MAX_LINE))
    with pytest.raises(LedgerError, match=f"line 3 of the export: it has more than {MAX_LINE}"):
        ExportedLedger.load(file)


VALUES = [
    None, True, False, 0, 1, -1, 2**63, 2**64, 10**400, 1.0, -1.0, -0.0, 0.5, 5e-324, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "x", "1", "\n", "\ud800", "0" * 64, "A" * 64,
    [], [1.0], {}, [[]], {"a": 1}, "[1.0]", '{"rounds":9}', "[1.0,1e999]", "[" * 5000,
]  # fmt: skip
"""What a forger may put into a cell."""


class TestForgersWhoHash:
    def forged(self, lines, number, name, value, *, in_query):
        header, rows = parsed(lines)
        holder = rows[number]["sum_queries"][0] if in_query else rows[number]
        holder[name] = value
        return relinked(header, rows)

    def test_relinking_alone_changes_nothing(self, lines):
        assert relinked(*parsed(lines)) == [line.strip() for line in lines]

    @pytest.mark.parametrize("number", [0, 1, 2])
    @pytest.mark.parametrize("in_query", [False, True])
    def test_any_value_in_any_cell_is_refused_or_is_just_what_is_read(
        self, lines, number, in_query
    ):
        row = json.loads(lines[number + 1])
        names = [*(row["sum_queries"][0] if in_query else row), "more"]
        for name in names:
            if name == "previous_hash":
                continue
            for value in VALUES:
                text = self.forged(lines, number, name, value, in_query=in_query)
                found = value_or_complaint(lambda text=text: ExportedLedger.read(text))
                if isinstance(found, str):
                    repeated = found.endswith("was charged before")  # of a line after it
                    assert repeated or found.startswith(f"line {number + 2} of the export: ")
                else:
                    assert found.head.hash == json.loads(text[-1])["head"]["hash"]
                    cell = found.rows[number]
                    assert type(cell.round) is type(cell.attempt) is type(cell.position) is int
                    assert cell.run.isprintable()
                    assert 0 <= cell.event.noise_multiplier < float("inf")
                    granularity = cell.event.queries[0].granularity
                    assert granularity is None or granularity > 0.0

    @pytest.mark.parametrize(
        ("name", "value"),
        [("round", True), ("round", 0.0), ("round", -1), ("round", 2**63), ("attempt", None),
         ("run", ""), ("run", "a\nb"), ("run", 7), ("policy", "lucky"), ("randomness", "dice"),
         ("sampling_probability", 1), ("sampling_probability", float("nan")),
         ("sampling_probability", 0.0), ("population", 0), ("population", 300.0),
         ("cohort_commitment", "0" * 63), ("day", "\x1b[2J"), ("day", "20260101"), ("schedule", {}),
         ("strategy", "[1.0]"), ("strategy", [1]), ("more", 1)],
    )  # fmt: skip
    def test_what_no_ledger_charges_is_refused(self, lines, name, value):
        complaint(self.forged(lines, 0, name, value, in_query=False), 2)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("clipping_norm", 1),
         ("clipping_norm", 0.0), ("noise_stddev", float("inf")), ("noise_stddev", -0.0),
         ("noise_stddev", -1.0), ("group", None), ("more", 1),
         ("granularity", 1), ("granularity", True), ("granularity", 0.0), ("granularity", 0.75),
         ("granularity", 2.0), ("granularity", -0.5), ("granularity", float("nan")),
         ("granularity", 5e-324)],
    )  # fmt: skip
    def test_what_no_sum_query_is_is_refused(self, lines, name, value):
        complaint(self.forged(lines, 0, name, value, in_query=True), 2)

    def test_an_attempt_that_is_charged_twice_is_refused(self, lines):
        header, rows = parsed(lines)
        rows[3]["round"] = 1
        message = complaint(relinked(header, rows), 5)
        assert message.endswith("charge 4 (run r, round 1, attempt 0) was charged before")

    def test_a_row_without_sum_queries_is_refused(self, lines):
        header, rows = parsed(lines)
        rows[1]["sum_queries"] = []
        assert "has no sum query" in complaint(relinked(header, rows), 3)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("format", "fedpriv ledger 2"), ("ledger_id", "A" * 32), ("ledger_id", "0" * 33),
         ("population", ""), ("population", "a\nb"), ("created_at", 0), ("more", 1)],
    )  # fmt: skip
    def test_first_lines_that_are_none_are_refused(self, lines, name, value):
        header, _ = parsed(lines)
        complaint([json.dumps({**header, name: value}), *lines[1:]], 1)

    def test_a_chain_made_anew_is_found_by_a_head_kept_elsewhere(self, lines):
        kept = ExportedLedger.read(lines).head
        found = ExportedLedger.read(self.forged(lines, 0, "noise_stddev", 99.0, in_query=True))
        assert found.head.count == kept.count
        assert not found.contains(kept)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """An export with one to three flips, cuts, moves or hostile numbers."""
    for _ in range(rng.randint(1, 3)):
        match rng.randrange(7):
            case 0:
                at = rng.randrange(len(content) or 1)
                flipped = bytes([(content or b" ")[at] ^ 1 << rng.randrange(8)])
                content = content[:at] + flipped + content[at + 1 :]
            case 1:
                one, other = sorted(rng.randrange(len(content) + 1) for _ in range(2))
                content = content[:one] + content[other:]
            case 2:
                rows = content.splitlines(keepends=True)
                rng.shuffle(rows)
                content = b"".join(rows)
            case 3:
                rows = content.splitlines(keepends=True) or [b""]
                rows.insert(rng.randrange(len(rows) + 1), rng.choice(rows))
                content = b"".join(rows)
            case 4:
                numbers = list(re.finditer(rb"[0-9]+(\.[0-9]+)?", content)) or [None]
                place = rng.choice(numbers)
                hostile = [b"NaN", b"1e999", b"-Infinity", b"9" * 5000, b"-1", b"true", b"[[]]"]
                if place is not None:
                    begin, end = place.span()
                    content = content[:begin] + rng.choice(hostile) + content[end:]
            case 5:
                at = rng.randrange(len(content) + 1)
                content = content[:at] + rng.randbytes(rng.randint(1, 9)) + content[at:]
            case 6:
                rows = content.splitlines(keepends=True) or [b""]
                del rows[rng.randrange(len(rows))]
                content = b"".join(rows)
    return content


def test_whatever_is_changed_is_refused_or_changes_no_row(lines, tmp_path):
    valid = "".join(lines).encode()
    rows = ExportedLedger.read(lines).rows
    rng = random.Random(5)
    accepted = refusals = 0
    file = tmp_path / "fuzzed"
    for _ in range(FUZZED):
        file.write_bytes(mutated(valid, rng))
        found = value_or_complaint(lambda: ExportedLedger.load(file))
        if isinstance(found, str):
            assert re.search(r"line \d+ of the export: ", found)
            refusals += 1
        else:
            assert found.rows == rows
            accepted += 1
    assert accepted + refusals == FUZZED
    assert refusals > FUZZED / 2


@given(st.lists(st.text(max_size=80) | st.sampled_from(HOSTILE_LINES[:-1]), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_text_is_refused(texts):
    complaint(texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ledger of two rounds with its participation, and its export."""
    folder = tmp_path_factory.mktemp("both")
    with (
        Ledger.open_or_create(folder / "ledger.sqlite", "people") as ledger,
        ParticipationRecord.open_or_create(folder / "participation.sqlite") as record,
    ):
        for number, event in enumerate(EVENTS[:2]):
            commitment = record.record("r", number, 0, np.array([number, 7]))
            source = Randomness.OPERATING_SYSTEM
            ledger.charge(ProposedCharge("r", number, 0, source, event, commitment))
    printed("ledger", "export", folder / "ledger.sqlite", "--out", folder / "ledger.jsonl")
    return folder


class TestCommandLine:
    def test_an_export_costs_and_shows_the_same(self, folder):
        for command in (
            ("epsilon", "--delta", "1e-5"), ("epsilon", "--epsilon", "1"), ("ledger", "show"),
            ("epsilon", "--json"), ("ledger", "show", "--last", "1"),
        ):  # fmt: skip
            one = printed(*command, folder / "ledger.sqlite")
            other = printed(*command, folder / "ledger.jsonl")
            assert one.replace("ledger.sqlite", "ledger.jsonl") == other
        assert "\x1b" not in printed("ledger", "show", folder / "ledger.jsonl")

    def test_it_is_shown_which_noise_was_exact(self, folder):
        for name in ("ledger.sqlite", "ledger.jsonl"):
            shown = printed("ledger", "show", folder / name)
            assert "noise of update: floating-point noise" in shown
            assert "noise of a: exact, B = 281474976710656, σ/γ = 3.35544e+07" in shown
            assert all(queried in shown for queried in ("update: 1, 1.5", "a: 1, 2", "0.5, 4"))

    def test_an_export_has_a_trade_off_function(self, folder):
        printed("curves", folder / "ledger.jsonl", "--out", folder)
        with (folder / "trade_off.csv").open() as table:
            rows = [
                [float(row["type_one"]), float(row["type_two"])] for row in csv.DictReader(table)
            ]
        ones, twos = np.array(rows).T
        assert twos == pytest.approx(trade_off(EVENTS[:2]).type_two(ones))

    def test_an_export_is_verified(self, folder):
        export = folder / "ledger.jsonl"
        head = ExportedLedger.load(export).head
        text = printed("ledger", "verify", export, "--head", f"{head.count}:{head.hash}")
        assert text == f"{export} is intact: 2 charges; head 2:{head.hash}\n"
        participation = ("--participation", folder / "participation.sqlite")
        assert "each with the cohort" in printed("ledger", "verify", export, *participation)
        assert "never had the head" in refused("ledger", "verify", export, "--head", "2:0")

    def test_an_export_without_its_cohorts_is_refused(self, folder, tmp_path):
        ParticipationRecord.open_or_create(tmp_path / "other").close()
        message = refused(
            "ledger", "verify", folder / "ledger.jsonl", "--participation", tmp_path / "other"
        )
        assert "charge 1 (run r, round 0, attempt 0): no cohort" in message

    def test_a_changed_export_is_refused_by_each_command(self, folder, tmp_path):
        changed = tmp_path / "changed.jsonl"
        changed.write_text((folder / "ledger.jsonl").read_text().replace("0.25", "0.01"))
        for command in ("epsilon", "ledger show", "ledger verify", f"curves --out {tmp_path}"):
            message = refused(*command.split(), changed)
            assert "line 4 of the export: the head is not 2 charges" in message

    def test_a_ledger_and_its_export_are_one(self, folder):
        message = refused("epsilon", folder / "ledger.sqlite", folder / "ledger.jsonl")
        assert "are one ledger" in message

    def test_a_ledger_and_the_export_of_another_add_up(self, folder, tmp_path):
        other = tmp_path / "other.jsonl"
        other.write_text("".join(exported(ledger_of(tmp_path / "other", EVENTS[:1]))))
        assert fedpriv("epsilon", folder / "ledger.sqlite", other).returncode == 0

    def test_files_that_are_neither_are_refused(self, tmp_path):
        (tmp_path / "text").write_text("text")
        (tmp_path / "empty").write_bytes(b"")
        assert "line 1 of the export: it is not the first line of a ledger" in refused(
            "ledger", "show", tmp_path / "text"
        )
        assert "is not a ledger" in refused("ledger", "verify", tmp_path / "empty")
        assert "cannot be opened" in refused("epsilon", tmp_path / "absent")
