"""Training users side by side, in lanes of W rows, each with its own weights.

All users of a group begin together, those with the most steps first. When users have taken their
last step, the others continue in fewer lanes, if these suffice. A batch of more than W rows is
split into slices, whose gradients are added in order.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedpriv.engine.arithmetic import (
    Activations,
    generators_apart,
    own_generators,
    seed_generators,
)
from fedpriv.engine.descent import Descent, is_plain
from fedpriv.engine.examples import Batches, Examples
from fedpriv.engine.lanes import ROUNDED, Derived, Done, Lanes, MixingError, Rows, Weights
from fedpriv.engine.leftovers import KeptModel, named_tensors
from fedpriv.engine.products import OWN_FUNCTIONS, LowRank
from fedpriv.engine.schedule import mask_words
from fedpriv.engine.task import Inputs, RoundParameters, Task, each_input, outputs_of
from fedpriv.privacy.clipping_torch import BatchedTensor, TorchTensors, Updates
from fedpriv.training.request import LocalTraining

_FEW_STEPS = (1, 2, 3, 4, 6, 8)
_BLOCK = 64  # rows whose products are added at a time
# Number of multiplications that take as long as updating one weight in a step, and the smallest
# number of weights of a layer to which this matters.
_TOUCHES, _LARGE = 40, 2**15


def step_class(steps: int) -> int:
    """Return the least class that is not below this number of steps; 0 if it exceeds all classes.

    If layers learn without weights, only users of the same class train together, because the sums
    of all users take as much time and memory as those of the user with the most steps.
    """
    return next((limit for limit in _FEW_STEPS if limit >= steps), 0)


@dataclass(frozen=True)
class Layer:
    """A linear layer that shares no parameters, and is called once in a forward pass."""

    keys: tuple[str, ...]  # names of its weight and bias
    shape: torch.Size  # of its weight
    rows: int  # that go through it per example

    def is_lean(self, steps: int, rows: int) -> bool:
        """Return whether learning without weights is faster, in `steps` steps of `rows` rows."""
        (o, i), n = self.shape, self.rows * rows * steps
        # Products of all pairs of rows, against a change of all weights by every step.
        return i * o >= _LARGE and n * n * (i + o) <= _TOUCHES * steps * i * o

    def learning(
        self, start: TorchTensors, users: int, steps: int, width: int, rate: float
    ) -> LowRank:
        """Return a layer that learns without weights, for users with `width` rows in each step."""
        weight, *bias = (start[key] for key in self.keys)
        rows = self.rows * width
        block = (step_class(steps) or max(1, _BLOCK // rows)) * rows
        return LowRank(weight, bias[0] if bias else None, users, steps * rows, rate, block)


@dataclass(frozen=True)
class SideBySideModel:
    """A copy of a task's model in which each user has its own weights."""

    kept: KeptModel
    weights: Mapping[str, Weights]  # trained parameters by name
    layers: tuple[Layer, ...] = ()
    numbers: int = 0  # computed per example in the forward pass
    rounded: tuple[int, ...] = ()  # sizes of results, per example, of functions in `ROUNDED`

    @classmethod
    def of(
        cls, task: Task, working: nn.Module, x: Inputs, y: Tensor, *, training: bool = True
    ) -> "SideBySideModel":
        """Return the model of a task, tried on a few rows; MixingError if it may mix users.

        `working` is a copy of the task's model that is restored before each use. Both share their
        frozen parameters.
        """
        frozen = {id(p): p for p in working.parameters() if not p.requires_grad}
        model, device = copy.deepcopy(working, frozen), y.device
        model = model if training else model.eval()
        originals = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = {id(p): Weights.of(p.detach()[None]) for p in originals.values()}
        for module in model.modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise MixingError("hooks of gradients are not known to keep users apart")
            for name, parameter in module._parameters.items():
                if id(parameter) in weights:
                    module._parameters[name] = weights[id(parameter)]  # type: ignore[assignment]
        kept = KeptModel(model, [name for name in named_tensors(model) if name not in originals])
        named = {name: weights[id(p)] for name, p in originals.items()}
        constants = task.constants(device)
        initial = {name: constants[name] for name in kept.tensors}
        kept.copy_from(initial)
        versions = {name: t._version for name, t in kept.tensors.items()}
        parameters = {n: p.detach()[None].requires_grad_() for n, p in originals.items()}
        derived = Derived(*(x.values() if isinstance(x, dict) else [x]), y, *parameters.values())
        calls = list[Done]()
        lanes = Lanes(1, lambda: torch.zeros(1, dtype=torch.int64, device=device), calls, derived)
        with generators_apart(device=device):
            seed_generators(bytes(32), 0, device)
            states = own_generators()
            try:
                with derived:
                    cls(kept, named).losses(task, lanes, parameters, x, y)
            except Exception as error:  # users may still be able to train alone
                raise MixingError(str(error)) from error
            if own_generators() != states:
                raise MixingError("numbers that are drawn for all users do not keep them apart")
        if any(  # changes through `.data` have no version
            t._version != versions[name] or not torch.equal(t, initial[name])
            for name, t in kept.tensors.items()
        ):
            raise MixingError("a model that changes its buffers keeps data of other users")
        kept.put_back()
        kept.copy_from(initial)  # frees the memory of parameters that NumPy read
        rounded = {result.numel() // len(y) for call, result in calls if call.name in ROUNDED}
        layers = tuple(_layers(named, calls, len(y)))
        return cls(kept, named, layers, _numbers(calls) // len(y), tuple(sorted(rounded)))

    def losses(
        self,
        task: Task,
        lanes: Lanes,
        parameters: TorchTensors,
        x: Inputs,
        y: Tensor,
        activations: Activations = "float32",
        learning: Mapping[str, LowRank] | None = None,
    ) -> Tensor:
        """Return losses of rows x, [l·W], given the parameters of l users, [l, *shape]."""
        self.kept.put_back()  # the state after another slice comes from other users
        with lanes, torch.autograd.graph.disable_saved_tensors_hooks("users go side by side"):
            outputs = self._outputs(parameters, x, activations, learning or {})
            losses = task.losses_of(outputs, y.as_subclass(Rows))
        if not isinstance(losses, Rows):
            raise MixingError("losses not computed from rows are not known to keep users apart")
        _refuse_other_gradients(losses)
        return losses.as_subclass(Tensor)

    def outputs(self, parameters: TorchTensors, users: int, x: Inputs) -> Tensor:
        """Return outputs for rows x, [l·W, …], given the parameters of l users, [l, *shape]."""
        with Lanes(users):
            outputs = self._outputs(parameters, x, "float32", {})
        return outputs.as_subclass(Tensor)

    def _outputs(
        self,
        parameters: TorchTensors,
        x: Inputs,
        activations: Activations,
        learning: Mapping[str, LowRank],
    ) -> Tensor:
        for name, weights in self.weights.items():
            weights.learning = learning.get(name)
            weights.own = parameters.get(name, weights.own)
        try:
            rows = each_input(lambda t: t.as_subclass(Rows), x)
            return outputs_of(self.kept.model, rows, activations)
        finally:  # the model must not keep users' parameters
            for weights in self.weights.values():
                weights.own, weights.learning = torch.empty(0), None

    def lean(self, local: LocalTraining, steps: int, slices: int, width: int) -> tuple[int, ...]:
        """Return the indices of layers that learn without weights, for users with these steps."""
        if not is_plain(local) or slices > 1:
            return ()
        layers = enumerate(self.layers)
        return tuple(n for n, layer in layers if layer.is_lean(steps, width))


def _refuse_other_gradients(losses: Tensor) -> None:
    """Raise MixingError if the model defines gradients itself, which may mix rows."""
    visited, pending = set[object](), [losses.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        forward = getattr(node, "_forward_cls", None)
        if forward is not None and forward not in OWN_FUNCTIONS:
            name = forward.__name__
            raise MixingError(f"the gradient of {name} is not known to keep users apart")
        pending += [parent for parent, _ in node.next_functions]


def _layers(
    weights: Mapping[str, Weights], calls: Sequence[Done], examples: int
) -> Iterator[Layer]:
    """Yield the linear layers that share no weight or bias, and are called once."""
    names = {id(w): name for name, w in weights.items()}
    uses = Counter(id(t) for call, _ in calls for t in call.tensors)
    for call in (call for call, _ in calls if call.name == "linear"):
        x, weight, *bias = (t for t in call.given("input", "weight", "bias") if t is not None)
        if all(id(t) in names and uses[id(t)] == 1 for t in (weight, *bias)):
            keys = tuple(names[id(t)] for t in (weight, *bias))
            yield Layer(keys, weight.shape, x.numel() // x.shape[-1] // examples)


def _numbers(calls: Sequence[Done]) -> int:
    """Return the number of numbers computed, including the patches of convolutions."""
    results = [result for _, result in calls if isinstance(result, Rows)]
    memory = {r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in results}
    total = sum(memory.values()) // 4  # a result may be a view of new memory
    for call, result in calls:
        if call.name in ("conv1d", "conv2d"):
            _, weight = call.given("input", "weight")
            total += result.numel() // weight.shape[0] * weight[0].numel()
    return total


class Group:
    """Users who train side by side, from their common start to their updates."""

    def __init__(
        self,
        model: SideBySideModel,
        start: RoundParameters,
        examples: Examples,
        activations: Activations,
    ) -> None:
        self._model, self._task, self._examples = model, examples.task, examples
        self._activations, self._slices = activations, examples.schedule.slices
        self._names = [*start.parameters]
        model.kept.put_back()
        model.kept.copy_from(start.constants)
        self._lean = [model.layers[number] for number in examples.chunk.lean]
        steps, width = len(examples.slices), examples.schedule.width
        local = examples.schedule.local
        settings = start.parameters, examples.lanes, steps, width, local.rate
        self._learning = {layer.keys[0]: layer.learning(*settings) for layer in self._lean}
        unused = {key for layer in self._lean for key in layer.keys}
        # They have the memory layout of their gradients, which convolutions compute by patches.
        parameters = {
            n: p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p
            for n, p in start.parameters.items()
            if n not in unused
        }
        self._descent = Descent(replace(start, parameters=parameters), local)

    def trained(self) -> Updates:
        """Train all users, and return how far they move, [L, *shape] by name.

        This includes personal parameters, and the control variates of an algorithm that has them.
        """
        step, lanes = 0, self._examples.used
        for window in self._examples.windows([slices[0] for slices in lanes]):
            shares = window.shares(self._task, self._slices)
            for first in range(0, shares.shape[1], self._slices):
                self._take_step(step, window, first, shares, lanes[step])
                step += 1
        updates: dict[str, BatchedTensor] = {**self._descent.moved()}
        for layer in self._lean:
            updates |= zip(layer.keys, self._learning[layer.keys[0]].updates(), strict=True)
        return {name: updates.pop(name) for name in self._names} | updates

    def _present(self, real: Tensor) -> Tensor | None:
        """Return which lanes have rows that count, [l], or None if all do."""
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
            inputs = [*leaves.values(), *(layer.probe for layer in self._learning.values())]
            loss = (losses * rows(shares)).sum()
            slice_gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
            _add(gradients, dict(zip(leaves, slice_gradients, strict=False)), present)
        active = self._present(window.real[: lanes[0], first])
        self._descent.step(parameters, gradients, active)
        for layer in self._learning.values():
            layer.end_step()


def _add(total: TorchTensors, gradients: TorchTensors, present: Tensor | None) -> None:
    """Add the gradients of a slice, [l, *shape], for the users who are present in it."""
    for name, gradient in gradients.items():
        if name not in total:
            total[name] = gradient
            continue
        previous = total[name][: len(gradient)]
        updated = previous + gradient
        if present is not None:
            updated = torch.where(present.view(-1, *[1] * (updated.dim() - 1)), updated, previous)
        previous.copy_(updated)
