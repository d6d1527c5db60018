"""Users alone: one after another, in plain torch, each on its own batches.

Nothing of another user is in any tensor, so a model may do what it likes with a user's rows. What
it keeps of one user is put back before the next: all its tensors, and all that its modules hold.
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

# Multiplications in the time in which a step changes a weight in memory, and how many weights a
# layer has at least for Python not to take longer.
_TOUCHES, _LARGE = 40, 2**18


class _Linear(nn.Linear):
    """A linear layer that can learn from few rows without touching its weights."""

    learning: LowRank | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        if self.learning is not None:
            return self.learning(x)
        return functional.linear(x, self.weight, self.bias)


class AloneModel:
    """A copy of a task's model, which one user after another makes its own."""

    def __init__(self, task: Task, device: torch.device, x: Inputs, y: Tensor) -> None:
        """It is called for two rows, to know how often it calls its layers and what else."""
        model = trained_copy(task.model, device)
        names = {id(p): name for name, p in model.named_parameters()}
        held = [p for m in model.modules() for p in m._parameters.values() if p is not None]
        self._layers = dict[str, _Linear]()  # that can learn without weights
        self._keys = dict[str, list[str]]()  # names of their parameters
        for name, layer in model.named_modules():
            own = [*layer.parameters(recurse=False)]
            alone = all(sum(p is other for other in held) == 1 and p.requires_grad for p in own)
            if type(layer) is nn.Linear and alone:
                layer.__class__ = _Linear
                self._layers[name] = cast(_Linear, layer)
                self._keys[name] = [names[id(p)] for p in own]
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._kept = KeptModel(model, [*names.values(), *dict(model.named_buffers())])
        self._rows = dict[str, int]()  # of an example that go through each of the layers
        self._bounds, self._bounded = WithinBounds(), True
        for name, layer in self._layers.items():
            layer.register_forward_pre_hook(partial(self._count, name))
        with suppress(Exception), self._bounds, generators_apart(device), torch.no_grad():
            task.losses_of(outputs_of(model, x), y)
            self._bounded = self._bounds.needed
        self._kept.put_back()

    def _count(self, name: str, _: nn.Module, given: tuple[Tensor]) -> None:
        rows = given[0].numel() // given[0].shape[-1]
        self._rows[name] = self._rows.get(name, 0) + -(-rows // 2)

    @contextmanager
    def begun(
        self, start: RoundParameters, lean: Mapping[str, LowRank], *, training: bool
    ) -> Iterator[nn.Module]:
        """The model as every user finds it; layers of these names learn without weights."""
        model, without = self._kept.model, self._without(lean)
        given = {**start.parameters, **start.constants}
        self._kept.copy_from(given, (name for name in self._kept.tensors if name not in without))
        try:
            for name, learning in lean.items():
                self._layers[name].learning = learning
                self._layers[name]._parameters = {"weight": None, "bias": None}
            with self._bounds if self._bounded else nullcontext():
                yield model if training else model.eval()
        finally:
            self._kept.put_back()

    def _without(self, lean: Mapping[str, LowRank]) -> set[str]:
        """Names of the parameters that are not touched where these layers learn without them."""
        return {key for name in lean for key in self._keys[name]}

    def lean(
        self, start: RoundParameters, local: LocalTraining, counts: Integers, steps: int
    ) -> dict[str, LowRank]:
        """Layers that cost less without weights, for so many steps on so many rows, [1]."""
        if not is_plain(local):
            return {}
        found, examples = {}, steps * int(largest_batch(counts, local)[0])
        for name, layer in self._layers.items():
            n, i, o = examples * self._rows.get(name, 0), layer.in_features, layer.out_features
            # All rows with each other, and into the sum, against weights that each step changes.
            if i * o >= _LARGE and 0 < n * n * (i + o) + n * i * o <= _TOUCHES * steps * i * o:
                weight, *bias = (start.parameters[key] for key in self._keys[name])
                found[name] = LowRank(weight, bias[0] if bias else None, 1, n, local.rate)
        return found

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
        """How far one user moves in so many steps on these batches: [1, *shape] by name.

        Also in personal parameters, and in control variates where the algorithm has some.
        """
        with self.begun(start, lean, training=True) as model:
            without = self._without(lean)
            own = {n: self._kept.tensors[n] for n in self._trained if n not in without}
            begun = {name: start.parameters[name] for name in own}
            memory = [self._kept.numbers[name] for name in own]
            descent = Descent(begun, local, start.control, start.personal)
            leaves = [*own.values(), *(layer.probe for layer in lean.values())]
            for step, (x, y) in enumerate(batches):
                total, count = task.summed_loss(outputs_of(model, x, activations), y)
                mean = total * torch.reciprocal(count).to(total)
                found = torch.autograd.grad(mean, leaves, materialize_grads=True)
                descent.step_of_one(memory, found[: len(own)])
                for layer in lean.values():
                    layer.end_step()
                if step + 1 < steps:
                    descent.put_into(memory)
        learnt: dict[str, BatchedTensor] = {**descent.moved()}
        for name, layer in lean.items():
            learnt |= zip(self._keys[name], layer.updates(), strict=True)
        return {name: learnt.pop(name) for name in start.parameters} | learnt
