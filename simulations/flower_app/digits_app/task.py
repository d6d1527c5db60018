"""A model, the rows of each node, training, and accuracy."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

HELD_OUT = 297  # rows of no node


class Net(nn.Module):
    """A linear classifier of digits of 8×8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return scores [rows, 10] of pixels [rows, 64]."""
        scores: torch.Tensor = self.fc(pixels)
        return scores


def load(part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels [rows, 64] and digits [rows] of one of the nodes."""
    pixels, digits = _rows()
    chosen = np.array_split(np.arange(HELD_OUT, len(digits)), parts)[part]
    return pixels[chosen], digits[chosen]


def train(model: nn.Module, rows: tuple[torch.Tensor, torch.Tensor], learning_rate: float) -> float:
    """Train for three passes; return the last loss."""
    pixels, digits = rows
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    loss = torch.zeros(())
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels), digits)
        torch.autograd.backward(loss)
        optimizer.step()
    return loss.item()


def accuracy(model: nn.Module) -> float:
    """Return the accuracy of a model on the rows of no node."""
    pixels, digits = _rows()
    with torch.no_grad():
        right = model(pixels[:HELD_OUT]).argmax(1) == digits[:HELD_OUT]
    return float(right.float().mean())


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, digits = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(digits)
