"""The benchmark of accountants: what it measures and how it sums up, not how fast anything is."""

import math

import pytest

from simulations.accounting_speed import ACCOUNTANTS, Answer, in_process, summary, table_of
from simulations.references import REFERENCES


def answer(low: float, up: float, seconds: float, mebibytes: float = 10.0) -> Answer:
    return Answer(low=low, up=up, seconds=seconds, mebibytes=mebibytes)


def test_there_are_sixty_settings_that_span_what_is_asked_for() -> None:
    assert len(set(REFERENCES)) == 60
    for name, ends in {"q": (1e-5, 1.0), "z": (0.3, 30.0), "delta": (1e-10, 1e-5)}.items():
        values = [getattr(reference, name) for reference in REFERENCES]
        assert (min(values), max(values)) == ends
    assert {reference.rounds for reference in REFERENCES} >= {1, 1_000_000}


def test_the_summary_by_hand() -> None:
    rows = [
        (REFERENCES[0], answer(0.999, 1.0, 0.01), answer(0.0, 1.5, 0.2)),
        (REFERENCES[1], answer(2.0, 2.0, 0.03), answer(0.0, 1.9, 0.3)),
        (REFERENCES[2], answer(3.0, 3.0, 0.02, 40.0), answer(0.0, math.inf, 60.0, math.inf)),
        (REFERENCES[3], answer(4.0, 4.0, 0.02), answer(0.0, 4.0, 0.01)),
        (REFERENCES[4], answer(4.9, 5.0, 0.02), answer(0.0, 4.95, 0.2)),
    ]
    found = summary(rows)
    assert found["median seconds"] == 0.02
    assert found["largest MiB"] == 40.0
    assert found["settings in which ours is at least as tight"] == 4
    assert found["settings in which dp-accounting is below the truth"] == 1
    assert found["settings in which dp-accounting is as tight"] == 2
    assert found["there, median of its time over ours"] == pytest.approx(5.25)
    assert found["there, least of its time over ours"] == pytest.approx(0.5)
    assert found["there, settings in which it is faster"] == 1
    assert found["settings that dp-accounting did not finish"] == 1
    assert found["largest width over 1e-3·ε + 1e-6"] == pytest.approx(0.1 / 0.005001)
    assert table_of(rows).row_count == 5


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_an_answer_comes_from_a_process_of_its_own(name: str) -> None:
    index = next(i for i, r in enumerate(REFERENCES) if (r.q, r.z, r.rounds) == (0.1, 1.0, 10))
    found = in_process(name, index, 3.5, limit=60.0)
    assert found["low"] <= found["up"] < 10.0
    assert found["seconds"] > 0.0
    assert found["mebibytes"] >= 0.0


def test_an_answer_that_takes_too_long_is_none() -> None:
    found = in_process("dp-accounting", 0, math.inf, limit=0.01)
    assert (found["low"], found["up"], found["seconds"]) == (0.0, math.inf, 0.01)
