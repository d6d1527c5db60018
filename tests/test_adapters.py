"""Adapters: the layer that they make, what is trained of a model, and a whole run of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv import wire
from fedpriv.engine.adapters import Adapted, merge_adapters, with_adapters
from fedpriv.engine.side_by_side import SideBySideModel
from fedpriv.engine.task import Task
from fedpriv.engine.task_checks import check_task
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.experiment.build import build_task, method_of
from fedpriv.experiment.config import load_config
from fedpriv.experiment.models import build_model
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import RunFolder
from fedpriv.server.deployment import task_of
from tests import commandline

WORDS = torch.arange(24).reshape(3, 8) % 10


def transformer() -> nn.Module:
    options = {"alphabet": 10, "length": 8, "width": 8, "blocks": 2}
    return build_model("simulations.transformer:CharacterTransformer", options, 0)


def trained(model: nn.Module) -> nn.Module:
    """The model with adapters that say something."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


class Tied(nn.Module):
    """Scores words by their own embeddings, and uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, padding_idx=3)
        self.layer = nn.Linear(6, 6)
        self.again = self.layer
        self.scores = nn.Linear(6, 10, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.tanh(self.layer(self.words(x))))
        return self.scores(hidden).transpose(1, 2)


def test_an_adapted_layer_is_the_formula() -> None:
    model = trained(with_adapters(nn.Sequential(nn.Linear(5, 4)), 2, alpha=6.0))
    layer = model[0]
    assert isinstance(layer, Adapted)
    x = torch.randn(3, 5)
    w, b = layer.base.weight, layer.base.bias
    by_hand = functional.linear(x, w, b) + (6.0 / 2) * x @ layer.lora_A.weight.T @ (
        layer.lora_B.weight.T
    )
    torch.testing.assert_close(model(x), by_hand)
    assert {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad} == {
        "0.lora_A.weight": (2, 5),
        "0.lora_B.weight": (4, 2),
    }


def test_adapters_change_nothing_before_they_are_trained() -> None:
    model = transformer()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    adapted = with_adapters(model, 3, layers=["blocks.*", "characters"], seed=1)
    assert torch.equal(adapted(WORDS), model(WORDS))
    for name, parameter in model.named_parameters():  # and nothing of the model itself
        assert parameter.requires_grad
        assert torch.equal(parameter, before[name])
    random = [layer.lora_A.weight for layer in adapted.modules() if isinstance(layer, Adapted)]
    assert len(random) == 9
    assert all(bool(a.any()) for a in random)


def test_adapters_follow_from_their_seed() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (with_adapters(transformer(), 2, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["scores.1.lora_A.weight"], other["scores.1.lora_A.weight"])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("make", [transformer, Tied])
def test_merged_adapters_are_the_adapted_model(make: type[nn.Module]) -> None:
    model = make()
    adapted = trained(with_adapters(model, 2, 8))
    merged = merge_adapters(adapted)
    assert not torch.allclose(adapted(WORDS), model(WORDS), atol=1e-2)
    torch.testing.assert_close(merged(WORDS), adapted(WORDS), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(layer, Adapted) for layer in merged.modules())
    if make is transformer:
        assert list(merged.state_dict()) == list(model.state_dict())
        assert type(merged.blocks[0].mixed) is nn.Linear


def test_what_reads_the_weight_of_an_adapted_layer_reads_that_of_both() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    adapted = trained(with_adapters(layer, 2, 4, ["linear?"])).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():  # torch's own fast path takes weights without calling layers
        fast = adapted(x)
    torch.testing.assert_close(fast, adapted.train()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "the rank of adapters is 0"),
        ({"rank": "4"}, "the rank of adapters is '4'"),
        (
            {"rank": 10**9},
            "the rank of adapters is 1000000000",
        ),
        ({"rank": 4, "alpha": 0.0}, "alpha of adapters is 0.0"),
        ({"rank": 4, "alpha": float("inf")}, "alpha of adapters is inf"),
        ({"rank": 4, "alpha": "8"}, "alpha of adapters is '8'"),
        ({"rank": 4, "layers": ["blocks.9.*"]}, r"'blocks.9.\*' matches no linear layer or embed"),
        ({"rank": 4, "layers": []}, r"the largest of \[\] is 0"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        with_adapters(transformer(), **options)


def test_a_model_without_layers_to_adapt_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'\*' matches no linear layer or embedding"):
        with_adapters(nn.Sequential(nn.Conv1d(2, 2, 1)), 2)


def test_adapters_of_adapters_are_refused() -> None:
    with pytest.raises(ModelError, match="has adapters already"):
        with_adapters(with_adapters(transformer(), 2), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "layer": ["*"]}, "has no option 'layer'"),
        ({"alpha": 2.0}, "needs the option 'rank'"),
        ({"rank": 2, "layers": 7}, "layers is of the type int"),
    ],
)
def test_a_node_refuses_adapters_that_it_cannot_make(options: dict, message: str) -> None:
    with pytest.raises((ModelError, InvalidValueError), match=message):
        build_task("softmax", {}, 0, "cross-entropy", adapters=options)


# What is trained of a model.


def test_patterns_choose_what_is_trained() -> None:
    model = transformer()
    everything = list(Task(model).parameters())
    head = [name for name in everything if name.startswith("scores.")]
    assert list(Task(model, trained=("scores.*",)).parameters()) == head
    assert list(Task(model, frozen=("scores.*",)).parameters()) == everything[: -len(head)]
    both = Task(model, trained="scores.*", frozen=["*.bias"])
    assert (both.trained, both.frozen) == (("scores.*",), ("*.bias",))
    assert list(both.parameters()) == ["scores.0.weight", "scores.1.weight"]
    assert all(p.requires_grad for p in model.parameters())  # the model is the caller's
    shared = dict(both.model.named_parameters())
    assert all(shared[n].data_ptr() == p.data_ptr() for n, p in model.named_parameters())
    assert list(both.evaluated().parameters()) == list(both.parameters())
    constants = both.constants(torch.device("cpu"))
    assert constants.keys() | both.parameters().keys() == {*everything}


def test_trained_adds_to_adapters() -> None:
    task = Task(with_adapters(transformer(), 2), trained=("*lora_B*", "scores.0.*"))
    names = list(task.parameters())
    assert sum("lora_B" in name for name in names) == 11
    assert [name for name in names if "lora" not in name] == ["scores.0.weight", "scores.0.bias"]


def test_a_task_that_changes_nothing_keeps_its_model() -> None:
    model = with_adapters(transformer(), 2)
    assert Task(model, trained=("*lora_*",)).model is model


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"frozen": ("head.*",)}, r"'head.\*' matches no parameter"),
        ({"trained": ("head.*",)}, r"'head.\*' matches no parameter"),
        ({"frozen": ("*",)}, "frozen leaves none of .* to train"),
        ({"trained": ("scores.*",), "frozen": ("scores.*",)}, "frozen leaves none of "),
    ],
)
def test_patterns_that_leave_nothing_or_fit_nothing_are_refused(
    patterns: dict, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Task(transformer(), **patterns)


def test_users_with_adapters_go_side_by_side_and_share_what_is_frozen() -> None:
    task = Task(with_adapters(transformer(), 2, layers=["blocks.*"]))
    found = SideBySideModel.of(task, task.model, WORDS[:2], WORDS[:2])
    assert found.weights.keys() == task.parameters().keys()
    adapted = [layer for layer in task.model.modules() if isinstance(layer, Adapted)]
    assert len(found.layers) == len(found.weights) == 2 * len(adapted)
    assert found.kept.tensors.keys() == task.constants(torch.device("cpu")).keys()


# Whole runs.

FILE = """
name = "adapted"
rounds = 2
data = {{ name = "tests.test_adapters:people" }}

[model]
name = "simulations.transformer:CharacterTransformer"
options = {{ alphabet = 10, length = 8, width = 8 }}
{more}

[local]
learning_rate = 0.5
batch_size = 4

[privacy]
sampling_probability = 0.5
epsilon = 8.0
delta = 1e-3

[[clipping.groups]]
name = "B"
tensors = ["*lora_B*"]
norm = 0.3

[[clipping.groups]]
name = "rest"
tensors = ["*"]
norm = 0.2
"""
ADAPTERS = "adapters = { rank = 2, alpha = 8.0, layers = ['blocks.*'] }\nseed = 3"


def people() -> fedpriv.Population:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 10, (2, 60, 8))
    return fedpriv.Population.from_arrays(x, y, np.arange(60) // 5, held_out=(x[:6], y[:6]))


def test_a_file_trains_adapters_in_groups_of_their_own(tmp_path: Path) -> None:
    file, out = tmp_path / "adapted.toml", tmp_path / "run"
    file.write_text(FILE.format(more=ADAPTERS))
    assert (done := commandline.fedpriv("simulate", file, "--out", out)).returncode == 0, done
    base = build_model(
        "simulations.transformer:CharacterTransformer", {"alphabet": 10, "length": 8, "width": 8}, 3
    )
    adapted = with_adapters(base, 2, 8.0, ["blocks.*"], seed=3)
    with Ledger.open(RunFolder(out).ledger) as ledger:
        queries = ledger.spent()[0].queries
    norms = {query.group: query.clipping_norm for query in queries}
    assert norms == {"B": 0.3, "rest": 0.2, "metrics/contributors": 1.0}
    from safetensors.torch import load_file

    released, public = load_file(RunFolder(out).model), adapted.state_dict()
    assert released.keys() == public.keys()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {n for n, t in released.items() if not torch.equal(t, public[n])} == trained
    adapted.load_state_dict(released)
    whole = merge_adapters(adapted)
    assert not torch.allclose(whole(WORDS), base(WORDS))


def test_a_node_builds_the_task_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "adapted.toml"
    file.write_text(FILE.format(more=f"{ADAPTERS}\ntrained = ['*lora_*', 'scores.1.*']"))
    config = load_config(file)
    welcome = wire.Welcome("people", 2, np.arange(1), task_of(config))
    described = wire.WELCOME.decode(wire.WELCOME.encode(welcome)).task
    ours, theirs = method_of(config).task, build_task(**vars(described))
    assert ours.parameters().keys() == theirs.parameters().keys()
    assert "scores.1.bias" in ours.parameters()
    pairs = zip(ours.model.state_dict().items(), theirs.model.state_dict().items(), strict=True)
    for (name, tensor), (same, other) in pairs:
        assert name == same
        assert torch.equal(tensor, other)


def test_a_run_in_python_gives_a_whole_model(tmp_path: Path) -> None:
    base = transformer()
    task = Task(with_adapters(base, 2, 8.0, ["blocks.*"]))
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.3))
    run = fedpriv.simulate(
        people(),
        task,
        mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2),
        local=fedpriv.SGD(0.5, batch_size=4, epochs=1),
        out=tmp_path / "run",
        quiet=True,
    )
    moved = {
        name
        for name, p in run.model.named_parameters()
        if not torch.equal(p, dict(task.model.named_parameters())[name])
    }
    assert moved == {n for n, p in task.model.named_parameters() if p.requires_grad}
    merged = merge_adapters(run.model)
    torch.testing.assert_close(merged(WORDS), run.model(WORDS), rtol=1e-4, atol=1e-5)
    assert list(merged.state_dict()) == list(base.state_dict())


class Halved(nn.Module):
    """A frozen layer of bfloat16 below one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x.bfloat16()).float())


def test_a_run_is_of_its_frozen_numbers_of_bfloat16_too(tmp_path: Path) -> None:
    x, y = np.eye(6, dtype=np.float32).repeat(2, 0), np.arange(12) % 3
    people = fedpriv.Population.from_arrays(x, y, np.arange(12), held_out=(x, y))
    mechanism = fedpriv.Mechanism.poisson(q=0.5).calibrate(epsilon=8.0, delta=1e-2, rounds=1)

    def train(model: nn.Module, *, resume: bool) -> fedpriv.Run:
        task, out = Task(model), tmp_path / "run"
        return fedpriv.simulate(people, task, mechanism, out=out, quiet=True, resume=resume)

    model = Halved()
    assert train(model, resume=False).model.base.weight.equal(model.base.weight)
    train(model, resume=True)
    with torch.no_grad():
        model.base.bias[0] += 1.0
    with pytest.raises(InvalidValueError, match="can only be resumed with the plan it began with"):
        train(model, resume=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("frozen = ['heads.*']", "'heads.*' matches no parameter"),
        ("frozen = ['*']", "frozen leaves none of"),
        ("adapters = { rank = 2, layers = ['attention'] }", "'attention' matches no linear layer"),
        ("adapters = { rank = 0 }", "model.adapters.rank is 0"),
        ("adapters = { ranks = 2 }", "did you mean"),
    ],
)
def test_a_file_that_fits_nothing_is_refused(more: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "adapted.toml"
    file.write_text(FILE.format(more=more))
    done = commandline.fedpriv("simulate", file, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_an_adapted_task_passes_the_checks_of_a_task() -> None:
    check_task(Task(with_adapters(Tied(), 2)), {"x": WORDS.numpy(), "y": WORDS.numpy()})
