"""What a run leaves is a model: a file with the whole state_dict."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_by_helper
from torch import nn

import fedpriv
from fedpriv.errors import DataError, InvalidValueError, ModelError

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).standard_normal((120, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)
PEOPLE = fedpriv.Population.from_arrays(X, Y, np.arange(120) // 6, held_out=(X + 0.01, Y))


class Net(nn.Module):
    """Frozen, tied and normalised layers, and buffers of every kind."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.one, self.two = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.one.weight = self.two.weight
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(1.5 + seed, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor([3 + seed]))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.base(x)) * self.scale.float()
        return self.head(self.two(torch.tanh(self.one(hidden))))


def trained(
    model: nn.Module, out: Path, people: fedpriv.Population = PEOPLE, **fields: object
) -> fedpriv.Run:
    metrics = {"batch-norm": {"bound": 4.0}} if isinstance(model, Net) else {}
    mechanism = fedpriv.Mechanism.poisson(q=0.9, clipping=fedpriv.Flat(1.0), metrics=metrics)
    return fedpriv.simulate(
        people,
        fedpriv.Task(model, **fields),
        mechanism.calibrate(epsilon=50.0, delta=1e-2, rounds=2),
        local=fedpriv.SGD(0.5, epochs=1),
        out=out,
        evaluate_every=2,
        engine=fedpriv.Engine(processes=1),
        quiet=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedpriv.Run:
    return trained(Net(), tmp_path_factory.mktemp("released") / "run")


def accuracy(model: nn.Module) -> float:
    return float((model(torch.tensor(X + 0.01)).argmax(1).numpy() == Y).mean())


def release_in(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return json.loads(file.metadata()["release"])


def test_the_file_is_the_whole_state_dict_with_each_tensor_once(run: fedpriv.Run) -> None:
    tensors, expected = load_file(run.folder / "model.safetensors"), run.model.state_dict()
    assert tensors.keys() == Net().state_dict().keys() - {"two.weight"}
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    begun = Net().state_dict()
    same = {name for name, tensor in tensors.items() if torch.equal(tensor, begun[name])}
    frozen = {"base.bias", "base.weight", "count", "norm.num_batches_tracked", "scale"}
    assert same == frozen
    release = release_in(run.folder)
    assert release["tied"] == {"two.weight": "one.weight"}
    assert set(release["frozen"]["names"]) == frozen
    assert (release["epsilon"], release["round"]) == (run.epsilon, 2)


@pytest.mark.parametrize("given", [["top", "low", "mid"], None])
def test_names_of_classes_are_in_the_file_unless_users_labels_say_them(
    tmp_path: Path, given: list[str] | None
) -> None:
    names = np.array(["low", "mid", "top"])[Y]
    held_out = X + 0.01, names
    people = fedpriv.Population.from_arrays(
        X, names, np.arange(120) // 6, held_out=held_out, classes=given
    )
    run = trained(nn.Linear(4, 3), tmp_path / "run", people)
    assert release_in(run.folder).get("classes") == given


def test_the_helper_of_safetensors_loads_it(run: fedpriv.Run) -> None:
    fresh = Net(seed=1)
    load_by_helper(fresh, run.folder / "model.safetensors")
    assert accuracy(fresh.eval()) == run.accuracy


FRESH = """
import fedpriv, sys
from tests.run.test_released_model import Net, accuracy
print(accuracy(fedpriv.load_model(sys.argv[1], Net(seed=1))))
"""


def test_another_process_loads_it(run: fedpriv.Run) -> None:
    command = [sys.executable, "-c", FRESH, str(run.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) == run.accuracy
    assert "the model's frozen values differ" in done.stderr


def test_a_file_loads_as_its_folder_does_and_says_nothing_of_the_same_base(
    run: fedpriv.Run, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, expected = fedpriv.load_model(run.folder / "model.safetensors", Net()), run.model
    wrapped = fedpriv.load_model(run.folder, nn.DataParallel(Net()))
    assert torch.equal(wrapped.module.head.weight, expected.head.weight)
    assert not caplog.messages
    assert loaded.one.weight is loaded.two.weight
    assert not loaded.training
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


def test_adapters_are_merged_into_plain_layers(tmp_path: Path) -> None:
    def adapted(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return fedpriv.with_adapters(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), 2, seed=seed)

    run = trained(adapted(0), tmp_path / "run")
    plain = fedpriv.load_model(run.folder, adapted(1), merge=True)
    assert [*plain.state_dict()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    torch.testing.assert_close(plain(torch.tensor(X)), run.model(torch.tensor(X)))
    with pytest.raises(ModelError, match=r"the model has '0.weight', .* by with_adapters"):
        fedpriv.load_model(run.folder, plain)
    with pytest.raises(ModelError, match="merge is true and the model has no adapters"):
        fedpriv.load_model(run.folder, plain, merge=True)


def without(name: str) -> nn.Module:
    model = Net()
    delattr(model, name)
    return model


def with_another(**layers: nn.Module) -> nn.Module:
    model = Net()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def tied_further() -> nn.Module:
    model = Net()
    model.base.weight = model.one.weight
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (with_another(more=nn.Linear(1, 1)), "the model has 'more.weight', which .* lacks"),
        (without("head"), "has 'head.bias', which the model lacks"),
        (with_another(head=nn.Linear(5, 3)), r"'head.weight' has the shape \[3, 5\] in the model"),
        (tied_further(), "'base.weight' and 'one.weight' are one tensor in the model and two in"),
        (with_another(head=nn.LazyLinear(3)), "'head.weight' .* its layer is lazy"),
    ],
)
def test_another_model_is_refused_by_its_first_difference(
    run: fedpriv.Run, model: nn.Module, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        fedpriv.load_model(run.folder, model)


def test_what_is_no_released_model_is_refused(tmp_path: Path, run: fedpriv.Run) -> None:
    with pytest.raises(InvalidValueError, match="holds no released model"):
        fedpriv.load_model(tmp_path, Net())
    (tmp_path / "cut").write_bytes((run.folder / "model.safetensors").read_bytes()[:-1])
    (checkpoint, *_) = (run.folder / "checkpoints").iterdir()
    for path in (tmp_path / "cut", checkpoint):
        with pytest.raises(DataError, match="cannot be read as a released model"):
            fedpriv.load_model(path, Net())


def test_a_task_that_freezes_a_copy_leaves_a_plain_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    run = trained(model, tmp_path / "run", trained=("2.*",))
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    fresh.load_state_dict(load_file(run.folder / "model.safetensors"))
    assert accuracy(fresh) == run.accuracy


def hiding() -> nn.Module:
    """A model whose state_dict has another tensor in a parameter's place."""
    model = nn.Linear(4, 3)
    model.register_state_dict_post_hook(
        lambda _module, state, *_: state.update(weight=state["weight"].clone())
    )
    return model


def holding(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_buffer("kept", buffer)
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (holding(torch.eye(2).to_sparse()), "'kept' of the model is float32, sparse_coo"),
        (holding(torch.ones(2, dtype=torch.complex128)), "'kept' of the model is complex128"),
        (hiding(), "'weight' is trained and absent from the model's state_dict"),
    ],
)
def test_what_no_file_could_hold_is_refused_before_anything_is_spent(
    tmp_path: Path, model: nn.Module, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        trained(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
