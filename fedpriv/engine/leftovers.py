"""Keeps later users from data of earlier ones, in a model's state and in memory.

Between users, `KeptModel` restores all tensors of a model and all attributes of its modules.

torch does not check all arguments: some functions can read or write memory beyond them, which may
hold data of earlier users. `WithinBounds` replaces them by safe variants.
"""

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors

_FIXED = (
    type(None), bool, int, float, complex, str, bytes, type, types.FunctionType,
    types.BuiltinFunctionType, torch.Size, torch.dtype, torch.device, nn.Module,
)  # fmt: skip
"""Types of values that are immutable, or are restored separately."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model themselves, by their first names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def lazy_clone(tensor: Tensor) -> Tensor:
    """Return a clone; on a CPU it shares the tensor's memory until either of them is written."""
    if tensor.device.type != "cpu":
        return tensor.clone()
    try:
        return torch._lazy_clone(tensor)  # copies when a kernel, numpy or dlpack may write
    except RuntimeError:  # the memory is not torch's own, or the tensor is not strided
        return tensor.clone()


def lazy_clones(model: nn.Module) -> dict[int, object]:
    """Return a memo for `copy.deepcopy`, with lazy clones of a model's parameters."""
    parameters = [p for p in model.parameters() if type(p) is nn.Parameter]
    return {id(p): nn.Parameter(lazy_clone(p.data), p.requires_grad) for p in parameters}


def lazy_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model; its parameters are lazy clones."""
    return copy.deepcopy(model, lazy_clones(model))


class KeptModel:
    """A model, with the initial state of its tensors and of all attributes of its modules."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        """`names` are the parameters and buffers to restore."""
        self.model = model
        tensors = named_tensors(model)
        self.tensors = {name: tensors[name] for name in names}
        self.numbers = {name: tensor.detach() for name, tensor in self.tensors.items()}
        self._trained = {name: tensor.requires_grad for name, tensor in self.tensors.items()}
        frozen = {id(p) for p in model.parameters() if p.is_cpu and not p.requires_grad}
        self._frozen = {name for name, tensor in self.tensors.items() if id(tensor) in frozen}
        memo = {id(part): part for part in (*tensors.values(), *model.modules())}
        self._attributes = [_Attributes(module, memo) for module in model.modules()]

    def put_back(self) -> None:
        """Restore the attributes of all modules, and the storage of all tensors."""
        for attributes in self._attributes:
            attributes.put_back()
        for name, tensor in self.tensors.items():
            numbers, lazy = self.numbers[name], name in self._frozen  # reading an address copies
            if lazy or tensor.data_ptr() != numbers.data_ptr() or tensor.shape != numbers.shape:
                tensor.data = numbers
            if tensor.grad is not None or tensor._backward_hooks:
                tensor.grad = tensor._backward_hooks = None
            if tensor.requires_grad != self._trained[name]:
                tensor.requires_grad_(self._trained[name])

    def copy_from(self, values: TorchTensors) -> None:
        """Overwrite the tensors of these names; on a CPU, frozen parameters by lazy clones."""
        if names := [name for name in values if name not in self._frozen]:
            torch._foreach_copy_([self.numbers[n] for n in names], [values[n] for n in names])
        for name in self._frozen & values.keys():
            self.numbers[name] = lazy_clone(values[name].to(self.numbers[name].dtype))
            self.tensors[name].data = self.numbers[name]


class _Attributes:
    """The initial attributes of a module."""

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


# The names of arguments that are checked, in their order.
_CTC = dict.fromkeys(
    (functional.ctc_loss, torch.ctc_loss), tuple(signature(functional.ctc_loss).parameters)
)
_BAGS = {
    functional.embedding_bag: ("input", "weight", "offsets"),
    torch.embedding_bag: ("weight", "input", "offsets"),
}
_SAMPLING = frozenset(
    {functional.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d}
)
_SPARSE = frozenset(
    getattr(torch, f"sparse_{kind}_tensor")
    for kind in ("bsc", "bsr", "compressed", "coo", "csc", "csr")
)
_BEYOND = {*_CTC, *_SAMPLING, *_BAGS, *_SPARSE, torch.segment_reduce, torch.linalg.lstsq}


class WithinBounds(TorchFunctionMode):
    """A mode in which functions of torch cannot read or write memory beyond their arguments.

    ModelError: a label of `ctc_loss` is not a class, offsets of `embedding_bag` decrease or exceed
    its words, or `segment_reduce` is called with offsets, which cannot be checked. torch itself
    checks indices of sparse tensors. `grid_sample` returns NaN for positions that are not finite,
    so that their user counts as zero. On a CPU, the default algorithm of `lstsq` reads
    uninitialised pivots, so another one is used.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Torch calls this method instead of each of its functions."""
        if function not in _BEYOND:
            return function(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if function in _CTC:
            _check_labels(**(dict(zip(_CTC[function], args, strict=False)) | kwargs))
        elif function in _BAGS:
            _check_offsets(**(dict(zip(_BAGS[function], args, strict=False)) | kwargs))
        elif function in _SPARSE:
            kwargs["check_invariants"] = True
        elif function is torch.segment_reduce and {*kwargs} & {"offsets", "unsafe"}:
            raise ModelError(
                "segment_reduce reads beyond its data unless it is given lengths alone"
            )
        elif function is torch.linalg.lstsq and kwargs.get("driver") in (None, "gelsy"):
            matrix = args[0] if args else kwargs["input"]
            kwargs["driver"] = "gelsd" if matrix.device.type == "cpu" else None
        if function not in _SAMPLING:
            return function(*args, **kwargs)
        arguments = dict(zip(("input", "grid"), args, strict=False)) | kwargs
        grid = arguments.pop("grid")
        finite = grid.isfinite()
        grid = torch.where(finite, grid, 0.0)
        samples = function(arguments.pop("input"), grid, *args[2:], **arguments)
        return torch.where(finite.all(-1).unsqueeze(1), samples, torch.nan)


def _check_labels(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,  # noqa: ARG001 - checked by torch
    target_lengths: Any,
    **_: object,
) -> None:
    classes = log_probs.shape[-1]
    invalid = (targets < 0) | (targets >= classes)
    if targets.dim() == 2:  # padding at the end of a row is not read
        places = torch.arange(targets.shape[1], device=targets.device)
        lengths = torch.as_tensor(target_lengths, device=targets.device)
        invalid = invalid & (places < lengths[:, None])
    if invalid.any():
        raise ModelError(f"a label of ctc_loss is none of its {classes} classes")


def _check_offsets(input: Tensor, offsets: Tensor | None = None, **_: object) -> None:  # noqa: A002
    if offsets is None:
        return
    decrease = bool((offsets[1:] < offsets[:-1]).any())
    if decrease or (len(offsets) and not 0 <= int(offsets[0]) <= int(offsets[-1]) <= len(input)):
        raise ModelError(f"offsets of embedding_bag fall, or lie beyond its {len(input)} words")
