"""A model with two inputs, and rows for it."""

import numpy as np
from torch import Tensor, nn

WORDS, LENGTH, WIDTH = 7, 5, 4
NAMES = ("input_ids", "attention_mask")


class Masked(nn.Module):
    """The mean embedding of those words that a mask says are there, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].float()
        hidden = (self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        return self.scores(hidden)


def columns_of(rows: int) -> dict[str, np.ndarray]:
    """Words, masks of texts of 1 to 5 words, and classes."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LENGTH + 1, rows)
    return {
        "input_ids": rng.integers(0, WORDS, (rows, LENGTH)),
        "attention_mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.int64),
        "y": rng.integers(0, 3, rows),
    }
