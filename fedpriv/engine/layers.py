"""Which layers a task trains, and whether they can have weights for each user."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine.lanes import stand_in
from fedpriv.engine.task import Task
from fedpriv.errors import ModelError

_TOUCHES = 40  # multiplications in the time that it takes to change a weight in memory
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Layers:
    """All layers of a model that hold what it trains.

    Attributes:
        model: the model.
        trained: the layers by name.
        rows: for linear layers that alone hold their parameters and are called once in a forward
            pass, how many rows of an example go through them.
    """

    model: nn.Module
    trained: Mapping[str, nn.Module]
    rows: Mapping[str, int]

    def low_rank(self, steps: int, batch: int) -> dict[str, nn.Linear]:
        """Linear layers for which low-rank corrections cost less than weights for each user.

        Args:
            steps: of each user.
            batch: examples in each step.
        """
        found = {}
        for name, rows in self.rows.items():
            layer = self.trained[name]
            if isinstance(layer, nn.Linear):
                n, i, o = rows * steps * batch, layer.in_features, layer.out_features
                # Products of all rows with each other, against weights that change in each step.
                if n * n * (i + o) <= _TOUCHES * steps * i * o:
                    found[name] = layer
        return found

    def parameters(self, name: str) -> list[str]:
        """Names in the model of a layer's parameters."""
        own = self.trained[name].named_parameters(recurse=False)
        return [f"{name}.{parameter}" if name else parameter for parameter, _ in own]

    def replaced(self, others: Mapping[str, nn.Module]) -> nn.Module:
        """A model with some layers replaced, and all other trained ones by `stand_in`.

        All tensors are shared with the model.
        """
        memo: dict[int, object] = {
            id(t): t for t in (*self.model.parameters(), *self.model.buffers())
        }
        for name, layer in self.trained.items():
            memo[id(layer)] = others[name] if name in others else stand_in(layer)
        return copy.deepcopy(self.model, memo)


def layers_of(task: Task, example: torch.Tensor) -> Layers | None:
    """The layers of a task, if they tell users apart in all that it trains.

    Args:
        task: the task.
        example: [1, …] one input that the model accepts.

    Returns:
        None if a trained layer is of no known kind or is trained in part, or if the model does
        anything with a trained layer but call it.
    """
    layers = _trained(task.model)
    if layers is None:
        return None
    with _evaluating(task.model):
        rows = _rows_if_told_apart(layers, example)
    return None if rows is None else replace(layers, rows=rows)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without dropout; a copy would not do, as it may still call the original."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _trained(model: nn.Module) -> Layers | None:
    trained = {}
    for name, layer in model.named_modules():
        asked = [p.requires_grad for p in layer.parameters(recurse=False)]
        if any(asked):
            try:
                stand_in(layer)
            except ModelError:
                return None
            trained[name] = layer
            if not all(asked):
                return None
    return Layers(model, trained, {})


def _rows_if_told_apart(layers: Layers, example: torch.Tensor) -> dict[str, int] | None:
    """`Layers.rows`, if two users with different weights get what each would get alone."""
    calls: dict[str, list[int]] = {n: [] for n, e in layers.trained.items() if type(e) is nn.Linear}
    model = layers.replaced({})
    for name, seen in calls.items():
        model.get_submodule(name).register_forward_hook(partial(_count_rows, seen))
    generator = torch.Generator().manual_seed(0)
    shape = (2, *example.shape[1:])
    x = torch.zeros(shape, dtype=example.dtype)
    if x.is_floating_point():
        x = torch.randn(shape, generator=generator, dtype=example.dtype)
    one = {name: p.detach() for name, p in layers.model.named_parameters() if p.requires_grad}
    other = {n: p + torch.randn(p.shape, generator=generator) / 8 for n, p in one.items()}
    both = {name: torch.stack([p, other[name]]) for name, p in one.items()}
    try:
        with torch.no_grad():
            alone = torch.cat([functional_call(layers.model, own, (x,)) for own in (one, other)])
            together = functional_call(model, both, (torch.cat([x, x]),))
        off = (together - alone).abs().max()
    except Exception:  # whatever the model does with its layers, it is not only to call them
        return None
    if together.shape != alone.shape or not bool(off <= _TOLERANCE * alone.abs().max()):
        return None
    holders = Counter(
        id(p) for layer in layers.trained.values() for p in layer.parameters(recurse=False)
    )
    return {
        name: seen[0] // len(x) // 2
        for name, seen in calls.items()
        if len(seen) == 1 and all(holders[id(p)] == 1 for p in layers.trained[name].parameters())
    }


def _count_rows(seen: list[int], _layer: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    seen.append(output[..., 0].numel())
