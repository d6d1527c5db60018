"""`fedpriv ledger export --as dp-accounting`: programs that the real library runs."""

import contextlib
import io
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from fedpriv.accounting import (
    banded_poisson_gaussian,
    epsilon,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.ledger.events import NeighbouringRelation, Randomness, RoundEvent, SumQueryEvent
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from tests.commandline import printed, refused

ADD_OR_REMOVE, REPLACE = NeighbouringRelation
STRATEGY = (1.0, 0.5, 0.375)
SAMPLING = poisson_gaussian(0.3, 1.0, population=287).sampling
TWO_QUERIES = RoundEvent(
    SAMPLING, (SumQueryEvent("update", 0.5, 2.236), SumQueryEvent("metrics", 1.0, 44.5))
)


def ledger_of(path: Path, events: Sequence[RoundEvent]) -> Path:
    with Ledger.open_or_create(path, "people") as ledger:
        for number, event in enumerate(events):
            proposed = ProposedCharge("run", number, 0, Randomness.SEEDED, event, "0" * 64)
            ledger.charge(proposed)
    return path


def recomputed(program: str, delta: float, folder: Path) -> float:
    """The ε that a program prints, in this process, as importing the library takes seconds."""
    path, out = folder / "program.py", io.StringIO()
    path.write_text(program, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [str(path), str(delta)])
        runpy.run_path(str(path), run_name="__main__")
    return float(out.getvalue())


@pytest.mark.parametrize(
    "events",
    [
        [TWO_QUERIES] * 100,
        [poisson_gaussian(0.1, 1.0)] * 20 + [poisson_gaussian(0.2, 2.0)] * 30,
        [every_user_gaussian(9.0, ADD_OR_REMOVE)] * 5,
        [every_user_gaussian(9.0, REPLACE)] * 5,
        [separated_gaussian(STRATEGY, 12, 3, 4, 4.0, ADD_OR_REMOVE)],
        [separated_gaussian(STRATEGY, 12, 3, 4, 4.0, REPLACE)],
        [banded_poisson_gaussian(STRATEGY, 50, 4, 0.2, 1.5, ADD_OR_REMOVE)],
    ],
    ids=["queries", "poisson", "every", "replaced", "separated", "separated-replaced", "banded"],
)
def test_the_library_computes_our_epsilon(tmp_path: Path, events: list[RoundEvent]) -> None:
    path, out = ledger_of(tmp_path / "ledger.sqlite", events), tmp_path / "events.py"
    printed("ledger", "export", path, "--as", "dp-accounting", "--out", out)
    program = out.read_text(encoding="utf-8")
    assert printed("ledger", "export", path, "--as", "dp-accounting") == program
    for delta in (1e-3, 1e-6):
        loss = epsilon(events, delta)
        theirs = recomputed(program, delta, tmp_path)
        assert loss.epsilon_low - 1e-9 <= theirs <= loss.epsilon + 1e-3
    with Ledger.open(path) as ledger:
        assert f"{ledger.head.count}:{ledger.head.hash}" in program


def test_queries_with_samples_of_their_own_would_cost_too_little(tmp_path: Path) -> None:
    path = ledger_of(tmp_path / "ledger.sqlite", [TWO_QUERIES] * 100)
    program = printed("ledger", "export", path, "--as", "dp-accounting")
    apart = PLDAccountant()
    for query in TWO_QUERIES.queries:
        noise = dp_accounting.GaussianDpEvent(query.noise_stddev / query.clipping_norm)
        apart.compose(dp_accounting.PoissonSampledDpEvent(0.3, noise), 100)
    assert apart.get_epsilon(1e-3) < epsilon([TWO_QUERIES] * 100, 1e-3).epsilon_low
    assert recomputed(program, 1e-3, tmp_path) >= epsilon([TWO_QUERIES] * 100, 1e-3).epsilon_low


def test_an_export_gives_the_program_of_its_ledger(tmp_path: Path) -> None:
    path, lines = ledger_of(tmp_path / "ledger.sqlite", [TWO_QUERIES] * 3), tmp_path / "a.jsonl"
    printed("ledger", "export", path, "--out", lines)
    one, other = (printed("ledger", "export", p, "--as", "dp-accounting") for p in (path, lines))
    assert one == other


def test_a_round_without_noise_costs_everything(tmp_path: Path) -> None:
    path = ledger_of(tmp_path / "ledger.sqlite", [poisson_gaussian(0.3, 0.0)])
    program = printed("ledger", "export", path, "--as", "dp-accounting")
    assert recomputed(program, 1e-3, tmp_path) == math.inf


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (fixed_size_gaussian(10, 100, 4.0), "fixed-size sampling with replace-one"),
        (random_allocation_gaussian(10, 2, 4.0), "random-allocation sampling"),
        (poisson_examples_gaussian(0.1, 4, 4.0), "poisson-examples sampling"),
        (poisson_replace_gaussian(0.1, 4.0), "poisson sampling with replace-one"),
    ],
)
def test_other_policies_are_refused_by_name(tmp_path: Path, event: RoundEvent, named: str) -> None:
    path, out = ledger_of(tmp_path / "ledger.sqlite", [event]), tmp_path / "events.py"
    sentence = refused("ledger", "export", path, "--as", "dp-accounting", "--out", out)
    assert f"the dp-accounting accountant has no analysis of {named}" in sentence
    assert not out.exists()


def test_bad_exports_are_refused(tmp_path: Path) -> None:
    empty = ledger_of(tmp_path / "empty.sqlite", [])
    assert "has no charge" in refused("ledger", "export", empty, "--as", "dp-accounting")
    assert "--as" in refused("ledger", "export", empty, "--as", "opacus")
    assert "exists already" in refused("ledger", "export", empty, "--out", empty)
    absent = refused("ledger", "export", tmp_path / "absent", "--as", "dp-accounting")
    assert "absent" in absent
