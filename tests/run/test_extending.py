"""One of everything that docs/extending.md lists, added from outside the package and run."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.accounting.fdp import trade_off
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import load_config
from fedpriv.experiment.grouping import Allocation, ClippingPolicy, Grouping
from fedpriv.experiment.mechanism import CohortPolicy
from fedpriv.ledger.events import SamplingEvent, Unit
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, VectorGroup, flat
from fedpriv.privacy.round import add_up
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.run import RunSetup
from fedpriv.training.optimizers import (
    Average,
    OptimizerState,
    Parameters,
    Rate,
    RateSchedule,
    ServerOptimizer,
)
from fedpriv.training.request import LocalStep, LocalTraining, RoundRequest
from tests.commandline import printed, refused


@dataclass(frozen=True)
class SignSGD(LocalTraining):
    """Local training: a step along the sign of the gradient."""

    shrinking: float = 1.0

    def direction(self, step: LocalStep) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return step.gradient.sign() * self.shrinking, ()


@dataclass(frozen=True)
class HalfOfThem(CohortPolicy):
    """A sampling policy with its event: every user by a fair coin."""

    def of(self, users: int | None, unit: Unit) -> PoissonSampling:
        return PoissonSampling(users or 1, 0.5, unit)


@dataclass(frozen=True)
class BiasesApart(ClippingPolicy):
    """A clipping: biases to a tenth of the norm of the others."""

    norm: float

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        biases = tuple(name for name in layout.names if name.endswith("bias"))
        rest = tuple(name for name in layout.names if name not in biases)
        groups = (
            VectorGroup("weights", rest, self.norm, (1.0,) * len(rest)),
            VectorGroup("biases", biases, self.norm / 10.0, (1.0,) * len(biases)),
        )
        return Grouping.of(groups, layout, allocation)


@dataclass(frozen=True)
class Alternating(RateSchedule):
    """A schedule of the server's learning rate: every other round by half."""

    start: float

    def at(self, number: int) -> float:
        return self.start if number % 2 else self.start / 2.0


@dataclass(frozen=True)
class Damped(ServerOptimizer):
    """A server optimiser: steps that shrink with every round."""

    learning_rate: Rate = 1.0

    def init(self, parameters: Parameters) -> OptimizerState:
        del parameters
        return OptimizerState({"rounds": np.zeros(())}, {})

    def update(
        self, average: Average, state: OptimizerState, parameters: Parameters
    ) -> tuple[Parameters, OptimizerState]:
        rounds = state.first["rounds"] + 1.0
        assert isinstance(self.learning_rate, float)  # that of the round
        rate = self.learning_rate / float(rounds)
        after = {n: (p + rate * average[n]).astype(np.float32) for n, p in parameters.items()}
        return after, OptimizerState({"rounds": rounds}, {})


def half_right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric: whether the class is among the best two scores."""
    return (outputs.topk(2, 1).indices == targets[:, None]).any(1).double()


def population(users: int = 60) -> fedpriv.Population:
    """A data set."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, users * 4)
    x = (np.eye(3)[y] + rng.normal(0.0, 0.3, (users * 4, 3))).astype(np.float32)
    ids = np.repeat(np.arange(users), 4)
    return fedpriv.Population.from_arrays(x, y, ids, held_out=(x[:30], y[:30]))


def model(width: int = 8) -> nn.Module:
    """A model; with the same initial parameters each time, so that a study knows its runs again."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3))


LOCAL = SignSGD(0.05, steps=2)


def task() -> fedpriv.Task:
    return fedpriv.Task(model(), loss=nn.CrossEntropyLoss(reduction="none"), metrics=METRICS)


METRICS: Mapping[str, object] = {"top-2": half_right}


def mechanism(**changes: object) -> fedpriv.Mechanism:
    whole = fedpriv.Mechanism(
        HalfOfThem(), BiasesApart(0.5), metrics={"top-2": {"radius": 0.5, "centre": 0.5}}
    )
    whole = replace(whole, **changes)
    return whole.calibrate(epsilon=8.0, delta=1e-3, rounds=3)


def test_one_of_each_is_added_from_outside_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fedpriv.simulate(
        population(),
        task(),
        mechanism(),
        local=LOCAL,
        server=Damped(Alternating(0.5)),
        out=tmp_path / "run",
        quiet=True,
    )
    assert [each.round for each in run.rounds] == [1, 2, 3]
    assert list(run.rounds[0].clipping_norms) == ["weights", "biases"]
    assert set(run.rounds[0].metrics) == {"top-2", "contributors"}
    assert run.epsilon <= 8.0
    assert run.delta == 1e-3
    assert run.ledger == tmp_path / "run" / "ledger.sqlite"
    with Ledger.open(run.ledger) as ledger:
        events = [row.event for row in ledger.charges()]
    sampling: set[SamplingEvent] = {event.sampling for event in events}
    assert run.trade_off() == trade_off(events)
    assert {each.sampling_probability for each in sampling} == {0.5}
    assert run.report().read_text().startswith("<!DOCTYPE html>")
    assert len(run.to_pandas()) == 3
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'fedpriv\[pandas\]'"):
        run.to_pandas()
    monkeypatch.undo()
    before = task().parameters()
    assert all(tensor.shape == before[n].shape for n, tensor in run.model.named_parameters())


NAMED = f"""
name = "named"
rounds = 2
model = "{__name__}:model"

[data]
name = "{__name__}:population"

[local]
algorithm = "{__name__}:SignSGD"
learning_rate = 0.05
steps = 2
options = {{ shrinking = 0.5 }}

[sampling]
policy = "{__name__}:HalfOfThem"

[clipping]
strategy = "{__name__}:BiasesApart"
norm = 0.5

[server]
optimizer = "{__name__}:Damped"
options = {{ learning_rate = {{ schedule = "{__name__}:Alternating", start = 0.5 }} }}

[privacy]
epsilon = 8.0
delta = 1e-3
"""


def test_one_of_each_is_named_in_a_file_and_run(tmp_path: Path) -> None:
    file, folder = tmp_path / "named.toml", tmp_path / "run"
    file.write_text(NAMED)
    printed("simulate", file, "--out", folder)
    config = load_config(folder / "plan.toml")
    assert config.local.build() == SignSGD(0.05, steps=2, shrinking=0.5)
    assert config.mechanism().sampling == HalfOfThem()
    assert config.mechanism().clipping == BiasesApart(0.5)
    assert config.server.build() == Damped(Alternating(0.5))
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        assert {row.event.sampling.sampling_probability for row in ledger.charges()} == {0.5}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("clipping.strategy=json:loads", "'json:loads' is not a class"),
        ("server.optimizer=json:JSONDecoder", "is another class; it must be derived from"),
        ("local.algorithm=sgd", "local.algorithm 'sgd' has no option 'shrinking'"),
        ("privacy.sampling_probability=0.3", "sampling_probability is 0.3"),
        (
            "sampling.policy=uniform",
            "known names: every-user, fixed-size, poisson, poisson-examples, poisson-within-bands",
        ),
    ],
)
def test_what_is_named_and_does_not_fit_is_one_sentence(
    tmp_path: Path, assignment: str, message: str
) -> None:
    file = tmp_path / "named.toml"
    file.write_text(NAMED)
    said = refused("simulate", file, "--set", assignment, "--out", tmp_path / "run")
    assert re.search(message, said)
    assert "TypeError" not in said


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LocalTraining]]:
    """The class of the guide, from its very text, as the module `mine`."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.split("## A local algorithm")[1]
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    kind: type[LocalTraining] = import_module("mine").Lion
    yield kind
    del sys.modules["mine"]


def test_the_local_algorithm_of_the_guide_is_a_plain_loop_over_users(
    documented: type[LocalTraining],
) -> None:
    people, whole = population(5), task()
    local = documented(0.01, steps=4, weight_decay=0.5, beta2=0.9)
    layout = Layout.of(whole.parameters())
    clipping = Clipping(layout, flat(layout, 2.0))
    everyone = np.arange(5)
    request = RoundRequest("run", 1, 0, whole.parameters(), clipping, local, everyone, bytes(32))
    transport = InProcessTransport(whole, people.users, torch.device("cpu"), 10**6, processes=1)
    found = layout.unflatten(
        clipping.in_units(add_up(transport.collect(request), clipping, 5).total)
    )
    expected = {name: np.zeros(p.shape) for name, p in whole.parameters().items()}
    for user in range(5):
        net, data = model(), people.users.examples_of(user)
        kept = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for _ in range(4):
            net.zero_grad()
            x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
            nn.functional.cross_entropy(net(x), y).backward()
            for name, p in net.named_parameters():
                way = (0.9 * kept[name] + 0.1 * p.grad).sign() + 0.5 * p.detach()
                kept[name] = 0.9 * kept[name] + 0.1 * p.grad
                p.data -= 0.01 * way
        for name, p in net.named_parameters():
            expected[name] += p.detach().numpy() - whole.parameters()[name]
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5)
        assert np.abs(tensor).max() > 0.01


def test_the_local_algorithm_of_the_guide_runs_from_a_file_and_nodes_refuse_it(
    documented: type[LocalTraining], tmp_path: Path
) -> None:
    file, folder = tmp_path / "named.toml", tmp_path / "run"
    text = NAMED.replace(f"{__name__}:SignSGD", "mine:Lion").replace(
        "shrinking = 0.5", "beta2 = 0.98"
    )
    file.write_text(text)
    printed("simulate", file, "--out", folder)
    begun = load_config(folder / "plan.toml").training()
    assert repr(begun) == repr(documented(0.05, steps=2, beta2=0.98))
    setup = RunSetup.at(load_config(file, []), tmp_path / "other", resume=False)
    with pytest.raises(InvalidValueError, match="'mine:Lion'; on nodes"):
        setup.refuse_true_figures("on nodes")


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def interrupt(result: fedpriv.RoundResult) -> None:
        if result.round == 2:
            raise KeyboardInterrupt

    given = (population(), task(), mechanism())
    more = {"local": LOCAL, "server": Damped(), "out": tmp_path / "run", "quiet": True}
    with pytest.raises(KeyboardInterrupt):
        fedpriv.simulate(*given, **more, trackers=[interrupt])
    run = fedpriv.simulate(*given, **more, resume=True)
    assert [(each.round, each.attempt) for each in run.rounds] == [(1, 0), (2, 0), (3, 0)]
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.head.count == 3
    other = {**more, "server": fedpriv.FedAvg()}
    with pytest.raises(InvalidValueError, match="plan it began with"):
        fedpriv.simulate(*given, **other, resume=True)


def test_arms_are_compared_at_equal_privacy_and_finished_runs_stand(tmp_path: Path) -> None:
    arms = {"damped": {}, "adam": {"server": fedpriv.FedAdam(0.1)}}
    more = {"local": LOCAL, "server": Damped(), "out": tmp_path / "study", "quiet": True}
    study = fedpriv.compare(population(), task(), mechanism(), arms, seeds=2, **more)
    assert [(arm.arm, arm.seeds) for arm in study.arms] == [("damped", (0, 1)), ("adam", (0, 1))]
    assert "damped" in study.verdict
    written = sorted((tmp_path / "study").rglob("result.json"))
    times = [path.stat().st_mtime_ns for path in written]
    again = fedpriv.compare(population(), task(), mechanism(), arms, seeds=2, resume=True, **more)
    assert [path.stat().st_mtime_ns for path in written] == times
    assert again.arms == study.arms
    assert len(again.to_pandas()) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0))}, "no noise_multiplier"),
        ({"resume": True}, "in Python out="),
        ({"rounds": 0}, "rounds is 0"),
        ({"name": "a b"}, "name is 'a b'"),
    ],
)
def test_bad_arguments_are_one_sentence(changes: dict[str, object], message: str) -> None:
    given = {"mechanism": mechanism(), "local": LOCAL} | changes
    with pytest.raises(InvalidValueError, match=message):
        fedpriv.simulate(population(), task(), given.pop("mechanism"), **given)


def test_arms_of_other_budgets_or_arguments_are_refused(tmp_path: Path) -> None:
    other = mechanism().calibrate(epsilon=4.0, delta=1e-3, rounds=3)
    given = (population(), task(), mechanism())
    more = {"local": LOCAL, "out": tmp_path / "study"}
    with pytest.raises(InvalidValueError, match="the study's target is that of every arm"):
        fedpriv.compare(*given, {"a": {}, "b": {"mechanism": other}}, **more)
    endless = mechanism().with_noise(2.0, epsilon=8.0, delta=1e-3)
    with pytest.raises(InvalidValueError, match="arm 'b': rounds is absent"):
        fedpriv.compare(*given, {"a": {}, "b": {"mechanism": endless}}, **more)
    with pytest.raises(InvalidValueError, match="arm 'b' sets 'servr'"):
        fedpriv.compare(*given, {"a": {}, "b": {"servr": Damped()}}, **more)
    replaced = replace(mechanism(), sampling=fedpriv.FixedSize(3))
    replaced = replaced.calibrate(epsilon=8.0, delta=1e-3, rounds=3, users=60)
    with pytest.raises(InvalidValueError, match="arms 'a' and 'b' are for add-or-remove-one and"):
        fedpriv.compare(*given, {"a": {}, "b": {"mechanism": replaced}}, **more)
    with pytest.raises(InvalidValueError, match="seeds are none"):
        fedpriv.compare(*given, {"a": {}}, seeds=0, **more)
    with pytest.raises(InvalidValueError, match="arms are none"):
        fedpriv.compare(*given, {}, **more)
    assert not (tmp_path / "study").exists()
