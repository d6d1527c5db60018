"""Which models can train many users side by side: those that keep their examples apart."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine.layers import BatchedModel, Layers, batched_layer
from fedpriv.engine.task import Task
from fedpriv.errors import ModelError

_TOLERANCE = 1e-4
_EACH = 2  # examples of a user that is tried
# Which of the users of `_users_like` are tried together: mixing may show only at an extreme.
_TRIALS = ((0, 1, 2), (4, 3, 0), (3, 4, 0))


def separable_layers(task: Task, x: torch.Tensor, y: torch.Tensor) -> Layers | None:
    """The layers of a task, if they keep users apart in all that it trains.

    Examples of several users are to go through the model side by side, so it must work on each by
    itself. Tried with random ones like one input [1, …] and target, what a user gets must be what
    it would get alone, and the same to the last bit whatever the examples beside its own are.

    Returns:
        None if a trained layer is of no known kind or is trained in part, if the model does
        anything with a trained layer but call it, or if model or loss mix examples.
    """
    trained = {}
    try:
        for name, layer in task.model.named_modules():
            asked = [p.requires_grad for p in layer.parameters(recurse=False)]
            if any(asked):
                batched_layer(layer)
                trained[name] = layer
                if not all(asked):
                    return None
    except ModelError:
        return None
    try:
        with torch.no_grad():
            layers = Layers(task.model, trained, {})
            layers = replace(layers, alike=_alike(layers, x))
            rows = _rows_if_separate(layers, task, x, y)
    except Exception:  # whatever the model does with its layers, it is not only to call them
        return None
    return None if rows is None else replace(layers, rows=rows)


def _rows_if_separate(
    layers: Layers, task: Task, x: torch.Tensor, y: torch.Tensor
) -> dict[str, int] | None:
    """`Layers.rows`, if a user's outputs and losses are its own."""
    calls: dict[str, list[int]] = {n: [] for n, e in layers.trained.items() if type(e) is nn.Linear}
    model = BatchedModel(layers, ())
    for name, seen in calls.items():
        model.model.get_submodule(name).register_forward_hook(partial(_count_rows, seen))
    inputs, targets = _users_like(x), _users_like(y)
    for users in _TRIALS:
        if not _separate(task, model, [inputs[u] for u in users], [targets[u] for u in users]):
            return None
    holders = Counter(
        id(p) for layer in layers.trained.values() for p in layer.parameters(recurse=False)
    )
    return {
        name: seen[0] // (2 * _EACH)
        for name, seen in calls.items()
        if len(seen) == 2 * len(_TRIALS)
        and all(holders[id(p)] == 1 for p in layers.trained[name].parameters())
    }


def _count_rows(seen: list[int], _layer: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    seen.append(output[..., 0].numel())


def _alike(layers: Layers, x: torch.Tensor) -> frozenset[str]:
    """Embeddings whose words keep their shape when there are more examples."""
    embeddings = [n for n, layer in layers.trained.items() if type(layer) is nn.Embedding]
    shapes: dict[str, set[torch.Size]] = {name: set() for name in embeddings}

    def note(name: str, _layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        shapes[name].add(inputs[0].shape)

    examples = torch.cat(_users_like(x)[:2])
    with ExitStack() as hooks:
        for name in embeddings:
            layer = layers.trained[name]
            hooks.enter_context(layer.register_forward_pre_hook(partial(note, name)))
        for count in (_EACH, _EACH + 1) if embeddings else ():
            layers.model(examples[:count])
    return frozenset(name for name, seen in shapes.items() if len(seen) == 1)


def _separate(
    task: Task, model: BatchedModel, x: list[torch.Tensor], y: list[torch.Tensor]
) -> bool:
    """Whether the first of three users gets what it gets alone, beside the second and the third."""
    generator = torch.Generator().manual_seed(0)
    one = task.trainable()
    other = {n: p + torch.randn(p.shape, generator=generator) / 8 for n, p in one.items()}
    both = {name: torch.stack([p, other[name]]) for name, p in one.items()}
    alone = torch.cat(
        [functional_call(task.model, own, (x,)) for own, x in zip((one, other), x, strict=False)]
    )
    together, beside = (model.outputs(both, {}, torch.cat([x[0], second])) for second in x[1:])
    if together.shape != alone.shape:
        return False
    losses, losses_beside = (
        task.losses_of(outputs, torch.cat([y[0], second]))[:_EACH]
        for outputs, second in zip((together, beside), y[1:], strict=True)
    )
    close = (together - alone).abs().max() <= _TOLERANCE * alone.abs().max()
    return (
        bool(close)
        and torch.equal(together[:_EACH], beside[:_EACH])
        and torch.equal(losses, losses_beside)
    )


def _users_like(example: torch.Tensor) -> list[torch.Tensor]:
    """Examples of several users, [2, …] each, for an example [1, …]: random, zeros, ones."""
    generator = torch.Generator().manual_seed(1)
    shape = (_EACH, *example.shape[1:])
    if example.is_floating_point():
        drawn = [torch.randn(shape, generator=generator) for _ in range(3)]
    else:
        drawn = [torch.randint(2, shape, generator=generator) for _ in range(3)]
    return [e.to(example.dtype) for e in (*drawn, torch.zeros(shape), torch.ones(shape))]
