"""Tasks that cannot be trained for users separately are refused by name."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.task import (
    LOSSES,
    Task,
    check_task,
    cross_entropy,
    evaluate,
    find_loss,
    squared_error,
)
from fedpriv.errors import ModelError
from fedpriv.models import MODELS, build_model

EXAMPLES = {
    "x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32),
    "y": np.array([0, 1, 2, 0]),
}


class Counting(nn.Module):
    """Counts its calls in a buffer, as running statistics would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


class Broken(nn.Module):
    """Returns NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float("nan")


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.LazyBatchNorm1d(),
        nn.SyncBatchNorm(6),
        nn.InstanceNorm1d(6, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_mix_examples_are_refused_by_name(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ModelError, match=rf"'1\.1' is {type(layer).__name__}.*GroupNorm"):
        Task(model, cross_entropy)


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.InstanceNorm1d(6), nn.BatchNorm1d(6)],
    ids=repr,
)
def test_layers_that_do_not_are_accepted(layer: nn.Module) -> None:
    Task(nn.Sequential(layer), cross_entropy)


def linear(outputs: int = 3) -> nn.Module:
    return nn.Linear(6, outputs)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(Counting(), cross_entropy), "buffer 'calls' changes"),
        (Task(Broken(), cross_entropy), "returns NaN"),
        (Task(nn.Linear(5, 3), cross_entropy), "cannot be evaluated"),
        (Task(nn.ReLU(), cross_entropy), "no trainable parameter"),
        (Task(linear(), functional.cross_entropy), r'shape \[\].*reduction="none"'),
        (Task(linear(2), cross_entropy), "cannot be evaluated"),
        (Task(linear(), cross_entropy, inputs="image"), r"no field 'image'.*\['x', 'y'\]"),
    ],
)
def test_tasks_that_cannot_train_are_refused(task: Task, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_task(task, EXAMPLES)


def test_a_good_task_passes_and_is_unchanged() -> None:
    task = Task(linear(), cross_entropy)
    before = task.parameters()
    check_task(task, EXAMPLES)
    for name, parameter in task.parameters().items():
        np.testing.assert_array_equal(parameter, before[name])
        assert parameter.dtype == np.float32


def test_an_evaluation_leaves_every_part_of_the_model_in_its_mode() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Dropout()), nn.Linear(8, 3))
    model[0].eval()
    modes = [module.training for module in model.modules()]
    task = Task(model, cross_entropy)
    evaluate(task, EXAMPLES, torch.device("cpu"), task.parameters())
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2


def test_losses_of_sequences_are_averaged_per_example() -> None:
    outputs, targets = torch.randn(2, 3, 5), torch.randint(0, 3, (2, 5))
    task = Task(nn.Identity(), cross_entropy)
    losses = task.losses_of(outputs, targets)
    by_hand = [functional.cross_entropy(outputs[i].T, targets[i]).item() for i in range(2)]
    np.testing.assert_allclose(losses.numpy(), by_hand, rtol=1e-6)


def test_losses_by_name() -> None:
    assert find_loss("squared-error") is squared_error
    outputs = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    np.testing.assert_array_equal(squared_error(outputs, outputs + 2).numpy(), np.full((2, 2), 4.0))
    assert find_loss("fedpriv.engine.task:cross_entropy") is LOSSES["cross-entropy"]
    for name, message in [
        ("cross-entropi", "did you mean 'cross-entropy'"),
        ("fedpriv.models:none", "cannot be imported"),
        ("nowhere:loss", "cannot be imported"),
    ]:
        with pytest.raises(ModelError, match=message):
            find_loss(name)


@pytest.mark.parametrize(("name", "count"), [("softmax", 650), ("mlp", 101_770), ("cnn", 26_010)])
def test_models_have_the_published_sizes(name: str, count: int) -> None:
    model = build_model(name, {}, seed=0)
    assert sum(p.numel() for p in model.parameters()) == count
    shape = (2, 64) if name == "softmax" else (2, 1, 28, 28)
    assert model(torch.zeros(shape)).shape == (2, 10)


def test_models_of_characters_have_the_sizes_they_tell() -> None:
    for name, count in (("character-mlp", 11_936), ("character-transformer", 115_040)):
        model = build_model(name, {}, seed=0)
        assert sum(p.numel() for p in model.parameters()) == count
        assert f"{count:,} parameters" in " ".join(str(type(model).__doc__).split())
        assert model(torch.zeros((2, 40), dtype=torch.int64)).shape == (2, 96, 40)


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (build_model("mlp", {}, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["1.weight"], other["1.weight"])
    assert torch.equal(state, torch.random.get_rng_state())


def test_models_by_import_path_and_bad_names() -> None:
    assert isinstance(build_model("fedpriv.models:mlp", {"hidden": 3}, 0), nn.Module)
    for name, options, message in [
        ("mpl", {}, "did you mean 'mlp'"),
        ("mlp", {"hiden": 3}, "did you mean 'hidden'"),
        ("fedpriv.models:nothing", {}, "cannot be imported"),
        ("fedpriv.errors:known_names", {"name": "a"}, "needs the option 'known'"),
        ("fedpriv.errors:known_names", {"name": "a", "known": []}, "returned a str"),
    ]:
        with pytest.raises(ModelError, match=message):
            build_model(name, options, 0)
    assert set(MODELS) == {"softmax", "mlp", "cnn", "character-mlp", "character-transformer"}
