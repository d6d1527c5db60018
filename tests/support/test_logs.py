"""Logs: one line a record whatever is in it, and nothing of what an exception says."""

import json
import logging
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedpriv.support.logs import (
    JsonFormatter,
    LineLimit,
    LogFormat,
    TextFormatter,
    expiry,
    one_line,
    trouble,
)

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO   |WARNING|ERROR  ) (.*)")
START = datetime(2030, 1, 1, tzinfo=UTC)
HOSTILE = "a\n2030-01-01T00:00:00Z ERROR   forged\r\x1b[2K\u2028\u202e\x00\ud800"


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("fedpriv.some")
    return logger.makeRecord(
        logger.name, logging.WARNING, "some.py", 1, message, arguments, None, extra=extra
    )


def failed(text: str) -> logging.LogRecord:
    def train() -> None:
        raise ValueError(text)

    made = record("training failed")
    try:
        train()
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_of_each_level_no_more_lines_are_written_in_a_minute_than_may_be() -> None:
    limit = LineLimit(3)

    def passed(level: int, *seconds: float) -> list[str]:
        found = []
        for at in seconds:
            made = record("%s at 100%%", at)
            made.levelno, made.created = level, at
            if limit.filter(made):
                found.append(made.getMessage())
        return found

    many = range(50)
    assert passed(logging.INFO, *many) == [f"{at} at 100%" for at in range(3)]
    assert passed(logging.ERROR, *many[:3]) == [f"{at} at 100%" for at in range(3)]
    left_out = "(47 lines before this one were too many in a minute, and are left out)"
    assert passed(logging.INFO, 60.0, 61.0) == [f"60.0 at 100% {left_out}", "61.0 at 100%"]
    assert passed(logging.INFO, 10.0) == ["10.0 at 100%"]  # the clock was set back


def test_the_last_lines_of_a_process_are_written() -> None:
    limit, written = LineLimit(3), []
    handler = logging.Handler()
    handler.emit = lambda made: written.append(made.getMessage())
    handler.addFilter(limit)
    for number in range(50):
        handler.handle(record("round %d", number))
    handler.handle(record("the run is over"))
    assert written == ["round 0", "round 1", "round 2"]
    limit.write_last(handler)
    lost = "(38 lines before this one were too many in a minute, and are left out)"
    assert written[3:] == [
        f"round 41 {lost}",
        *(f"round {n}" for n in range(42, 50)),
        "the run is over",
    ]


def test_no_line_is_written_twice() -> None:
    limit, written = LineLimit(3), []
    handler = logging.Handler()
    handler.emit = lambda made: written.append(made.getMessage())
    handler.addFilter(limit)
    for at in (0.0, 1.0, 2.0, 3.0, 60.0):
        made = record("at %g", at)
        made.created = at
        handler.handle(made)
    limit.write_last(handler)
    lost = "(1 lines before this one were too many in a minute, and are left out)"
    assert written == ["at 0", "at 1", "at 2", f"at 60 {lost}"]


def test_a_process_that_ends_says_why() -> None:
    program = (
        "import logging; from fedpriv.support.logs import LogFormat, configure\n"
        "configure(LogFormat.TEXT, 5)\n"
        "for number in range(99): logging.info('round %d', number)\n"
        "logging.info('the run is over')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    lines = ended.stderr.splitlines()
    assert len(lines) == 15
    assert lines[-1].endswith("the run is over")
    assert "(85 lines before this one" in lines[5]


@given(st.text())
@example(HOSTILE)
def test_any_message_is_one_printable_line_of_text(message: str) -> None:
    for made in (record("%s", message), record(message)):
        line = TextFormatter().format(made)
        assert line.isprintable()
        assert line.splitlines() == [line]
        assert LINE.fullmatch(line)


@given(st.text(), st.text(), st.dictionaries(st.from_regex(r"x[a-z]*", fullmatch=True), st.text()))
@example(HOSTILE, HOSTILE, {"x": HOSTILE})
def test_any_message_is_one_object_that_says_the_same(
    message: str, name: str, extra: dict[str, str]
) -> None:
    line = JsonFormatter().format(record("%s by %s", message, name, **extra))
    assert line.isascii()
    assert line.isprintable()
    said = json.loads(line)
    assert said == {
        "time": said["time"],
        "level": "WARNING",
        "logger": "fedpriv.some",
        "message": f"{message} by {name}",
        **extra,
    }


def test_the_time_is_utc() -> None:
    made = record("m")
    made.created = datetime(2030, 1, 2, 3, 4, 5, 678900, UTC).timestamp()
    assert TextFormatter().format(made) == "2030-01-02T03:04:05Z WARNING m"
    said = json.loads(JsonFormatter().format(made))["time"]
    assert said.startswith("2030-01-02T03:04:05.67")
    assert datetime.fromisoformat(said).utcoffset().total_seconds() == 0


def test_printable_text_stays_as_it_is() -> None:
    assert one_line("hôpital a: ε ≤ 2 \\ 日本") == "hôpital a: ε ≤ 2 \\ 日本"
    assert one_line("a\tb\x7f") == "a\\tb\\x7f"


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_of_an_exception_only_type_and_place_are_said(form: logging.Formatter) -> None:
    line = form.format(failed("glucose 7.1 of alice"))
    assert "alice" not in line
    assert re.search(
        r"training failed \(ValueError at test_logs\.py:\d+ > test_logs\.py:\d+\)", line
    )
    assert line.splitlines() == [line]


def test_extra_fields_are_plain_values_and_take_nobodys_place() -> None:
    extra = {"round": 3, "epsilon": float("inf"), "share": 0.5, "late": True, "none": None}
    others = {"sizes": [1, 2], "level": "forged", "logger": "forged", "time": "forged"}
    said = json.loads(JsonFormatter().format(record("m", **extra, **others)))
    assert said.pop("time") != "forged"
    assert said == {
        "level": "WARNING",
        "logger": "fedpriv.some",
        "message": "m",
        "round": 3,
        "epsilon": "inf",
        "share": 0.5,
        "late": True,
        "none": None,
        "sizes": "[1, 2]",
    }


@pytest.mark.parametrize("form", LogFormat)
def test_configured_everything_goes_to_stderr_line_by_line(form: LogFormat) -> None:
    code = f"""
import logging, warnings
from fedpriv.support.logs import LogFormat
from fedpriv.support.logs import configure

logging.basicConfig()
configure(LogFormat.TEXT)
configure(LogFormat({form.value!r}))
log = logging.getLogger("fedpriv.some")
log.debug("not said")
log.info("node %s", "a\\nb", extra={{"round": 3}})
warnings.warn("old\\nway")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    if form is LogFormat.TEXT:
        assert LINE.fullmatch(first).groups() == ("INFO   ", "node a\\nb")
        assert "UserWarning: old\\nway" in LINE.fullmatch(second)[2]
    else:
        assert json.loads(first)["message"] == "node a\nb"
        assert json.loads(first)["round"] == 3
        assert "UserWarning: old\nway" in json.loads(second)["message"]


@pytest.mark.parametrize(("before", "after"), [({}, "NONE"), ({"GRPC_VERBOSITY": "INFO"}, "INFO")])
def test_grpc_says_nothing_of_its_own_unless_it_is_asked_to(
    before: dict[str, str], after: str
) -> None:
    check = (
        "import os; from fedpriv.support.logs import LogFormat, configure;"
        "configure(LogFormat.TEXT); print(os.environ['GRPC_VERBOSITY'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"} | before
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == after


# Without the surrogate, which pytest could not report.
@pytest.mark.parametrize("why", ["too dear", HOSTILE[:-1]], ids=["plain", "hostile"])
def test_trouble_at_a_node_is_a_sentence_and_three_fields(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    trouble(logging.getLogger("fedpriv.some"), "hospital-a", "declined", why)
    (made,) = caplog.records
    said = json.loads(JsonFormatter().format(made))
    assert said["level"] == "WARNING"
    assert (said["node"], said["what"], said["why"]) == ("hospital-a", "declined", why)
    assert said["message"] == f"hospital-a: declined: {why}"
    line = TextFormatter().format(made)
    assert line.endswith(f"WARNING hospital-a: declined: {one_line(why)}")


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (timedelta(days=30, seconds=1), None),
        (timedelta(days=30), "ends at 2030-01-31 00:00 UTC, in 30 days; issue another"),
        (timedelta(hours=1), "in 0 days"),
        (timedelta(0), "expired at"),
        (-timedelta(days=400), "expired at"),
    ],
)
def test_a_certificate_is_worth_a_word_from_30_days_before_its_end(
    left: timedelta, words: str | None
) -> None:
    said = expiry(START + left, START)
    assert (said is None) if words is None else (said is not None and words in said)


def test_a_certificate_that_is_not_valid_yet_is_worth_a_word() -> None:
    begin, end = START + timedelta(minutes=1), START + timedelta(days=400)
    assert (
        expiry(end, START, begin) == "it is valid only from 2030-01-01 00:01 UTC; check the clock"
    )
    assert expiry(end, begin, begin) is None
