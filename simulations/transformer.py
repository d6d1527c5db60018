"""A small transformer over characters."""

import math

import torch
from torch import nn


class CharacterTransformer(nn.Module):
    """A causal transformer with normalisation before each sublayer, as in Radford et al. 2019.

    The model maps characters [B, T], with T at most `length`, to scores [B, alphabet, T]. By
    default, it has two blocks and 115,040 parameters.
    """

    def __init__(
        self, alphabet: int = 96, length: int = 40, width: int = 64, heads: int = 2, blocks: int = 2
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, alphabet))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, alphabet, T] of the next character at each position."""
        # Positions are repeated for each text, since the engine needs the axis of examples.
        places = torch.arange(text.shape[1], device=text.device).expand_as(text)
        hidden = self.characters(text) + self.places(places)
        scores: torch.Tensor = self.scores(self.blocks(hidden)).transpose(1, 2)
        return scores


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attended, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        parts = self.attended(self.before_attention(hidden)).view(shape)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        products = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        heads = products.masked_fill(mask, -math.inf).softmax(3) @ value
        hidden = hidden + self.mixed(heads.transpose(1, 2).reshape(batch, length, width))
        output: torch.Tensor = hidden + self.layers(self.before_layers(hidden))
        return output
