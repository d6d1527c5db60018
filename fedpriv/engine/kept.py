"""A model that can be restored to its state at the start of a round, for one user after another."""

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.privacy.clipping_torch import TorchTensors

_FIXED = (
    type(None), bool, int, float, complex, str, bytes, type, types.FunctionType,
    types.BuiltinFunctionType, torch.Size, torch.dtype, torch.device, nn.Module,
)  # fmt: skip
"""Types of values that are immutable, or are restored separately."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, not copies, by their first names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class KeptModel:
    """A model, with the initial state of its tensors and of all attributes of its modules."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        """`names` are the parameters and buffers to restore."""
        self.model = model
        named = named_tensors(model)
        self.tensors = {name: named[name] for name in names}
        self.numbers = {name: tensor.detach() for name, tensor in self.tensors.items()}
        self._trained = {name: tensor.requires_grad for name, tensor in self.tensors.items()}
        memo = {id(part): part for part in (*named.values(), *model.modules())}
        self._attributes = [_Attributes(module, memo) for module in model.modules()]

    def put_back(self) -> None:
        """Restore the attributes of all modules, and the storage of all tensors."""
        for attributes in self._attributes:
            attributes.put_back()
        for name, tensor in self.tensors.items():
            numbers = self.numbers[name]
            if tensor.data_ptr() != numbers.data_ptr() or tensor.shape != numbers.shape:
                tensor.data = numbers
            if tensor.grad is not None or tensor._backward_hooks:
                tensor.grad = tensor._backward_hooks = None
            if tensor.requires_grad != self._trained[name]:
                tensor.requires_grad_(self._trained[name])

    def copy_from(self, values: TorchTensors) -> None:
        """Overwrite the tensors of these names."""
        if values:
            torch._foreach_copy_([self.numbers[name] for name in values], [*values.values()])


class _Attributes:
    """The attributes of a module."""

    def __init__(self, module: nn.Module, memo: Mapping[int, object]) -> None:
        self._module, self._memo = module, memo
        self._fixed, self._copies = dict[str, Any](), dict[str, Callable[[], Any]]()
        for name, value in module.__dict__.items():
            if self._is_fixed(value):
                self._fixed[name] = value
            elif type(value).__name__ in ("dict", "OrderedDict", "set", "list") and all(
                map(self._is_fixed, _all_in(value))
            ):
                self._copies[name] = value.copy().copy  # of a snapshot
            else:
                self._copies[name] = partial(self._copied, self._copied(value))

    def put_back(self) -> None:
        """Restore the attributes."""
        attributes = self._module.__dict__
        attributes.clear()
        attributes |= self._fixed
        attributes |= {name: copied() for name, copied in self._copies.items()}

    def _is_fixed(self, value: object) -> bool:
        return isinstance(value, _FIXED) or id(value) in self._memo

    def _copied(self, value: object) -> object:
        return copy.deepcopy(value, dict(self._memo))


def _all_in(table: Any) -> Iterator[Any]:
    return iter([*table.keys(), *table.values()] if isinstance(table, dict) else table)
