"""Training users alone: one after another, in plain torch, each on its own batches.

No tensor holds data of two users, so a model may compute anything from a user's rows. Between
users, all tensors of the model and all attributes of its modules are restored.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.engine.arithmetic import Activations, generators_apart
from fedpriv.engine.bounds import WithinBounds
from fedpriv.engine.descent import Descent, is_plain
from fedpriv.engine.kept import KeptModel, trained_copy
from fedpriv.engine.products import LowRank
from fedpriv.engine.schedule import Integers, largest_batch
from fedpriv.engine.task import Inputs, RoundParameters, Task, outputs_of
from fedpriv.privacy.clipping_torch import BatchedTensor, Updates
from fedpriv.training.request import LocalTraining

# How many multiplications take as long as the update of one weight in a step, and the least number
# of weights of a layer for which the time in Python pays.
_TOUCHES, _LARGE = 40, 2**18


class _Linear(nn.Linear):
    """A linear layer that can learn from few rows without updating its weights."""

    learning: LowRank | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map […, in] to […, out]."""
        if self.learning is not None:
            return self.learning(x)
        return functional.linear(x, self.weight, self.bias)


class AloneModel:
    """A copy of a task's model that trains one user after another."""

    def __init__(self, task: Task, device: torch.device, x: Inputs, y: Tensor) -> None:
        """Call the model with two rows, to count the calls of its layers and detect `_bounds`."""
        model = trained_copy(task.model, device)
        names = {id(p): name for name, p in model.named_parameters()}
        all_parameters = [p for m in model.modules() for p in m._parameters.values()]
        self._layers = dict[str, _Linear]()  # layers that can learn without weights
        self._keys = dict[str, list[str]]()  # names of their parameters
        for name, layer in model.named_modules():
            parameters = [*layer.parameters(recurse=False)]
            unshared = all(sum(p is q for q in all_parameters) == 1 for p in parameters)
            trained = all(p.requires_grad for p in parameters)
            if type(layer) is nn.Linear and unshared and trained:
                layer.__class__ = _Linear
                self._layers[name] = cast(_Linear, layer)
                self._keys[name] = [names[id(p)] for p in parameters]
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._kept = KeptModel(model, [*names.values(), *dict(model.named_buffers())])
        self._rows = dict[str, int]()  # rows that go through each layer, per example
        self._bounds, self._bounded = WithinBounds(), True
        for name, layer in self._layers.items():
            layer.register_forward_pre_hook(partial(self._count, name))
        with suppress(Exception), self._bounds, generators_apart(device), torch.no_grad():
            task.losses_of(outputs_of(model, x), y)
            self._bounded = self._bounds.needed
        self._kept.put_back()

    def _count(self, name: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
        rows = inputs[0].numel() // inputs[0].shape[-1]
        self._rows[name] = self._rows.get(name, 0) + -(-rows // 2)

    @contextmanager
    def begun(
        self, start: RoundParameters, lean: Mapping[str, LowRank], *, training: bool
    ) -> Iterator[nn.Module]:
        """Yield the model at the start of a round; the layers in `lean` learn without weights."""
        model, unused = self._kept.model, self._keys_of(lean)
        tensors = {**start.parameters, **start.constants}
        self._kept.copy_from(tensors, (name for name in self._kept.tensors if name not in unused))
        try:
            for name, learning in lean.items():
                self._layers[name].learning = learning
                self._layers[name]._parameters = {"weight": None, "bias": None}
            with self._bounds if self._bounded else nullcontext():
                yield model if training else model.eval()
        finally:
            self._kept.put_back()

    def _keys_of(self, lean: Mapping[str, LowRank]) -> set[str]:
        """Return the names of the parameters of these layers."""
        return {key for name in lean for key in self._keys[name]}

    def lean(
        self, start: RoundParameters, local: LocalTraining, counts: Integers, steps: int
    ) -> dict[str, LowRank]:
        """Return the layers for which learning without weights is faster, for one user.

        The user has `counts` rows, [1], and takes so many steps.
        """
        if not is_plain(local):
            return {}
        layers, examples = {}, steps * int(largest_batch(counts, local)[0])
        for name, layer in self._layers.items():
            n, i, o = examples * self._rows.get(name, 0), layer.in_features, layer.out_features
            # Products of all pairs of rows, and of the sum, against a change of all weights by
            # every step.
            if i * o >= _LARGE and 0 < n * n * (i + o) + n * i * o <= _TOUCHES * steps * i * o:
                weight, *bias = (start.parameters[key] for key in self._keys[name])
                layers[name] = LowRank(weight, bias[0] if bias else None, 1, n, local.rate)
        return layers

    def moved(
        self,
        task: Task,
        start: RoundParameters,
        batches: Iterator[tuple[Inputs, Tensor]],
        local: LocalTraining,
        activations: Activations,
        lean: Mapping[str, LowRank],
        steps: int,
    ) -> Updates:
        """Return one user's displacement after these steps on these batches, [1, *shape] by name.

        It includes that of personal parameters, and the changes of control variates if any.
        """
        with self.begun(start, lean, training=True) as model:
            unused = self._keys_of(lean)
            trained = {n: self._kept.tensors[n] for n in self._trained if n not in unused}
            initial = {name: start.parameters[name] for name in trained}
            memory = [self._kept.numbers[name] for name in trained]
            descent = Descent(initial, local, start.control, start.personal)
            leaves = [*trained.values(), *(layer.probe for layer in lean.values())]
            for step, (x, y) in enumerate(batches):
                total, count = task.summed_loss(outputs_of(model, x, activations), y)
                mean = total * torch.reciprocal(count).to(total)
                gradients = torch.autograd.grad(mean, leaves, materialize_grads=True)
                descent.step_of_one(memory, gradients[: len(trained)])
                for layer in lean.values():
                    layer.end_step()
                if step + 1 < steps:
                    descent.put_into(memory)
        updates: dict[str, BatchedTensor] = {**descent.moved()}
        for name, layer in lean.items():
            updates |= zip(self._keys[name], layer.updates(), strict=True)
        return {name: updates.pop(name) for name in start.parameters} | updates
