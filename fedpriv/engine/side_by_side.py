"""Users side by side: in lanes of W rows, each with weights of its own.

All users of a group begin together, those with the most steps first. Users rest who have taken
their last step, and where fewer lanes hold the others, these go on in fewer. A batch of more than W
rows is several slices, whose gradients are added in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedpriv.engine.arithmetic import (
    Activations,
    generators_apart,
    own_generators,
    seed_generators,
)
from fedpriv.engine.descent import Descent, is_plain
from fedpriv.engine.examples import Batches, Examples
from fedpriv.engine.kept import KeptModel, trained_copy
from fedpriv.engine.lanes import ROUNDED, Derived, Done, Lanes, MixingError, Rows, Weights
from fedpriv.engine.products import OWN_FUNCTIONS, LowRank
from fedpriv.engine.schedule import mask_words
from fedpriv.engine.task import Inputs, RoundParameters, Task, each_input, outputs_of
from fedpriv.privacy.clipping_torch import BatchedTensor, TorchTensors, Updates
from fedpriv.training.request import LocalTraining

_FEW_STEPS = (1, 2, 3, 4, 6, 8)
_BLOCK = 64  # rows whose products are added up at a time
# Multiplications in the time in which a step changes a weight in memory, and how many weights a
# layer has at least for this to matter.
_TOUCHES, _LARGE = 40, 2**15


def step_class(steps: int) -> int:
    """The least of a few numbers of steps that is no smaller; 0 of more steps than all of them.

    Where layers learn without weights, users of one class go together: the sums of all take as much
    time and memory as those of the longest.
    """
    return next((few for few in _FEW_STEPS if few >= steps), 0)


@dataclass(frozen=True)
class Layer:
    """A layer that alone holds its parameters and is called once in a forward pass."""

    keys: tuple[str, ...]  # names of its weight and bias
    shape: torch.Size  # of its weight
    rows: int  # how many of an example go through it

    def is_lean(self, steps: int, rows: int) -> bool:
        """Whether it costs less if it learns without weights in steps of so many rows."""
        (o, i), n = self.shape, self.rows * rows * steps
        # Products of all rows with each other, against weights that change in each step.
        return i * o >= _LARGE and n * n * (i + o) <= _TOUCHES * steps * i * o

    def learning(
        self, start: TorchTensors, users: int, steps: int, width: int, rate: float
    ) -> LowRank:
        """What learns in the place of its weights, for users with so many rows in each step."""
        weight, *bias = (start[key] for key in self.keys)
        rows = self.rows * width
        block = (step_class(steps) or max(1, _BLOCK // rows)) * rows
        return LowRank(weight, bias[0] if bias else None, users, steps * rows, rate, block)


@dataclass(frozen=True)
class SideBySideModel:
    """A copy of a task's model in which each user has weights of its own."""

    kept: KeptModel
    weights: Mapping[str, Weights]  # by name, the parameters that users train
    layers: tuple[Layer, ...] = ()
    numbers: int = 0  # computed for an example in the forward pass
    rounded: tuple[int, ...] = ()  # how many of them functions give that may round otherwise

    @classmethod
    def of(cls, task: Task, device: torch.device, x: Inputs, y: Tensor) -> "SideBySideModel":
        """That of a task, tried on a few rows; MixingError if it may not keep users apart."""
        model = trained_copy(task.model, device)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = {id(p): Weights.of(p.detach()[None]) for p in trained.values()}
        for module in model.modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise MixingError("hooks of gradients are not known to keep users apart")
            for name, parameter in module._parameters.items():
                if id(parameter) in weights:
                    module._parameters[name] = weights[id(parameter)]  # type: ignore[assignment]
        constants = (*model.named_parameters(), *model.named_buffers())
        kept = KeptModel(model, [name for name, _ in constants if name not in trained])
        named = {name: weights[id(p)] for name, p in trained.items()}
        versions = {name: t._version for name, t in kept.tensors.items()}
        done, own = list[Done](), {n: p.detach()[None].requires_grad_() for n, p in trained.items()}
        derived = Derived(*(x.values() if isinstance(x, dict) else [x]), y, *own.values())
        lanes = Lanes(1, lambda: torch.zeros(1, dtype=torch.int64, device=device), done, derived)
        with generators_apart(device):
            seed_generators(bytes(32), 0, device)
            before = own_generators()
            try:
                with derived:
                    cls(kept, named).losses(task, lanes, own, x, y)
            except Exception as error:  # alone it may be trained
                raise MixingError(str(error)) from error
            if own_generators() != before:
                raise MixingError("numbers that are drawn for all users do not keep them apart")
        if any(t._version != versions[name] for name, t in kept.tensors.items()):
            raise MixingError("a model that changes its buffers keeps something of other users")
        kept.put_back()
        rounded = [d.found for d in done if d.call.name in ROUNDED]
        counts = {found.numel() // len(y) for found in rounded}
        layers = tuple(_layers(named, done, len(y)))
        return cls(kept, named, layers, _numbers(done) // len(y), tuple(sorted(counts)))

    def losses(
        self,
        task: Task,
        lanes: Lanes,
        own: TorchTensors,
        x: Inputs,
        y: Tensor,
        activations: Activations = "float32",
        learning: Mapping[str, LowRank] | None = None,
    ) -> Tensor:
        """Losses of rows x, [l·W], by users' own parameters [l, *shape]."""
        self.kept.put_back()  # what it keeps of a slice is of others, and of as many as there are
        with lanes, torch.autograd.graph.disable_saved_tensors_hooks("users go side by side"):
            outputs = self._outputs(own, x, activations, learning or {})
            losses = task.losses_of(outputs, y.as_subclass(Rows))
        if not isinstance(losses, Rows):
            raise MixingError("losses that are not of rows are not known to keep users apart")
        _refuse_other_gradients(losses)
        return losses.as_subclass(Tensor)

    def outputs(self, own: TorchTensors, users: int, x: Inputs) -> Tensor:
        """Outputs for rows x, [l·W, …], by users' own parameters [l, *shape]."""
        with Lanes(users):
            outputs = self._outputs(own, x, "float32", {})
        return outputs.as_subclass(Tensor)

    def _outputs(
        self,
        own: TorchTensors,
        x: Inputs,
        activations: Activations,
        learning: Mapping[str, LowRank],
    ) -> Tensor:
        for name, weights in self.weights.items():
            weights.learning = learning.get(name)
            weights.own = own.get(name, weights.own)
        try:
            rows = each_input(lambda t: t.as_subclass(Rows), x)
            return outputs_of(self.kept.model, rows, activations)
        finally:  # the copy must not keep a user's parameters
            for weights in self.weights.values():
                weights.own, weights.learning = torch.empty(0), None

    def lean(self, local: LocalTraining, steps: int, slices: int, width: int) -> tuple[int, ...]:
        """Which layers learn without weights for a user with so many steps and slices in each."""
        if not is_plain(local) or slices > 1:
            return ()
        layers = enumerate(self.layers)
        return tuple(n for n, layer in layers if layer.is_lean(steps, width))


def _refuse_other_gradients(losses: Tensor) -> None:
    """Refuse functions of the model whose gradients it computes itself, for all rows at once."""
    seen, waiting = set[object](), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        forward = getattr(node, "_forward_cls", None)
        if forward is not None and forward not in OWN_FUNCTIONS:
            name = forward.__name__
            raise MixingError(f"the gradient of {name} is not known to keep users apart")
        waiting += [each for each, _ in node.next_functions]


def _layers(weights: Mapping[str, Weights], done: Sequence[Done], examples: int) -> Iterator[Layer]:
    """Layers that alone hold their weight and bias, and are called once."""
    uses = {
        n: [d.call for d in done if any(t is w for t in d.call.tensors)] for n, w in weights.items()
    }
    names = {id(w): name for name, w in weights.items()}
    for key, calls in uses.items():
        call = calls[0] if len(calls) == 1 else None
        if call is None or call.name != "linear":
            continue
        x, weight, bias = call.given("input", "weight", "bias")
        own = names.get(id(bias)) if bias is not None else None
        if weight is not weights[key] or (bias is not None and (own is None or len(uses[own]) > 1)):
            continue
        keys = (key,) if own is None else (key, own)
        yield Layer(keys, weight.shape, x.numel() // x.shape[-1] // examples)


def _numbers(done: Sequence[Done]) -> int:
    """How many numbers were computed, patches of convolutions included."""
    total = 0
    for each in done:
        made, call = each.found, each.call
        if isinstance(made, Rows) and not made._is_view():
            total += made.numel()
        if call.name in ("conv1d", "conv2d"):
            _, weight = call.given("input", "weight")
            total += made.numel() // weight.shape[0] * weight[0].numel()
    return total


class Group:
    """Users who train side by side, from their common start to what each has learnt."""

    def __init__(
        self,
        model: SideBySideModel,
        task: Task,
        start: RoundParameters,
        examples: Examples,
        lean: Sequence[int],
        local: LocalTraining,
        activations: Activations,
    ) -> None:
        self._model, self._task, self._examples = model, task, examples
        self._activations, self._slices = activations, examples.schedule.slices
        self._names = [*start.parameters]
        model.kept.put_back()
        model.kept.copy_from(start.constants, model.kept.tensors)
        self._lean = [model.layers[number] for number in lean]
        steps, width = len(examples.slices), examples.schedule.width
        given = start.parameters, examples.lanes, steps, width, local.rate
        self._learning = {layer.keys[0]: layer.learning(*given) for layer in self._lean}
        without = {key for layer in self._lean for key in layer.keys}
        # Parameters lie in memory as their gradients do: those of convolutions by patches.
        own = {
            n: p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p
            for n, p in start.parameters.items()
            if n not in without
        }
        self._descent = Descent(own, local, start.control, start.personal)

    def trained(self, lanes: Sequence[Sequence[int]]) -> Updates:
        """How far users move: [L, *shape] by name.

        Also in personal parameters, and in control variates where the algorithm has some. For each
        step and slice, `lanes` says in how many lanes users go on who have rows in it.
        """
        step = 0
        for window in self._examples.windows([of_slices[0] for of_slices in lanes]):
            shares = window.shares(self._task, self._slices)
            for first in range(0, shares.shape[1], self._slices):
                self._take_step(step, window, first, shares, lanes[step])
                step += 1
        learnt: dict[str, BatchedTensor] = {**self._descent.moved()}
        for layer in self._lean:
            learnt |= zip(layer.keys, self._learning[layer.keys[0]].updates(), strict=True)
        return {name: learnt.pop(name) for name in self._names} | learnt

    def _present(self, real: Tensor) -> Tensor | None:
        """Which lanes have rows that count, [l]; None: all that have any."""
        if not self._examples.rests:
            return None
        present = real.amax(1) > 0.0
        return None if real.device.type == "cpu" and bool(present.all()) else present

    def _take_step(
        self, step: int, window: Batches, first: int, shares: Tensor, lanes: Sequence[int]
    ) -> None:
        parameters, gradients = self._descent.parameters(lanes[0]), TorchTensors()
        for number, users in enumerate(lanes):
            present = self._present(window.real[:users, first + number])
            for layer in self._learning.values():
                layer.begin(users, present)

            def rows(t: Tensor, number: int = number, users: int = users) -> Tensor:
                return t[:users, first + number].flatten(0, 1)

            x, y = each_input(rows, window.x), rows(window.y)
            leaves = {name: p[:users].detach().requires_grad_() for name, p in parameters.items()}
            words = self._examples.words[:users]
            mode = Lanes(users, partial(mask_words, words, step, number))
            losses = self._model.losses(
                self._task, mode, leaves, x, y, self._activations, self._learning
            )
            given = [*leaves.values(), *(layer.probe for layer in self._learning.values())]
            found = torch.autograd.grad(
                (losses * rows(shares)).sum(), given, materialize_grads=True
            )
            _add(gradients, dict(zip(leaves, found, strict=False)), present)
        active = self._present(window.real[: lanes[0], first])
        self._descent.step(parameters, gradients, active)
        for layer in self._learning.values():
            layer.end_step()


def _add(total: TorchTensors, gradients: TorchTensors, present: Tensor | None) -> None:
    """Add what users are present for, [l, *shape], to the gradients of the slices before."""
    for name, gradient in gradients.items():
        if name not in total:
            total[name] = gradient
            continue
        held = total[name][: len(gradient)]
        added = held + gradient
        if present is not None:
            added = torch.where(present.view(-1, *[1] * (added.dim() - 1)), added, held)
        held.copy_(added)
