"""A model whose trained layers are known, and copies of it that train many users at once."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from fedpriv.engine.lanes import Current, Held, stand_in
from fedpriv.engine.precision import Activations, outputs_of
from fedpriv.engine.task import TorchTensors

_TOUCHES = 40  # multiplications in the time that it takes to change a weight in memory


@dataclass(frozen=True)
class Layers:
    """All layers of a model that hold what it trains.

    Attributes:
        model: the model.
        trained: the layers by name.
        rows: for linear layers that alone hold their parameters and are called once in a forward
            pass, how many rows of an example go through them.
        alike: names of embeddings of what is the same for all examples.
        entrance: name of the linear layer, among those of `rows`, by which alone examples enter the
            model, as they are; None if there is none.
    """

    model: nn.Module
    trained: Mapping[str, nn.Module]
    rows: Mapping[str, int]
    alike: frozenset[str] = frozenset()
    entrance: str | None = None

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

    def parameters(self, name: str) -> tuple[str, ...]:
        """Names in the model of a layer's parameters; of those that two share, the first one's."""
        own = self.trained[name].parameters(recurse=False)
        return tuple(self._names[id(parameter)] for parameter in own)

    def side_by_side(self, low_rank: Iterable[str] = ()) -> "SideBySide":
        """A copy of the model for many users, the same one each time: for one thread.

        Args:
            low_rank: names of layers that get low-rank corrections.
        """
        names = frozenset(low_rank)
        if names not in self._copies:
            self._copies[names] = SideBySide(self, names)
        return self._copies[names]

    @cached_property
    def _copies(self) -> dict[frozenset[str], "SideBySide"]:
        return {}

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}


class SideBySide:
    """A copy of a model that the examples of many users go through side by side.

    All other tensors than those of trained layers are shared with the model.

    Attributes:
        model: the copy.
    """

    def __init__(self, layers: Layers, low_rank: Iterable[str]) -> None:
        """Copy.

        Args:
            layers: of the model.
            low_rank: names of linear layers that get corrections in place of weights for each user.
        """
        self._current = Current()
        self._slots = {name: _Slot() for name in low_rank}
        memo: dict[int, object] = {
            id(t): t for t in (*layers.model.parameters(), *layers.model.buffers())
        }
        for name, layer in layers.trained.items():
            held = Held(self._current, layers.parameters(name))
            other = stand_in(layer, held, alike=name in layers.alike)
            memo[id(layer)] = self._slots.get(name, other)
        self.model: nn.Module = copy.deepcopy(layers.model, memo)

    @contextmanager
    def corrected(self, by: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
        """Use these in place of the layers of their names, and let go of all tensors after it."""
        for name, layer in by.items():
            self._slots[name].layer = layer
        try:
            yield
        finally:
            self._current.parameters = {}
            for slot in self._slots.values():
                slot.layer = None

    def outputs(
        self,
        own: TorchTensors,
        constants: TorchTensors,
        x: torch.Tensor,
        activations: Activations,
        device: torch.device,
    ) -> torch.Tensor:
        """Outputs for all examples.

        Args:
            own: parameters of each user, [C, *shape].
            constants: frozen parameters and buffers.
            x: [C·B, …] examples; on the device "meta" if they enter by a layer that has them.
            activations: of the model.
            device: where it computes.
        """
        self._current.parameters, self._current.examples = own, len(x)
        return outputs_of(self.model, constants, x, activations, device)


class _Slot(nn.Module):
    """Where a low-rank layer is put in while it is needed."""

    layer: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            raise RuntimeError("a layer with low-rank corrections was called before it had any")
        return self.layer(x)
