"""Models of characters: what each score depends on, and users trained side by side."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.side_by_side import SideBySideModel
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.task_checks import check_task
from fedpriv.experiment.models import build_model
from simulations.character_mlp import CharacterMLP

MLP = "simulations.character_mlp:CharacterMLP"
SIZES = {"alphabet": 7, "width": 4}
SMALL = {
    MLP: SIZES | {"context": 3, "hidden": 5},
    "simulations.transformer:CharacterTransformer": SIZES | {"length": 9, "heads": 2, "blocks": 2},
}
TEXT = torch.tensor(np.random.default_rng(0).integers(0, 7, (5, 9)))


@pytest.mark.parametrize("name", SMALL)
def test_a_score_depends_on_what_came_before_alone(name: str) -> None:
    model = build_model(name, SMALL[name], 0)
    scores = model(TEXT)
    assert scores.shape == (5, 7, 9)
    for place in range(9):
        other = TEXT.clone()
        other[:, place] = (other[:, place] + 1) % 7
        changed = ((model(other) - scores).abs().amax((0, 1)) > 1e-6).tolist()
        sees = 3 if name == MLP else 9
        assert changed == [place <= seen < place + sees for seen in range(9)]


def test_the_mlp_by_hand() -> None:
    model = CharacterMLP(alphabet=7, context=3, width=4, hidden=5)
    scores = model(TEXT)
    for row in range(5):
        for place in range(9):
            text = [0, 0, *TEXT[row].tolist()][place : place + 3]
            seen = torch.cat([model.characters.weight[code] for code in text])
            hidden = torch.tanh(model.hidden.weight @ seen + model.hidden.bias)
            expected = model.scores.weight @ hidden + model.scores.bias
            torch.testing.assert_close(scores[row, :, place], expected)


@pytest.mark.parametrize("name", SMALL)
def test_models_are_accepted_and_their_users_go_side_by_side(name: str) -> None:
    task = Task(build_model(name, SMALL[name], 0), cross_entropy)
    check_task(task, {"x": TEXT.numpy(), "y": TEXT.numpy()}, apart=True)
    found = SideBySideModel.of(task, task.model, TEXT[:2], TEXT[:2])
    layers = {n for n, layer in task.model.named_modules() if isinstance(layer, nn.Linear)}
    assert {layer.keys[0].removesuffix(".weight") for layer in found.layers} == layers


@pytest.mark.parametrize("name", SMALL)
def test_each_learns_what_follows_what(name: str) -> None:
    """Sequences in which each character is the one before plus two: predicted without error."""
    model = build_model(name, SMALL[name] | {"width": 16}, 0)
    text = (torch.arange(7)[:, None] + 2 * torch.arange(10)) % 7
    x, y = text[:, :-1], text[:, 1:]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), y)
