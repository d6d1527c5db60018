"""A model that one user after another finds as the round begins: what it keeps is put back."""

import copy
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.privacy.clipping_torch import TorchTensors

_FIXED = (
    type(None), bool, int, float, complex, str, bytes, type, types.FunctionType,
    types.BuiltinFunctionType, torch.Size, torch.dtype, torch.device, nn.Module,
)  # fmt: skip
"""Types of what cannot be changed where it is, or is put back by itself."""


def trained_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy on a device; what is trained of it is float32, as users send it."""
    copied = copy.deepcopy(model).to(device)
    for parameter in copied.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return copied


class KeptModel:
    """A model whose tensors have numbers of their own, and all that its modules hold."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        """`names` are of the parameters and buffers that are put back."""
        self.model = model
        named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors = {name: named[name] for name in names}
        self.numbers = {name: tensor.detach() for name, tensor in self.tensors.items()}
        self._trained = {name: tensor.requires_grad for name, tensor in self.tensors.items()}
        memo = {id(each): each for each in (*named.values(), *model.modules())}
        self._held = [_Held(module, memo) for module in model.modules()]

    def put_back(self) -> None:
        """Have each module hold what it held, and each tensor be where it was."""
        for held in self._held:
            held.put_back()
        for name, tensor in self.tensors.items():
            numbers = self.numbers[name]
            if tensor.data_ptr() != numbers.data_ptr() or tensor.shape != numbers.shape:
                tensor.data = numbers
            if tensor.grad is not None or tensor._backward_hooks:
                tensor.grad = tensor._backward_hooks = None
            if tensor.requires_grad != self._trained[name]:
                tensor.requires_grad_(self._trained[name])

    def copy_from(self, given: TorchTensors, names: Iterable[str]) -> None:
        """Give tensors these numbers."""
        chosen = [*names]
        if chosen:
            own = [self.numbers[name] for name in chosen]
            torch._foreach_copy_(own, [given[name] for name in chosen])


class _Held:
    """What a module holds."""

    def __init__(self, module: nn.Module, memo: Mapping[int, object]) -> None:
        self._module, self._memo = module, memo
        self._fixed, self._tables = dict[str, Any](), dict[str, Any]()
        self._others = dict[str, Any]()
        for name, value in module.__dict__.items():
            if self._is_fixed(value):
                self._fixed[name] = value
            elif type(value).__name__ in ("dict", "OrderedDict", "set", "list") and all(
                map(self._is_fixed, _all_in(value))
            ):
                self._tables[name] = value.copy()
            else:
                self._others[name] = self._apart(value)

    def put_back(self) -> None:
        """Have the module hold the same again."""
        held = self._module.__dict__
        held.clear()
        held |= self._fixed
        held |= {name: table.copy() for name, table in self._tables.items()}
        held |= {name: self._apart(value) for name, value in self._others.items()}

    def _is_fixed(self, value: object) -> bool:
        return isinstance(value, _FIXED) or id(value) in self._memo

    def _apart(self, value: object) -> object:
        return copy.deepcopy(value, dict(self._memo))


def _all_in(table: Any) -> Iterator[Any]:
    return iter([*table.keys(), *table.values()] if isinstance(table, dict) else table)
