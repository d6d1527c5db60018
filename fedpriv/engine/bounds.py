"""Functions of torch that reach beyond what they are given, and how they are kept from it.

torch does not check all that it is told: some of its functions read or write where the data of
other users may lie. `OwnTables` keeps users apart where they train in lanes of `torch.func`, whose
embedding looks into one table of all users; `WithinBounds` keeps a model, or a loss, to its own
arguments.
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedpriv.errors import ModelError

# Functions that look words up, with the names of their arguments in order.
_OF_ATEN = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
_LOOK_UPS: Mapping[object, tuple[str, ...]] = {
    functional.embedding: tuple(signature(functional.embedding).parameters),
    torch.embedding: _OF_ATEN,
    torch.ops.aten.embedding: _OF_ATEN,
    torch.ops.aten.embedding.default: _OF_ATEN,
}
_INDEX_FILLS = frozenset({torch.index_fill, torch.Tensor.index_fill, torch.Tensor.index_fill_})
_CTC = frozenset({functional.ctc_loss, torch.ctc_loss})
_SAMPLING = frozenset(
    {functional.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d}
)
_BEYOND = _CTC | _SAMPLING | {torch.segment_reduce, torch.linalg.lstsq}


class OwnTables(TorchFunctionMode):
    """A mode in which words beyond an embedding give rows of NaN, so their user counts as zero.

    A ModelError refuses `index_fill`, and an embedding that shortens rows of its table.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls in place of each of its functions."""
        if function in _INDEX_FILLS:
            raise ModelError("index_fill would reach into what other users have")
        names = _LOOK_UPS.get(function)
        if names is None:
            return function(*args, **(kwargs or {}))
        given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        if given.get("max_norm") is not None:
            raise ModelError("max_norm would change the table of other users")
        name = "input" if "input" in names else "indices"
        words, (size, _) = given[name], given["weight"].shape
        beyond = (words < 0) | (words >= size)
        rows = function(**given | {name: torch.where(beyond, 0, words)})
        return torch.where(beyond.unsqueeze(-1), torch.nan, rows)


class WithinBounds(TorchFunctionMode):
    """A mode in which functions of torch that can read or write beyond their arguments do not.

    Labels of `ctc_loss` that are no class raise, and so does `segment_reduce` with offsets, which
    nothing checks. `grid_sample` gives NaN for positions that are not finite, so that their user
    counts as zero. On a CPU `lstsq` would begin with pivots from memory that nobody has written to;
    it takes another algorithm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False  # whether one of these functions was called

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls in place of each of its functions."""
        if function not in _BEYOND:
            return function(*args, **(kwargs or {}))
        self.needed = True
        if function in _CTC:
            _check_labels(*args[:4], **(kwargs or {}))
        if function is torch.segment_reduce and {*(kwargs or {})} & {"offsets", "unsafe"}:
            raise ModelError(
                "segment_reduce reads beyond its data unless it is given lengths alone"
            )
        if function is torch.linalg.lstsq and (kwargs or {}).get("driver") in (None, "gelsy"):
            kwargs = dict(kwargs or {})
            matrix = args[0] if args else kwargs["input"]
            kwargs["driver"] = "gelsd" if matrix.device.type == "cpu" else None
        if function not in _SAMPLING:
            return function(*args, **(kwargs or {}))
        given = dict(zip(("input", "grid"), args, strict=False)) | dict(kwargs or {})
        finite = given["grid"].isfinite()
        given["grid"] = torch.where(finite, given["grid"], 0.0)
        found = function(given.pop("input"), given.pop("grid"), *args[2:], **given)
        return torch.where(finite.all(-1).unsqueeze(1), found, torch.nan)


def _check_labels(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,  # noqa: ARG001 - which torch checks
    target_lengths: Any,
    **_: object,
) -> None:
    classes = log_probs.shape[-1]
    illegal = (targets < 0) | (targets >= classes)
    if targets.dim() == 2:  # padding at the end of a row is not read
        places = torch.arange(targets.shape[1], device=targets.device)
        lengths = torch.as_tensor(target_lengths, device=targets.device)
        illegal = illegal & (places < lengths[:, None])
    if illegal.any():
        raise ModelError(f"a label of ctc_loss is none of its {classes} classes")
