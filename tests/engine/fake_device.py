"""A device without memory, on which tensors have shapes and types and no values.

What trains there cannot tell it from another device that is no CPU. torch's FakeTensorMode refuses
operations on tensors of two devices, and those whose result depends on values, which on a GPU would
wait for it. The mode below refuses what it lets pass: copies that wait, and indices that lie on the
CPU. The device is torch's "meta", as torch without CUDA cannot differentiate what is on "cuda".
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedpriv.engine.local_training import Examples

DEVICE = torch.device("meta")


class WaitedError(Exception):
    """A chunk would have waited for the device."""


class _Waits(TorchDispatchMode):
    """Refuses copies between CPU and device that wait, and tensors of both in one operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        # A single number on the CPU is passed to a kernel by value.
        places = {each.device.type for each in given if each.dim()}
        if name == "_to_copy":
            waits = {"cpu", "meta"} == places | {torch.device(kwargs.get("device", "cpu")).type}
            if "device" in kwargs and waits and not kwargs.get("non_blocking"):
                raise WaitedError("a copy between CPU and device waits")
        elif name == "copy_":
            if len(places) > 1 and not (len(args) > 2 and args[2]):
                raise WaitedError("a copy between CPU and device waits")
        elif len(places) > 1:
            raise WaitedError(f"{name} is given tensors on the CPU and on the device")
        return func(*args, **kwargs)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Let code ask for it in this block: torch knows no fewer bits on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        yield


@contextmanager
def on_device(*, may_wait: bool = False) -> Iterator[None]:
    """Compute with tensors that may be on the device in this block."""
    blank = Examples._blank

    def real(examples: Examples, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        with unset_fake_temporarily():  # rows of users are copied to memory that there is
            return blank(examples, shape, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Examples, "_blank", real)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), mode, nullcontext() if may_wait else _Waits():
            # Where tensors lie is compared, and never read.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
