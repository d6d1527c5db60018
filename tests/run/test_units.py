"""Units of privacy other than the user, through whole runs.

The reference is algorithm 1 of Abadi et al. 2016, one example at a time in double precision.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedpriv
from fedpriv.accounting import ACCOUNTANTS
from fedpriv.data import from_arrays
from fedpriv.data.population import cut_up
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError, LedgerError, UnsupportedEventError
from fedpriv.experiment.config import load_config
from fedpriv.experiment.grouping import ClippingPolicy, scales_by_dimension
from fedpriv.ledger.events import RoundEvent, Unit
from fedpriv.ledger.ledger import ExportedLedger, Ledger
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Run, RunSetup
from fedpriv.training.local import GRADIENT
from simulations.datasets.mnist import load_mnist_writers
from tests.commandline import printed, refused
from tests.engine.everyone import request_under, total_of

SIMULATIONS = Path(__file__).parents[2] / "simulations"

NORM, RATE, ROUNDS = 1.0, 0.7, 3
Vectors = dict[str, np.ndarray]
Clip = Callable[[Vectors], Vectors]


def population(sizes: Sequence[int] = (3, 1, 4, 2, 5), scale: float = 1.0) -> fedpriv.Population:
    rng, rows = np.random.default_rng(0), sum(sizes)
    y = rng.integers(0, 3, rows)
    x = scale * (np.eye(3)[y] + rng.normal(0.0, 0.5, (rows, 3))).astype(np.float32)
    ids = np.repeat(np.arange(len(sizes)), sizes)
    return fedpriv.Population.from_arrays(x.astype(np.float32), y, ids, held_out=(x[:5], y[:5]))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def task() -> fedpriv.Task:
    return fedpriv.Task(model())


def noiseless(unit: str, q: float = 1.0, **changes: Any) -> fedpriv.Mechanism:
    """A mechanism without noise, so that what it does can be compared."""
    microbatch = 2 if unit == "microbatch" else None
    given = {"clipping": fedpriv.Flat(NORM), "unit": unit, "microbatch": microbatch, **changes}
    mechanism = fedpriv.Mechanism.poisson(q, **given)
    return replace(mechanism, noise_multiplier=0.0, delta=1e-3, unsafe_no_privacy=True)


def private(unit: str, **changes: Any) -> fedpriv.Mechanism:
    microbatch = 2 if unit == "microbatch" else None
    mechanism = fedpriv.Mechanism.poisson(
        0.5, fedpriv.Flat(NORM), unit=unit, microbatch=microbatch, **changes
    )
    return mechanism.calibrate(epsilon=4.0, delta=1e-3, rounds=ROUNDS)


def run(people: fedpriv.Population, mechanism: fedpriv.Mechanism, out: Path, **more: Any) -> Run:
    given = {"server": fedpriv.FedAvg(RATE), "rounds": ROUNDS, "quiet": True, **more}
    return fedpriv.simulate(people, task(), mechanism, out=out, **given)


def pieces(people: fedpriv.Population, rows: int | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets of every record, cut by hand."""
    found = []
    for user in range(people.users.population):
        own = people.users.examples_of(user)
        step = rows or len(own["y"])
        cuts = [slice(start, start + step) for start in range(0, len(own["y"]), step)]
        found += [(own["x"][cut], own["y"][cut]) for cut in cuts]
    return found


def evaluated(
    parameters: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray
) -> tuple[float, Vectors]:
    """Mean loss of a record and its gradient, in double precision."""
    exact = model().double()
    exact.load_state_dict({n: torch.tensor(p, dtype=torch.float64) for n, p in parameters.items()})
    outputs = exact(torch.tensor(x, dtype=torch.float64))
    loss = nn.functional.cross_entropy(outputs, torch.tensor(y))
    loss.backward()
    found = {n: p.grad.numpy() for n, p in exact.named_parameters() if p.grad is not None}
    return loss.item(), found


def gradient(parameters: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> Vectors:
    return evaluated(parameters, x, y)[1]


def norm(vectors: Vectors) -> float:
    return math.sqrt(sum(float(np.square(v).sum()) for v in vectors.values()))


def flat(bound: float) -> Clip:
    def clip(vectors: Vectors) -> Vectors:
        factor = min(1.0, bound / max(norm(vectors), 1e-300))
        return {n: v * factor for n, v in vectors.items()}

    return clip


def per_layer(vectors: Vectors) -> Vectors:
    found: Vectors = {}
    for layer in ("0", "2"):
        part = {n: v for n, v in vectors.items() if n.startswith(layer)}
        found |= flat(NORM / math.sqrt(2))(part)
    return found


def joint(vectors: Vectors) -> Vectors:
    layout = Layout.of(vectors)
    scales = scales_by_dimension(layout)
    shortened = flat(NORM)({n: v / scales[n] for n, v in vectors.items()})
    return {n: v * scales[n] for n, v in shortened.items()}


def algorithm_1(
    records: Sequence[tuple[np.ndarray, np.ndarray]],
    lots: Sequence[Sequence[int]],
    expected: float,
    clips: Sequence[Clip],
) -> Vectors:
    """Parameters after noiseless rounds on the given lots, each record clipped by itself."""
    parameters = {n: p.astype(np.float64) for n, p in task().parameters().items()}
    for lot, clip in zip(lots, clips, strict=True):
        total = {n: np.zeros(p.shape) for n, p in parameters.items()}
        for record in lot:
            for name, part in clip(gradient(parameters, *records[record])).items():
                total[name] += part
        parameters = {n: p - RATE * total[n] / expected for n, p in parameters.items()}
    return parameters


def assert_close(found: Run, expected: Vectors) -> None:
    start = task().parameters()
    moved = norm({n: expected[n] - start[n] for n in start})
    error = norm({n: found.state.parameters[n] - expected[n] for n in expected})
    assert moved > 0.01
    assert error < 2e-5 * max(moved, 1.0)


@pytest.mark.parametrize(("unit", "rows"), [("example", 1), ("microbatch", 2)])
@pytest.mark.parametrize(
    ("clipping", "clip"),
    [
        (fedpriv.Flat(NORM), flat(NORM)),
        (fedpriv.PerLayer(NORM), per_layer),
        (fedpriv.Joint(NORM), joint),
    ],
    ids=["flat", "per-layer", "joint"],
)
def test_rounds_are_those_of_algorithm_1(
    unit: str, rows: int, clipping: ClippingPolicy, clip: Clip, tmp_path: Path
) -> None:
    people = population()
    records = pieces(people, rows)
    found = run(people, noiseless(unit, clipping=clipping), tmp_path / "run")
    lots = [range(len(records))] * ROUNDS
    assert_close(found, algorithm_1(records, lots, len(records), [clip] * ROUNDS))


def test_lots_are_poisson_samples_of_examples_over_their_expected_size(tmp_path: Path) -> None:
    people, q = population((9,) * 7), 0.3
    records = pieces(people, 1)
    found = run(people, noiseless("example", q), tmp_path / "run", seed=5)
    sampling, entropy = PoissonSampling(len(records), q), SeededEntropy(5)
    lots = [
        sampling.draw(entropy.key(f"sampling//{number}/0"))[0].tolist()
        for number in range(1, ROUNDS + 1)
    ]
    assert len({len(lot) for lot in lots}) > 1
    expected = algorithm_1(records, lots, q * len(records), [flat(NORM)] * ROUNDS)
    assert_close(found, expected)


def test_norms_adapt_to_the_examples_and_metrics_are_of_examples(tmp_path: Path) -> None:
    people = population()
    records = pieces(people, 1)
    mechanism = noiseless(
        "example",
        adaptive=fedpriv.AdaptiveClipping(quantile=0.5, learning_rate=0.5),
        metrics={"loss": {"bound": 50.0}, "examples": {"cap": 10}},
    )
    found = run(people, mechanism, tmp_path / "run")
    parameters = {n: p.astype(np.float64) for n, p in task().parameters().items()}
    bound = NORM
    for result in found.rounds:
        assert result.clipping_norms == pytest.approx({"update": bound}, rel=1e-5)
        losses = [evaluated(parameters, *record)[0] for record in records]
        assert result.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
        assert result.metrics["examples"] == pytest.approx(1.0, abs=1e-6)
        short = np.mean([norm(gradient(parameters, *record)) <= bound for record in records])
        assert 0.0 < short < 1.0
        assert result.unclipped["update"] == pytest.approx(short, abs=1e-6)
        step = algorithm_1_step(records, parameters, flat(bound))
        parameters, bound = step, bound * math.exp(-0.5 * (short - 0.5))
    assert_close(found, parameters)


def algorithm_1_step(
    records: Sequence[tuple[np.ndarray, np.ndarray]], parameters: Vectors, clip: Clip
) -> Vectors:
    clipped = [clip(gradient(parameters, *record)) for record in records]
    return {
        name: p - RATE * np.mean([each[name] for each in clipped], axis=0)
        for name, p in parameters.items()
    }


@pytest.mark.parametrize("adaptive", [fedpriv.FedAdam, fedpriv.FedAdagrad])
def test_noisy_adam_is_algorithm_2_and_adagrad_adds_up(
    adaptive: Callable[..., fedpriv.FedAdam], tmp_path: Path
) -> None:
    """Bu et al. 2020, algorithm 2, with u₀ = ξ² and their v̄ over the expected size of a lot."""
    people = population()
    records, eta, beta_1, beta_2, xi = pieces(people, 1), 0.05, 0.8, 0.9, 0.02
    decays = {"beta2": beta_2} if adaptive is fedpriv.FedAdam else {}
    server = adaptive(eta, beta_1, tau=xi, **decays)
    found = run(people, noiseless("example"), tmp_path / "run", server=server)
    theta = {n: p.astype(np.float64) for n, p in task().parameters().items()}
    m, u = ({n: np.full(p.shape, start) for n, p in theta.items()} for start in (0.0, xi**2))
    for _ in range(ROUNDS):
        clipped = [flat(NORM)(gradient(theta, *record)) for record in records]
        for name, before in theta.items():
            v = np.mean([each[name] for each in clipped], axis=0)
            m[name] = beta_1 * m[name] + (1 - beta_1) * v
            kept, new = (beta_2, 1 - beta_2) if decays else (1.0, 1.0)
            u[name] = kept * u[name] + new * v * v
            theta[name] = before - eta * m[name] / (np.sqrt(u[name]) + xi)
    assert_close(found, theta)


def test_the_rate_of_a_round_follows_its_schedule(tmp_path: Path) -> None:
    people = population()
    records = pieces(people, 1)
    server = fedpriv.FedAvg(fedpriv.StepDecay(RATE, 0.5, rounds=1))
    found = run(people, noiseless("example"), tmp_path / "run", server=server)
    parameters = {n: p.astype(np.float64) for n, p in task().parameters().items()}
    for number in range(ROUNDS):
        step = algorithm_1_step(records, parameters, flat(NORM))
        rate = 0.5**number
        parameters = {n: p + rate * (step[n] - p) for n, p in parameters.items()}
    assert_close(found, parameters)


def sums_of(people: fedpriv.Population, unit: str, out: Path, **more: Any) -> np.ndarray:
    """The sum that one noiseless round releases, from how far the model moved."""
    found = run(people, noiseless(unit, **more), out, rounds=1)
    start, records = task().parameters(), Unit(unit)
    size = {Unit.EXAMPLE: 1, Unit.MICROBATCH: 2}[records]
    number = len(pieces(people, size))
    moved = [(found.state.parameters[n] - p).astype(np.float64).ravel() for n, p in start.items()]
    return np.concatenate(moved) * number / RATE


@pytest.mark.parametrize(("unit", "rows"), [("example", 1), ("microbatch", 2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30, math.inf, math.nan])
def test_one_record_moves_the_released_sum_by_the_clipping_norm_at_most(
    unit: str, rows: int, scale: float, tmp_path: Path
) -> None:
    people = population((2, 4, 6))
    x, y = people.users.fields["x"].copy(), people.users.fields["y"]
    ids = np.repeat(np.arange(3), [2, 4, 6])
    x[-rows:] = scale * np.sign(x[-rows:])
    whole, without = (
        fedpriv.Population("3", from_arrays({"x": x[:n], "y": y[:n]}, ids[:n]), people.test)
        for n in (len(x), len(x) - rows)
    )
    ends = [
        sums_of(each, unit, tmp_path / name)
        for name, each in (("with", whole), ("without", without))
    ]
    moved = float(np.linalg.norm(ends[0] - ends[1]))
    assert moved <= NORM * (1 + 1e-5)
    if scale == 1e4:
        assert moved >= NORM * 0.999  # the bound is reached
    if not math.isfinite(scale):
        assert moved <= NORM * 1e-5  # it counts as zero


def test_a_lot_of_20_000_is_streamed_in_chunks() -> None:
    people = population((10,) * 2_000)
    store = cut_up(people, 1, "examples").users
    assert store.population == 20_000
    trained = task()
    request = request_under(trained, GRADIENT, store.population, NORM)
    transport = InProcessTransport(trained, store, torch.device("cpu"), 2**20, processes=1)
    assert 0 < transport.road(request).shapes[0] < 4_000
    assert sum(partial.users for partial in transport.collect(request)) == 20_000
    found = request.clipping.layout.unflatten(
        request.clipping.in_units(total_of(transport, request))
    )
    # All at once in double precision: the model is small enough for that.
    exact = model().double()
    parameters = dict(exact.named_parameters())

    def loss(tensors: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(exact, dict(tensors), (x[None],))
        return nn.functional.cross_entropy(outputs, y[None])

    x, y = (torch.tensor(store.fields[name]) for name in ("x", "y"))
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x.double(), y)
    lengths = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each.values()))
    factors = (NORM / lengths).clamp(max=1.0)
    assert 0.05 < float((factors < 1.0).double().mean()) < 0.95
    for name, gradients in each.items():
        expected = -torch.einsum("n,n...->...", factors, gradients).detach().numpy()
        error = np.abs(found[name] - expected).max()
        assert error < 1e-5 * 20_000 * NORM / math.sqrt(expected.size)


@pytest.mark.parametrize("unit", ["example", "microbatch"])
def test_everything_that_is_said_names_the_unit(
    unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    mechanism = private(unit, metrics=["accuracy"])
    found = run(population(), mechanism, out, quiet=False, simulation_only=True)
    records = len(pieces(population(), 1 if unit == "example" else 2))
    told, plural = capsys.readouterr().out, "examples" if unit == "example" else "microbatches"
    assert f"{unit}-level (ε, δ)" in told
    assert f"{unit.title()}-level differential privacy" in told
    assert f"N = {records}" in told
    assert plural in told
    assert "user-level" not in told.lower()
    assert {result.unit for result in found.rounds} == {unit}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {row["unit"] for row in rows} == {unit}
    ledger = out / "ledger.sqlite"
    shown = printed("ledger", "show", ledger)
    assert f"add-or-remove-one {unit}" in shown
    assert f"unit {unit}" in shown
    priced = printed("epsilon", ledger)
    assert f"{unit}-level ε of" in priced
    assert f"{unit.title()}-level differential privacy" in priced
    for row in json.loads(printed("epsilon", ledger, "--json"))["rows"]:
        assert row["unit"] == unit
    page = found.report().read_text(encoding="utf-8")
    assert f"{unit}-level ε" in page
    assert f"for each whole {unit}" in page
    assert f"N = {records} {plural} enrolled" in page
    assert f"the {plural} of a round" in page
    assert f"whether one {unit} took part" in page
    assert "user-level" not in page.lower()
    assert "users of a round" not in page
    assert f"enrolled {plural}: {records}" in (out / "plan.toml").read_text()


def test_what_is_said_of_users_names_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(
        population(),
        private("user"),
        tmp_path / "run",
        local=fedpriv.SGD(1.0, epochs=2),
        quiet=False,
    )
    told = capsys.readouterr().out
    assert "user-level (ε, δ)" in told
    assert "N = 5 users" in told
    page = found.report().read_text(encoding="utf-8")
    assert "for each whole user" in page
    for word in ("example-level", "microbatch-level"):
        assert word not in told
        assert word not in page


def test_a_ledger_of_one_unit_is_refused_for_another(tmp_path: Path) -> None:
    ledger, people, local = tmp_path / "ledger.sqlite", population(), fedpriv.SGD(1.0, steps=1)
    run(people, private("example"), tmp_path / "examples", ledger=ledger)
    with Ledger.open(ledger) as opened:
        assert opened.population_name == f"{people.name}; unit example"
        assert {row.event.sampling.unit for row in opened.charges()} == {Unit.EXAMPLE}
    for unit, given in (("user", local), ("microbatch", None)):
        with pytest.raises(LedgerError, match="is of population 'people: 5 users; unit example'"):
            run(people, private(unit), tmp_path / unit, ledger=ledger, local=given)
    sized = replace(private("microbatch"), microbatch=3)
    run(people, private("microbatch"), tmp_path / "twos", ledger=tmp_path / "micro.sqlite")
    with pytest.raises(LedgerError, match="unit microbatch of 2"):
        run(people, sized, tmp_path / "threes", ledger=tmp_path / "micro.sqlite")


def test_ledgers_of_two_units_do_not_add_up(tmp_path: Path) -> None:
    run(population(), private("example"), tmp_path / "a")
    run(population(), private("user"), tmp_path / "b", local=fedpriv.SGD(1.0, steps=1))
    ledgers = [tmp_path / name / "ledger.sqlite" for name in "ab"]
    message = refused("epsilon", *ledgers)
    assert "events with example and with user neighbours cannot be added up" in message
    spent: list[RoundEvent] = []
    for path in ledgers:
        with Ledger.open(path) as ledger:
            spent += ledger.spent()
    for name in ACCOUNTANTS:
        with pytest.raises(UnsupportedEventError, match="cannot be added up"):
            fedpriv.epsilon(spent, 1e-3, name)


def test_the_unit_is_in_every_charge_and_cannot_be_written_in_two_ways(tmp_path: Path) -> None:
    run(population(), private("example"), tmp_path / "run")
    with (
        Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger,
        (tmp_path / "out").open("w") as f,
    ):
        ledger.export(f)
    lines = (tmp_path / "out").read_text().splitlines()
    assert all('"unit": "example"' in line for line in lines[1:-1])
    read = ExportedLedger.read(lines)
    assert {row.event.sampling.unit for row in read.rows} == {Unit.EXAMPLE}
    for wrong in ('"unit": "user"', '"unit": "household"'):
        changed = [*lines[:1], lines[1].replace('"unit": "example"', wrong), *lines[2:]]
        with pytest.raises(LedgerError, match="line 2 of the export"):
            ExportedLedger.read(changed)


def test_charges_of_users_are_written_as_they_were_before_there_were_units(tmp_path: Path) -> None:
    local = fedpriv.SGD(1.0, steps=1)
    run(population(), private("user"), tmp_path / "run", local=local)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert not any("unit" in json.loads(row.text) for row in ledger.charges())


def test_a_run_is_resumed_with_its_unit_alone(tmp_path: Path) -> None:
    people, out = population(), tmp_path / "run"
    run(people, private("example"), out)
    (out / "checkpoints" / f"round-{ROUNDS:06d}.safetensors").unlink()
    again = run(people, private("example"), out, resume=True)
    # The budget does not pay for the last round again.
    assert [result.unit for result in again.rounds] == ["example"] * (ROUNDS - 1)
    with pytest.raises(InvalidValueError, match="can only be resumed with the plan"):
        run(people, private("microbatch"), out, resume=True)


FILE = """
name = "test"
rounds = 2
data = { name = "digits", options = { users = 40 } }
model = { name = "softmax", options = { inputs = 64, classes = 10 } }
clipping.norm = 0.5

[privacy]
unit = "example"
sampling_probability = 0.02
epsilon = 4.0
delta = 1e-4
"""


def test_a_file_needs_no_local_training_for_examples(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    told = printed("simulate", tmp_path / "a.toml", "--out", tmp_path / "run")
    assert "example-level (ε, δ)" in told
    assert "N = 1437 examples" in told
    # What was run can be run again.
    plan = tmp_path / "run" / "plan.toml"
    told = printed("simulate", plan, "--set", "run=again", "--out", tmp_path / "again")
    assert "example-level (ε, δ)" in told
    assert "N = 1437 examples" in printed("plan", tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["privacy.unit=row"], "unit is 'row'"),
        (["privacy.unit=microbatch"], "microbatch is None and unit is 'microbatch'"),
        (["privacy.microbatch=4"], "microbatch is 4 and unit is 'example'"),
        (["privacy.unit=microbatch", "privacy.microbatch=0"], "privacy.microbatch is 0"),
        (["local={learning_rate=1.0,epochs=2}"], "local is given and privacy.unit is 'example'"),
        (
            ["averaging={cap=5,total_weight=9.0}"],
            "averaging.cap is given and privacy.unit is 'example'",
        ),
    ],
)
def test_what_only_users_may_have_is_refused_in_one_sentence(
    assignments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    given = [part for each in assignments for part in ("--set", each)]
    assert re.search(message, refused("simulate", tmp_path / "a.toml", *given))
    assert {path.name for path in tmp_path.iterdir()} == {"a.toml"}


@pytest.mark.parametrize("length", ["steps", "epochs"])
def test_local_training_that_is_one_gradient_may_be_spelled_out(
    length: str, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    local = f"local={{learning_rate=1.0,{length}=1}}"
    printed("plan", tmp_path / "a.toml", "--set", local)


def test_nodes_and_workers_have_users_alone(tmp_path: Path) -> None:
    change = ["privacy.unit=example", "local={learning_rate=1.0,steps=1}"]
    setup = RunSetup.at(
        load_config(SIMULATIONS / "federation.toml", change), tmp_path / "run", resume=False
    )
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match=r"privacy.unit is 'example'; on nodes"):
        setup.on_nodes(setup.config.federation, "people", ["a", "b"])
    with pytest.raises(InvalidValueError, match=r"privacy.unit is 'example'; on workers"):
        setup.refuse_true_figures("on workers")
    assert list(tmp_path.iterdir()) == []


def test_python_refuses_what_a_file_does(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"local is given and privacy\.unit"):
        run(population(), private("example"), tmp_path / "a", local=fedpriv.SGD(1.0, epochs=2))
    with pytest.raises(InvalidValueError, match="unit is 'rows'"):
        fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0), unit="rows")
    with pytest.raises(InvalidValueError, match="microbatch is None and unit is 'microbatch'"):
        fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0), unit="microbatch")
    with pytest.raises(InvalidValueError, match="microbatch is 0"):
        fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0), unit="microbatch", microbatch=0)
    assert not (tmp_path / "a").exists()


def test_arms_of_a_study_have_one_unit(tmp_path: Path) -> None:
    arms = {"examples": {}, "pairs": {"mechanism": private("microbatch")}}
    with pytest.raises(InvalidValueError, match="the ε of different units are not comparable"):
        fedpriv.compare(
            population(), task(), private("example"), arms, out=tmp_path / "study", quiet=True
        )
    arms = {"average": {}, "adam": {"server": fedpriv.FedAdam(0.1)}}
    given = {"seeds": 2, "out": tmp_path / "study", "quiet": True}
    study = fedpriv.compare(population(), task(), private("example"), arms, **given)
    assert "example-level ε of each run" in study.report().read_text(encoding="utf-8")
    assert RunFolder(study.folder / "runs/adam/epsilon-4/seed-0").results()[0].unit == "example"


@pytest.mark.slow
def test_lots_of_mnist_are_streamed() -> None:
    if "FEDPRIV_DATA" not in os.environ:
        pytest.skip("MNIST is absent: set FEDPRIV_DATA to the folder that holds its files")
    people = load_mnist_writers()
    store = cut_up(people, 1, "examples").users
    assert store.population == 60_000
    (lot,) = PoissonSampling(60_000, 256 / 60_000).draw(bytes(32))
    assert 150 < lot.size < 400
    torch.manual_seed(0)
    small = fedpriv.Task(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    transport = InProcessTransport(small, store, torch.device("cpu"), 2**22, processes=1)
    for users in (lot, np.arange(20_000)):
        request = replace(request_under(small, GRADIENT, 1, 1.0), users=users)
        assert sum(part.users for part in transport.collect(request)) == users.size


def test_what_is_released_states_what_its_epsilon_compares_and_rests_on(tmp_path: Path) -> None:
    mechanism = fedpriv.Mechanism(fedpriv.FixedSize(2), fedpriv.Flat(NORM))
    mechanism = mechanism.with_noise(9.0, epsilon=9.0, delta=1e-3)
    shared = {"ledger": tmp_path / "ledger.sqlite"}
    for name, seed, weakest in (
        ("fresh", None, "operating system"),
        ("seeded", 1, "seeded: reproducible, not a guarantee"),
        # One ε is of all charges, so what another run drew with a seed makes it void.
        ("later", None, "seeded: reproducible, not a guarantee"),
    ):
        out = tmp_path / name
        run(population(), mechanism, out, name=name, seed=seed, **shared)
        with safe_open(out / "model.safetensors", "np") as file:
            released = json.loads(file.metadata()["release"])
        for stated in (
            released,
            *map(json.loads, (out / "metrics.jsonl").read_text().splitlines()),
        ):
            assert (stated["unit"], stated["relation"]) == ("user", "replace-one")
            assert stated["randomness"] == weakest
