"""Safe variants of functions of torch that can access memory beyond their arguments.

torch does not check all arguments: some functions can read or write memory that holds other data,
such as those of earlier users.
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedpriv.errors import ModelError

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
        named = dict(zip(("input", "grid"), args, strict=False)) | kwargs
        grid = named.pop("grid")
        finite = grid.isfinite()
        grid = torch.where(finite, grid, 0.0)
        samples = function(named.pop("input"), grid, *args[2:], **named)
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
