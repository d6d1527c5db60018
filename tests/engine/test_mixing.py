"""Models and losses that mix examples: their users must not train side by side."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.engine.checks import check_task
from fedpriv.engine.layers import batched_model
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.errors import ModelError
from fedpriv.models import mlp

WORDS = 7
SIX, SENTENCE = torch.zeros(1, 6), torch.zeros(1, 4, dtype=torch.int64)
ONE = torch.zeros(1, dtype=torch.int64)


class Mixing(nn.Module):
    """Adds to each example a little of what all examples beside it are."""

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x + self.share * x.mean(0, dtype=torch.float32).to(x.dtype))


class Sorting(nn.Module):
    """Words less the least of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x - x.min()).transpose(1, 2)


def balanced(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses that weigh less, the more examples beside are of the same class."""
    return cross_entropy(outputs, targets) / (targets[:, None] == targets).sum(1)


def centred(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = cross_entropy(outputs, targets)
    return losses - 1e-3 * losses.mean()


MIXED = pytest.mark.parametrize(
    ("model", "loss", "example"),
    [
        (Mixing(nn.Linear(6, 3), 1.0), cross_entropy, SIX),
        (Mixing(nn.Linear(6, 3), 1e-6), cross_entropy, SIX),
        (Mixing(mlp(), 1e-3), cross_entropy, torch.zeros(1, 1, 28, 28)),
        (Sorting(), cross_entropy, SENTENCE),
        (nn.Linear(6, 3), balanced, SIX),
        (nn.Linear(6, 3), centred, SIX),
    ],
)


@MIXED
def test_users_do_not_train_side_by_side_where_examples_are_mixed(
    model: nn.Module, loss: Callable[..., torch.Tensor], example: torch.Tensor
) -> None:
    """Else one user's data would be in what another sends, which no clipping could bound."""
    assert (
        batched_model(Task(model, loss), example, SENTENCE if example is SENTENCE else ONE) is None
    )


@MIXED
def test_what_mixes_examples_is_no_task(
    model: nn.Module, loss: Callable[..., torch.Tensor], example: torch.Tensor
) -> None:
    """Metrics are measured on the examples of many users at once."""
    rows = torch.arange(1, 4).view(3, *[1] * (example.dim() - 1)).expand(3, *example.shape[1:])
    x = rows.to(example.dtype)
    y = torch.tensor([0, 1, 2]) if example is not SENTENCE else rows % 3
    with pytest.raises(ModelError, match="model or loss mix examples"):
        check_task(Task(model, loss), {"x": x.numpy(), "y": y.numpy()})


def test_dropout_mixes_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    rows = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    check_task(Task(model, cross_entropy), {"x": rows, "y": np.arange(5) % 3})
