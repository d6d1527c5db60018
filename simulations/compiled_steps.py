"""What `engine.compile` gains: rounds with compiled local steps beside rounds without.

Models have something that the engine has no layer for, and train 100 users of 50 images, with
batches of 10, for one epoch. Both sides run in alternation, and medians are printed, with the
seconds that the first round took longer and the rounds after which these are earned back.

    python -m simulations.compiled_steps [--models NAME…]
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from simulations.throughput import Work, engine_round, example_losses, measure, request_of


class OwnGRU(nn.Module):
    """A gated recurrent unit (Cho et al. 2014), written out; reads an image row by row."""

    def __init__(self, inputs: int = 28, hidden: int = 64) -> None:
        super().__init__()
        self.of_input = nn.Parameter(torch.randn(inputs, 3 * hidden) / inputs**0.5)
        self.of_state = nn.Parameter(torch.randn(hidden, 3 * hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.zeros(3 * hidden))
        self.last = nn.Linear(hidden, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1, 28, 28] → [B, 10]."""
        given = images.flatten(1, 2) @ self.of_input + self.bias
        state = given.new_zeros(len(images), len(self.of_state))
        for row in given.unbind(1):
            r, z, n = row.chunk(3, -1)
            of_r, of_z, of_n = (state @ self.of_state).chunk(3, -1)
            keep = torch.sigmoid(z + of_z)
            new = torch.tanh(n + torch.sigmoid(r + of_r) * of_n)
            state = (1.0 - keep) * new + keep * state
        result: torch.Tensor = self.last(state)
        return result


class CellLSTM(nn.Module):
    """`torch.nn.LSTMCell`, row by row."""

    def __init__(self, inputs: int = 28, hidden: int = 64) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, hidden)
        self.last = nn.Linear(hidden, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1, 28, 28] → [B, 10]."""
        state = cell = images.new_zeros(len(images), self.cell.hidden_size)
        for row in images.flatten(1, 2).unbind(1):
            state, cell = self.cell(row, (state, cell))
        result: torch.Tensor = self.last(state)
        return result


class ScaledResiduals(nn.Module):
    """Four layers, each scaled by a vector that is learnt too (Touvron et al. 2021, LayerScale)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((width,), 0.1) for _ in range(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1, 28, 28] → [B, 10]."""
        x = torch.relu(self.first(images.flatten(1)))
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + scale * torch.tanh(block(x))
        result: torch.Tensor = self.last(x)
        return result


class Attention(nn.Module):
    """A block of four heads over a tensor of words, [B, words, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.found = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        parts = self.asked(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind(0)
        shares = torch.softmax(queries @ keys.mT / keys.shape[-1] ** 0.5, -1)
        x = x + self.found((shares @ values).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.between(x))))
        return result


class VisionTransformer(nn.Module):
    """16 patches, with a class token and places that are learnt (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, stride=7)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(17, width) / 50)
        self.blocks = nn.Sequential(Attention(width), Attention(width))
        self.last = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1, 28, 28] → [B, 10]."""
        words = self.patches(images).flatten(2).mT
        words = torch.cat([self.token.expand(len(images), -1, -1), words], 1) + self.places
        result: torch.Tensor = self.last(self.blocks(words)[:, 0])
        return result


def depthwise() -> nn.Module:
    """A convolution for all channels, and two of one channel each (Howard et al. 2017)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 32, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.Conv2d(32, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "own-gru": OwnGRU,
    "lstm-cell": CellLSTM,
    "transformer": VisionTransformer,
    "residuals": ScaledResiduals,
    "depthwise": depthwise,
}


def compare(work: Work) -> tuple[float, float, float]:
    """Seconds to compile, of a round without, and of a round with compiled steps."""
    torch.manual_seed(0)
    users, task = work.population, Task(work.model(), example_losses)
    request, cpu = request_of(task, users), torch.device("cpu")
    plain, compiled = (
        partial(engine_round, InProcessTransport(task, users, cpu, 2**27, compiled_for=r), request)
        for r in (0, 10**9)
    )
    began = time.perf_counter()
    compiled()
    first = time.perf_counter() - began
    seconds = measure({"plain": plain, "compiled": compiled})
    return first - seconds["compiled"], seconds["plain"], seconds["compiled"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="compiled local steps beside others")
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=list(MODELS))
    for name in parser.parse_args().models:
        work = Work(MODELS[name], 100, 50, (1, 28, 28))
        compiling, plain, compiled = compare(work)
        gain = plain - compiled
        earned = f"{compiling / gain:.0f}" if gain > 0.0 else "never"
        print(
            f"{name:11} {work.users / plain:6.0f} users/s, compiled {work.users / compiled:6.0f}"
            f"   {plain / compiled:5.2f} ×   compiling {compiling:6.1f} s   rounds {earned}"
        )


if __name__ == "__main__":
    main()
