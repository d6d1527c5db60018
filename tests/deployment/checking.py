"""What must hold after every fault, whatever it was."""

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from fedpriv.ledger.ledger import ChargedRow, Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.training.rounds import checkpoints, load_checkpoint
from simulations.loopback import Program
from tests.deployment.digests import digest_of
from tests.deployment.sites import Site, ask_to_stop, ended


@dataclass(frozen=True)
class Standing:
    """What a run has come to."""

    attempts: dict[int, int]  # how many attempts of each round are charged, by its number
    released: int  # releases in the metrics
    next_round: int  # of the last checkpoint; 0 if there is none

    @property
    def charged(self) -> int:
        return sum(self.attempts.values())


def check(site: Site) -> Standing:
    """The ledger covers every release, and every model that is there was released.

    * The ledger is whole, and its cohorts are those that are recorded; attempts at one round have
      different cohorts.
    * Each release, in the metrics or not, has a charge of its own.
    * Nobody trained for a charged round who is not in its cohort.
    * Each process began, and each round, with the initial model or one that was released; the
      checkpoints and the model hold such ones too, and the ledger the charges they had seen.
    """
    folder = site.run
    if not folder.ledger.exists():
        assert site.released == 0
        assert checkpoints(folder.checkpoints) == []
        return Standing({}, 0, 0)
    with (
        Ledger.open(folder.ledger) as ledger,
        ParticipationRecord.open(record_path(folder.ledger)) as participation,
    ):
        ledger.verify(participation)
        charges = {row.hash: row for row in ledger.charges()}
        _check_cohorts(site, charges, participation)
        known = _released_models(site, charges)
        next_round = _check_checkpoints(site, ledger, known)
    rows = [(row["charge"], row["round"], row["attempt"]) for row in folder.read_metrics()]
    assert len(set(rows)) == len(rows)
    for charge, number, attempt in rows:
        assert (charges[str(charge)].round, charges[str(charge)].attempt) == (number, attempt)
        assert known[str(charge)]
    attempts: dict[int, int] = {}
    for charged in charges.values():
        attempts[charged.round] = attempts.get(charged.round, 0) + 1
    assert sorted(attempts) == list(range(1, len(attempts) + 1))
    assert next_round <= len(attempts)
    return Standing(attempts, len(rows), next_round)


def stop_and_check(site: Site, server: Program) -> None:
    """Stop a server that was never killed; it released what it charged, but for the last round."""
    ask_to_stop(server)
    ended(server)
    found = check(site)
    assert found.next_round == found.released
    assert found.charged - found.released in (0, 1)


def _check_cohorts(
    site: Site, charges: dict[str, ChargedRow], participation: ParticipationRecord
) -> None:
    cohorts = {
        (row.round, row.attempt): participation.users_of(row.cohort_commitment)
        for row in charges.values()
    }
    for one, other in combinations(cohorts, 2):
        # By chance two are the same once in 2^300.
        assert one[0] != other[0] or not np.array_equal(cohorts[one], cohorts[other])
    for file in (site.folder / "traps").glob("*/trained.jsonl"):
        for entry in _entries(file):
            attempt = (entry["round"], entry["attempt"])
            assert attempt not in cohorts or set(entry["users"]) <= set(cohorts[attempt].tolist())


def _released_models(site: Site, charges: dict[str, ChargedRow]) -> dict[str, str]:
    """Digest of the model by charge, that of the first start by ""."""
    file = site.folder / "traps" / "server" / "states.jsonl"
    if not file.exists():  # killed while it began
        assert not charges
        return {}
    first, *entries = _entries(file)
    known = {"": first["after"]}
    for entry in entries:
        if entry["charge"] is None:
            assert entry["after"] in known.values()
        else:
            assert entry["charge"] in charges
            assert entry["charge"] not in known
            assert entry["before"] in known.values()
            known[entry["charge"]] = entry["after"]
    return known


def _check_checkpoints(site: Site, ledger: Ledger, known: dict[str, str]) -> int:
    """The next round; every checkpoint that is there holds what was released."""
    saved = [load_checkpoint(path) for path in checkpoints(site.run.checkpoints)]
    for checkpoint in saved:
        assert digest_of(checkpoint.state.round, checkpoint.state.model) in known.values()
        assert ledger.contains_head(checkpoint.ledger_head)
    if site.run.model.exists():
        model = load_file(site.run.model)
        assert saved
        rounds = range(saved[-1].state.round + 1)
        assert {digest_of(number, model) for number in rounds} & set(known.values())
    return saved[-1].state.round if saved else 0


def _entries(file: Path) -> list[dict]:
    """Lines of a file; one that a kill cut short is left out."""
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
