"""What the server says of itself: to who connects, in an offer, and to who asks."""

import io
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.engine.task import Task
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import Config
from fedpriv.ledger.events import Randomness
from fedpriv.ledger.ledger import ExportedLedger, Ledger, ProposedCharge
from fedpriv.ledger.participation import Head, ParticipationRecord, record_path
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.run.folder import RunFolder
from fedpriv.server import deployment
from fedpriv.server.deployment import prices, status_at_start, welcomes
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.service import Service
from fedpriv.training.plan import AdaptiveClipping, TrainingPlan
from fedpriv.training.rounds import Checkpoint, RoundResult, Stop, initial_state, save_checkpoint
from fedpriv.wire import WELCOME, RunState
from tests.opening import open_round
from tests.server import test_refused_starts as refused_starts
from tests.training.federation import PARAMETERS, make_plan, open_records

ENROLMENT = Enrolment("5f" * 16, {"silo": ["b", "d"], "one": ["a"], "two": ["c"]})
CONFIG = Config.model_validate(
    {
        "name": "n",
        "rounds": 1,
        "data": {"name": "digits"},
        "model": {"name": "softmax", "options": {"features": 3, "classes": 2}, "seed": 5},
        "local": {"learning_rate": 0.1, "steps": 1},
        "privacy": {"sampling_probability": 0.5, "delta": 1e-3, "epsilon": 1.0},
        "clipping": {"norm": 1.0},
        "metrics": {"report": {"math:sqrt": {}, "accuracy": {}}},
    }
)


def test_a_node_is_told_its_positions_the_population_and_the_task() -> None:
    welcome_of = welcomes(CONFIG, ENROLMENT)
    told = {node: WELCOME.decode(WELCOME.encode(welcome_of(node))) for node in ENROLMENT.nodes}
    assert {node: welcome.users.tolist() for node, welcome in told.items()} == {
        "one": [0],
        "silo": [1, 3],
        "two": [2],
    }
    for welcome in told.values():
        assert (welcome.population_name, welcome.population) == ("5f" * 16, 4)
        task = welcome.task
        assert (task.model, task.seed, task.loss) == ("softmax", 5, "cross-entropy")
        assert dict(task.options) == {"features": 3, "classes": 2}
        assert task.metrics == ("math:sqrt",)


def charge(plan: TrainingPlan, records: PrivacyRecords, round_number: int) -> None:
    users, event = np.array([1], np.int64), plan.mechanism.event
    commitment = records.participation.record(plan.run, round_number, 0, users)
    randomness = OperatingSystemEntropy().randomness
    proposed = ProposedCharge(plan.run, round_number, 0, randomness, event, commitment)
    records.ledger.charge(proposed, records.budget)


def test_a_price_is_that_of_the_round_and_of_all_before_it(tmp_path: Path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as records:
        price_of = prices(plan, records, Randomness.OPERATING_SYSTEM)
        request = open_round(plan, initial_state(plan, PARAMETERS), 0, OperatingSystemEntropy())
        for spent in range(3):
            price = price_of(request)
            assert (price.event.sampling.sampling_probability, price.event.sampling.population) == (
                0.5,
                20,
            )
            assert 1.0 <= price.event.noise_multiplier < 1.0 + 1e-9  # what is charged rounds up
            assert (price.epsilon_after, price.delta) == (spent + 1.0, 1e-5)
            charge(plan, records, spent)


def test_with_adaptive_clipping_the_price_is_what_the_round_will_charge(tmp_path: Path) -> None:
    plan = make_plan(adaptive=AdaptiveClipping())
    with open_records(tmp_path) as records:
        request = open_round(plan, initial_state(plan, PARAMETERS), 0, OperatingSystemEntropy())
        price = prices(plan, records, Randomness.OPERATING_SYSTEM)(request)
    assert price.event.noise_multiplier == plan.mechanism.event.noise_multiplier


@pytest.mark.parametrize("entropy", [OperatingSystemEntropy(), SeededEntropy(1)])
def test_nodes_are_told_whether_the_noise_comes_of_a_seed(tmp_path: Path, entropy: Entropy) -> None:
    plan = make_plan()
    with open_records(tmp_path) as records:
        request = open_round(plan, initial_state(plan, PARAMETERS), 0, entropy)
        price = prices(plan, records, entropy.randomness)(request)
    assert price.seeded is isinstance(entropy, SeededEntropy)


def test_the_status_at_the_start_says_what_may_be_spent(tmp_path: Path) -> None:
    with open_records(tmp_path, limit=7.0) as records:
        status = status_at_start(make_plan(), records.budget, ENROLMENT)
    assert (status.run, status.round, status.rounds) == ("run", 0, 5)
    assert (status.epsilon, status.epsilon_limit, status.delta) == (0.0, 7.0, 1e-5)
    assert (status.nodes_enrolled, status.nodes_connected, status.users_enrolled) == (3, 0, 4)
    assert status.state is RunState.WAITING


def test_a_server_that_listens_knows_what_was_spent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "enrolment.toml").write_text(refused_starts.ENROLMENT)
    (tmp_path / "experiment.toml").write_text(refused_starts.EXPERIMENT.format(folder=tmp_path))
    population = Enrolment.load(tmp_path / "enrolment.toml").population_id
    path, folder = tmp_path / "ledger.sqlite", tmp_path / "run"
    proposed = ProposedCharge(
        "before", 1, 0, Randomness.SEEDED, poisson_gaussian(0.5, 4.0, population=4), "00" * 32
    )
    with Ledger.open_or_create(path, population) as ledger:
        ledger.charge(proposed)
        spent = epsilon(ledger.spent(), 1e-3).epsilon
    ParticipationRecord.open_or_create(record_path(path)).close()
    statuses = []

    def listening(service: Service, *_: object) -> NoReturn:
        statuses.append(service.status)
        raise InvalidValueError("no")

    monkeypatch.setattr(deployment, "listening", listening)
    settings = ["federation.address=127.0.0.1:0", f"privacy.ledger={path}", "seed=1"]
    with pytest.raises(InvalidValueError, match="no"):
        deployment.serve(
            tmp_path / "experiment.toml", settings, folder, resume=False, insecure=True, leave=True
        )
    (status,) = statuses
    assert status.epsilon == spent > 0.0
    assert "seed is 1: anyone who knows it can compute cohorts and noise" in caplog.messages


def exported(path: Path) -> bytes:
    with Ledger.open(path) as ledger:
        lines = io.StringIO()
        ledger.export(lines)
        return lines.getvalue().encode()


def text_since(ledger: Ledger, head: Head | None) -> str:
    size, texts = ledger.since(head)
    text = "".join(texts)
    assert size == len(text)
    return text


def test_what_nodes_are_sent_is_the_export_from_the_head_that_they_know_on(tmp_path: Path) -> None:
    plan, path = make_plan(), tmp_path / "ledger.sqlite"
    with open_records(tmp_path) as records, Ledger.open(path) as ledger:
        heads = [ledger.head]
        for number in range(3):
            charge(plan, records, number)
            heads.append(ledger.head)
            lines = exported(path).decode().splitlines(keepends=True)
            assert text_since(ledger, None) == "".join(lines)
            for known, head in enumerate(heads):
                assert text_since(ledger, head) == "".join(lines[known + 1 :])


def test_a_head_that_the_ledger_never_had_is_answered_with_nothing(tmp_path: Path) -> None:
    with open_records(tmp_path) as records:
        charge(make_plan(), records, 0)
        ledger = records.ledger
        for head in (Head(0, "0" * 64), Head(1, "0" * 64), Head(2, ledger.head.hash), Head(1, "")):
            assert ledger.since(head) is None


def test_long_ledgers_are_read_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.ledger.ledger._ROWS_AT_ONCE", 2)
    with open_records(tmp_path) as records:
        for number in range(5):
            charge(make_plan(), records, number)
        found = records.ledger.since(None)
        charge(make_plan(), records, 5)  # while it is sent
        texts = list(found[1])
        assert len(texts) == 4
        whole = ExportedLedger.read("".join(texts).splitlines())
        assert (len(whole.rows), found[0]) == (5, len("".join(texts)))
        more = text_since(records.ledger, whole.head)
        grown = ExportedLedger.read(more.splitlines(), whole)
        assert grown == ExportedLedger.read(text_since(records.ledger, None).splitlines())


def test_a_ledger_may_be_sent_in_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with open_records(tmp_path) as records:
        charge(make_plan(), records, 0)
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: text_since(records.ledger, None), range(50)))
    assert found == {exported(path).decode()}


def test_the_newest_model_says_what_the_run_has_cost_since(tmp_path: Path) -> None:
    folder, plan = RunFolder(tmp_path), make_plan()
    state = replace(initial_state(plan, PARAMETERS), round=1)
    save_checkpoint(folder.checkpoints, Checkpoint(state, plan.digest, Head(1, "5f")))
    model = torch.nn.ParameterDict({n: torch.zeros(p.shape) for n, p in PARAMETERS.items()})
    newest = deployment.newest_model(folder, Task(model))
    for spent in (1.0, 2.0):  # at its release, and once more when later rounds led nowhere
        result = RoundResult("run", 9, 1, 0, "5f", spent, 1e-5, 8.0, {"update": 1.0})
        folder.append_metrics(asdict(result))
        (tmp_path / "model").write_bytes(newest() or b"")
        with safe_open(tmp_path / "model", "numpy") as model:
            assert json.loads(model.metadata()["release"])["epsilon"] == spent


def test_in_the_end_the_status_says_what_the_whole_run_has_cost() -> None:
    status = dict[str, object]()
    service: Any = SimpleNamespace(
        publish=status.update,
        connections=SimpleNamespace(end_all=lambda _: None),
        authentication=SimpleNamespace(idle_seconds=lambda: math.inf),
    )
    listener: Any = SimpleNamespace(service=service, call=lambda function: function())
    ended: Any = SimpleNamespace(stop=Stop.BUDGET, epsilon=2.0)
    assert deployment._published(lambda _: ended, listener, 4, 9) is ended
    assert status == {"round": 4, "epsilon": 2.0, "state": RunState.FINISHED}
