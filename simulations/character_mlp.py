"""A small feed-forward model of characters."""

import torch
from torch import nn
from torch.nn import functional


class CharacterMLP(nn.Module):
    """The model of Bengio et al. 2003 ("A neural probabilistic language model") on characters.

    One hidden layer reads the concatenated embeddings of the last `context` characters. A text is
    padded with character 0 before its beginning. The model maps characters [B, T], for any length
    T, to scores [B, alphabet, T]. It has 11,936 parameters by default.
    """

    def __init__(
        self, alphabet: int = 96, context: int = 4, width: int = 16, hidden: int = 64
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(alphabet, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.scores = nn.Linear(hidden, alphabet)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, alphabet, T] of the next character at each position."""
        windows = functional.pad(text, (self.context - 1, 0)).unfold(1, self.context, 1)
        hidden = torch.tanh(self.hidden(self.characters(windows).flatten(2)))
        scores: torch.Tensor = self.scores(hidden).transpose(1, 2)
        return scores
