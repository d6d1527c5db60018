"""Numbers of NumPy are numbers: values hold them as Python's own, and what they hold is checked."""

import math
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedpriv import (
    SGD,
    AdamW,
    AdaptiveClipping,
    Audit,
    Averaging,
    BandedNoise,
    BandedPoisson,
    BufferedNoise,
    Engine,
    FedAdam,
    FedAvg,
    FederatedEvaluation,
    FedRecon,
    FixedSize,
    Flat,
    Joint,
    Mechanism,
    PerLayer,
    Personalisation,
    Poisson,
    PoissonExamples,
    PolynomialDecay,
    Population,
    RandomAllocation,
    Scaffold,
    Separated,
    Task,
    compare,
    simulate,
    with_adapters,
)
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.data.partition import dirichlet
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.measures.metrics import metric

ONE, TWO, HALF = np.int8(1), np.int64(2), np.float32(0.5)
HUGE = 10**400
NOISELESS = Mechanism.poisson()
VALUES: list[Callable[[], object]] = [
    lambda: SGD(HALF, TWO, epochs=TWO, momentum=HALF, proximal=HALF, max_examples=TWO),
    lambda: AdamW(HALF, steps=TWO, weight_decay=HALF, epsilon=HALF),
    lambda: Scaffold(HALF, steps=TWO, control_norm=HALF, control_share=HALF, control_rate=HALF),
    lambda: FedRecon(HALF, steps=TWO, personal_steps=ONE, personal_rate=HALF),
    lambda: Engine(chunk_mebibytes=TWO, processes=ONE),
    lambda: Poisson(HALF),
    lambda: PoissonExamples(HALF, TWO, HALF),
    lambda: FixedSize(TWO),
    lambda: RandomAllocation(TWO, ONE),
    lambda: Separated(TWO, ONE),
    lambda: BandedPoisson(HALF, TWO, ONE),
    lambda: BandedNoise(TWO, momentum=HALF, coefficients=(ONE, HALF)),
    lambda: BufferedNoise(TWO, decays=[HALF], weights=[HALF]),
    lambda: Flat(HALF),
    lambda: PerLayer(HALF, split={"0": HALF}),
    lambda: Joint(HALF, scales={"weight": HALF}),
    lambda: Averaging(cap=TWO, total_weight=HALF, floor=HALF),
    lambda: AdaptiveClipping(HALF, HALF, HALF),
    lambda: FedAdam(HALF, HALF, tau=HALF),
    lambda: FedAvg(PolynomialDecay(HALF, HALF, rounds=TWO)),
    lambda: PolynomialDecay(HALF, HALF, rounds=TWO),
    lambda: FederatedEvaluation(HALF, {"loss": {"bound": HALF}}, HALF, TWO, HALF),
    lambda: Personalisation(SGD(HALF, steps=TWO), share=HALF),
    lambda: Audit(np.int64(20)),
    lambda: poisson_gaussian(HALF, HALF, count=TWO),
    lambda: Mechanism.poisson(
        HALF,
        metrics={"loss": {"bound": HALF}},
        metrics_share=HALF,
        contributors_share=HALF,
        unit="microbatch",
        microbatch=TWO,
    ),
    lambda: Mechanism.poisson().calibrate(epsilon=HALF, delta=np.float32(1e-3), rounds=TWO),
]


def held(value: object) -> list[object]:
    """All that a value holds, down to numbers and texts."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in held(inner)]
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in held(inner)]
    return held(vars(value)) if is_dataclass(value) else [value]


@pytest.mark.parametrize("make", VALUES)
def test_numbers_of_numpy_are_held_as_those_of_python(make: Callable[[], object]) -> None:
    assert not [each for each in held(make()) if isinstance(each, np.generic)]
    assert {int, float} & {*map(type, held(make()))}


def test_a_run_with_numbers_of_numpy_is_the_run_with_those_of_python(tmp_path: Path) -> None:
    x, y = np.eye(24, 8, dtype=np.float32), np.arange(24) % 5
    people = Population.from_arrays(x, y, np.arange(24), held_out=(x, y))
    half, one, two, three = 0.5, 1, 2, 3
    model = nn.Linear(8, 5, bias=False)
    for folder in ("python", "numpy"):
        mechanism = Mechanism.poisson(half, Flat(half), averaging=Averaging(two, 20 * half))
        simulate(
            people,
            Task(model, ignore_index=-three),
            mechanism.calibrate(epsilon=8 * half, delta=1e-3, rounds=two),
            local=SGD(half, epochs=one, batch_size=two),
            server=FedAdam(half),
            out=tmp_path / folder,
            seed=three,
            evaluate_every=two,
            checkpoint_every=two,
            quiet=True,
        )
        half, one, two, three = HALF, ONE, TWO, np.int16(3)
    plans = [(tmp_path / each / "plan.toml").read_text() for each in ("python", "numpy")]
    assert plans[0] == plans[1]


def test_adapters_and_figures_take_numbers_of_numpy() -> None:
    model = with_adapters(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), TWO, HALF)
    assert [p.shape[0] for n, p in model.named_parameters() if "lora_A" in n] == [2, 2]
    Task(model, figures={"top": {"figure": "top-k", "k": TWO}})
    with pytest.raises(ModelError, match="the rank of adapters is True"):
        with_adapters(model, True)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: SGD(0.5, epochs=np.float32(2)), "epochs is 2.0"),
    (lambda: SGD(0.5, epochs=np.int64(0)), "epochs is 0"),
    (lambda: SGD(np.float32(np.nan), epochs=1), "learning_rate is nan"),
    (
        lambda: FedRecon(0.5, steps=2, personal_steps=1.0, personal_rate=0.5),
        "personal_steps is 1.0 of 2 steps",
    ),
    (lambda: FedRecon(0.5, steps=1, personal_steps=1, personal_rate=0.5), "is 1 of 1 steps"),
    (lambda: Engine(processes=0), "processes is 0"),
    (lambda: Engine(chunk_mebibytes=1.5), "chunk_mebibytes is 1.5"),
    (lambda: Engine("gpu"), "device is 'gpu', which torch does not find here"),
    (lambda: Engine("cpu", activations="tf32"), "activations is 'tf32'; "),
    (lambda: FederatedEvaluation("4"), "noise_multiplier is '4'"),
    (lambda: FederatedEvaluation(4.0, every=0), "every is 0"),
    (lambda: FederatedEvaluation(4.0, held_out=1.0), r"held_out is 1.0"),
    (lambda: poisson_gaussian(0.5, 1.0, count=1.5), "count is 1.5"),
    (lambda: Averaging(cap="8", total_weight=9.0), "cap is '8'"),
    (lambda: Averaging(floor=[0.5]), r"floor is \[0.5\]"),
    (lambda: AdaptiveClipping(None), "quantile is None"),
    (lambda: Audit(math.nan), "canaries is nan"),
    (lambda: Personalisation(0.1), "local is of the type float"),
    (lambda: Flat(True), "the clipping norm is True"),
    (lambda: Flat(HUGE), "norm is a whole number of 1329 bits"),
    (lambda: PerLayer(0.5, split={"a": HUGE}), "a is a whole number of 1329 bits"),
    (lambda: SGD(0.5, epochs=1, momentum=HUGE), "momentum is a whole number of 1329 bits"),
    (lambda: AdamW(0.5, epochs=1, weight_decay=-HUGE), "weight_decay is a whole number of"),
    (lambda: FedAdam(HUGE), "learning_rate is a whole number of 1329 bits"),
    (lambda: PolynomialDecay(HUGE, 0.0, 2), "start is a whole number of 1329 bits"),
    (lambda: metric("loss", bound=HUGE), "bound is a whole number of 1329 bits"),
    (lambda: metric("update-norms:update", thresholds=[0.5, HUGE]), "thresholds is a whole number"),
    (lambda: dirichlet(np.arange(4), 2, HUGE, 0), "alpha is a whole number of 1329 bits"),
    (lambda: PerLayer(0.5, "layers"), "parts is 'layers'"),
    (lambda: PerLayer(0.5, split=3), "split is 3"),
    (lambda: PerLayer(0.5, split={"a": "b"}), "split of 'a' is 'b'; it must be positive"),
    (lambda: Joint(0.5, {"a": 0}), "scales of 'a' is 0; it must be positive"),
    (
        lambda: Mechanism.poisson(allocation="equal"),
        "allocation is 'equal'",
    ),
    (lambda: Mechanism(Poisson(0.5), Flat(0.5), "2"), "noise_multiplier is '2'"),
    (lambda: Mechanism.poisson(unit=None), "unit is None"),
    (lambda: Mechanism.poisson(metrics="accuracy"), "metrics are 'accuracy'; they must be a list"),
    (
        lambda: NOISELESS.calibrate(epsilon=2.0, delta=None),
        "delta is None",
    ),
    (lambda: NOISELESS.calibrate(epsilon=2.0, delta=1e-3, spent=[1]), "an event in spent is of"),
    (lambda: Task(nn.Linear(4, 2), frozen=[0]), "a pattern of names is of the type int"),
    (lambda: Task(nn.Linear(4, 2), figures=["auc"]), "figures is of the type list"),
    (lambda: Task(nn.Linear(4, 2), ignore_index="pad"), "ignore_index is of the type str"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_numbers_are_refused_where_they_are_given(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


def test_seeds_of_a_study_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    x, y = np.eye(24, 8, dtype=np.float32), np.arange(24) % 5
    people = Population.from_arrays(x, y, np.arange(24), held_out=(x, y))
    task = Task(nn.Linear(8, 5))
    mechanism = Mechanism.poisson().calibrate(epsilon=8.0, delta=1e-3, rounds=1)
    for number, seeds in enumerate((np.int64(2), np.arange(2))):
        out = tmp_path / str(number)
        study = compare(people, task, mechanism, {"one": {}}, seeds=seeds, out=out, quiet=True)
        assert study.arms[0].seeds == (0, 1)
    with pytest.raises(InvalidValueError, match="seeds is of the type float"):
        compare(people, task, mechanism, {"one": {}}, seeds=2.0, out=tmp_path / "2", quiet=True)
