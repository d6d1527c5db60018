"""What a run leaves is a model: a file with the whole state_dict."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_by_helper
from torch import nn

import fedpriv
from fedpriv.errors import ModelError

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


def trained(model: nn.Module, out: Path, **fields: object) -> fedpriv.Run:
    metrics = {"batch-norm": {"bound": 4.0}} if isinstance(model, Net) else {}
    mechanism = fedpriv.Mechanism.poisson(q=0.9, clipping=fedpriv.Flat(1.0), metrics=metrics)
    return fedpriv.simulate(
        PEOPLE,
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
    with safe_open(run.folder / "model.safetensors", "pt") as file:
        release = json.loads(file.metadata()["release"])
    assert release["tied"] == {"two.weight": "one.weight"}
    assert set(release["frozen"]["names"]) == frozen
    assert (release["epsilon"], release["round"]) == (run.epsilon, 2)


def test_the_helper_of_safetensors_loads_it(run: fedpriv.Run) -> None:
    fresh = Net(seed=1)
    load_by_helper(fresh, run.folder / "model.safetensors")
    assert accuracy(fresh.eval()) == run.accuracy


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
