"""A run at the server: every checkpoint is there before the next charge."""

import hashlib
import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.data.population import UserStore
from fedpriv.engine.transport import InProcessTransport
from fedpriv.experiment.build import simulated
from fedpriv.experiment.config import parse_config
from fedpriv.ledger.events import Randomness
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import record_path
from fedpriv.privacy.gaussian_mechanism import GaussianQuery
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.run import run
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Run, conduct
from fedpriv.training.rounds import Stop, checkpoints, load_checkpoint
from tests.studies.studying import BASE


@contextmanager
def opened(folder: Path, every: int = 1) -> Iterator[tuple[PrivacyRecords, Callable[[], Run]]]:
    """The records of a run of five rounds, and what runs it into the folder."""
    output = {"evaluate_every": 5, "checkpoint_every": every}
    config = parse_config(BASE | {"rounds": 5, "output": output}, "test")
    experiment, transport = simulated(config, "run")
    files, state = RunFolder(folder), experiment.initial_state
    record, population = record_path(files.ledger), experiment.plan.population
    with PrivacyRecords.open(files.ledger, record, population, experiment.budget) as records:
        parts = files, experiment, state, transport, records, lambda _result: None
        yield records, partial(conduct, *parts)


def test_without_a_clock_no_round_is_timed(tmp_path: Path) -> None:
    # How long a round took says how many users were drawn.
    with opened(tmp_path) as (_, conducted):
        conducted()
    rows = RunFolder(tmp_path).read_metrics()
    assert [row["simulation_only_seconds"] for row in rows] == [None] * 5


def test_values_train_as_their_engine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.eye(8, dtype=np.float32).repeat(8, 0), np.arange(64) % 8
    people = fedpriv.Population.from_arrays(x, y, np.arange(64), held_out=(x, y))
    mechanism = fedpriv.Mechanism.poisson(q=0.9).calibrate(epsilon=8.0, delta=1e-3, rounds=1)
    arguments = people, fedpriv.Task(nn.Linear(8, 8)), mechanism
    made, init = list[InProcessTransport](), InProcessTransport.__post_init__

    def noted(transport: InProcessTransport) -> None:
        init(transport)
        made.append(transport)

    monkeypatch.setattr(InProcessTransport, "__post_init__", noted)
    engine = fedpriv.Engine("cpu", 7, "bfloat16", 1)
    fedpriv.simulate(*arguments, out=tmp_path / "run", engine=engine, quiet=True)
    more: dict[str, Any] = {"engine": engine, "quiet": True}
    arms: dict[str, dict[str, Any]] = {"a": {}, "b": {"server": fedpriv.FedAvg()}}
    fedpriv.compare(*arguments, arms, seeds=1, out=tmp_path / "study", **more)
    space = {"clipping.norm": [0.1, 0.2]}
    fedpriv.tune(*arguments, on="public", space=space, trials=1, out=tmp_path / "found", **more)
    found = {(t.device.type, t.chunk_memory, t.activations, t.processes) for t in made}
    assert found == {("cpu", 7 * 2**20, "bfloat16", 1)}


def newest(folder: Path) -> int:
    """Rounds in the newest checkpoint, 0 if there is none."""
    found = checkpoints(RunFolder(folder).checkpoints)
    return load_checkpoint(found[-1]).state.round if found else 0


@pytest.mark.parametrize("every", [1, 2])
def test_at_a_charge_every_earlier_round_that_is_to_have_a_checkpoint_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    saved_when_charged = []
    charge = Ledger.charge

    def spy(*given: object) -> object:
        saved_when_charged.append(newest(tmp_path))
        return charge(*given)

    monkeypatch.setattr(Ledger, "charge", spy)
    with opened(tmp_path, every) as (records, conducted):
        assert conducted().stop is Stop.ROUNDS
        head = records.ledger.head
    assert saved_when_charged == [number - number % every for number in range(5)]
    last = load_checkpoint(checkpoints(RunFolder(tmp_path).checkpoints)[-1])
    assert (last.state.round, last.ledger_head) == (5, head)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(run, "save_checkpoint", fails)
    with opened(tmp_path) as (records, conducted):
        with pytest.raises(OSError, match="full"):
            conducted()
        assert records.ledger.head.count == 1


def test_epsilon_is_that_of_the_ledger_where_no_round_is_left_of_the_budget(tmp_path: Path) -> None:
    with opened(tmp_path) as (records, conducted):
        loud = poisson_gaussian(1.0, 0.1, population=300)
        given = ("other", 1, 0, Randomness.SEEDED, loud, "0" * 64)
        records.ledger.charge(ProposedCharge(*given))
        found = conducted()
        assert (found.stop, found.rounds) == (Stop.BUDGET, ())
        assert found.epsilon == records.ledger.epsilon(records.budget) > records.budget.epsilon


HELD: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "nothing": lambda x, y: (x[:0], y[:0]),
    "very much": lambda x, y: (x.repeat(100, 0), y.repeat(100)),
    "NaN": lambda x, y: (x * np.float32(np.nan), y),
    "huge numbers": lambda x, y: (np.full_like(x, 3e38), y),
    "labels that are none": lambda x, y: (x, y - 9),
}


def written(folder: Path, held: str | None) -> dict[str, bytes]:
    """All that a run of noise alone writes but secrets, where one user holds this."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3, 4)).astype(np.float32), rng.integers(0, 3, (30, 3))
    own = HELD[held](x[0], y[0]) if held else (x[0], y[0])
    columns = [np.concatenate([one, *all_[1:]]) for one, all_ in zip(own, (x, y), strict=True)]
    offsets = np.cumsum([0, len(own[0]), *[3] * 29])
    users = UserStore(dict(zip("xy", columns, strict=True)), offsets)
    people = fedpriv.Population("people: 30", users, {"x": x[0], "y": y[0]})
    mechanism = fedpriv.Mechanism.poisson(
        q=0.5,
        clipping=fedpriv.PerLayer(0.1),
        adaptive=fedpriv.AdaptiveClipping(),
        metrics={"loss": {"bound": 3.0}, "label-counts": {"classes": 3, "bound": 5.0}},
    ).with_noise(1.0, epsilon=100.0, delta=1e-2)
    torch.manual_seed(0)
    fedpriv.simulate(
        people,
        fedpriv.Task(nn.Linear(4, 3)),
        mechanism,
        federated_evaluation=fedpriv.FederatedEvaluation(5.0, every=2),
        rounds=6,
        seed=1,
        out=folder,
        quiet=True,
    )
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    del found["ledger.participation.sqlite"]
    found.pop("simulation_only.json", None)  # names a user whose data are broken
    timed = rb'"simulation_only_seconds":[^,]*'
    found["metrics.jsonl"] = re.sub(timed, b"", found["metrics.jsonl"])
    return found


def test_all_that_a_run_writes_follows_from_what_it_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noised = GaussianQuery.noised_average

    def noise_alone(
        query: GaussianQuery, total: np.ndarray, source: object, name: str, *_: object
    ) -> object:
        return noised(query, np.zeros_like(total), source, name)

    monkeypatch.setattr(GaussianQuery, "noised_average", noise_alone)
    runs = {}
    for held in (None, *HELD):
        drawn = itertools.count()

        def token(size: int, drawn: Iterator[int] = drawn) -> bytes:  # of ledgers and salts
            return hashlib.shake_256(str(next(drawn)).encode()).digest(size)

        monkeypatch.setattr(secrets, "token_bytes", token)
        monkeypatch.setattr(secrets, "token_hex", lambda size, token=token: token(size).hex())
        runs[held] = written(tmp_path / str(held), held)
    plain = runs.pop(None)
    assert {"ledger.sqlite", "metrics.jsonl", "model.safetensors", "plan.toml"} <= plain.keys()
    for held, found in runs.items():
        assert found == plain, held
