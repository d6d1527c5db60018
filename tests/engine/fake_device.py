"""A device without memory, on which tensors have shapes and types and no values: torch's "meta".

What trains there cannot tell it from another device that is no CPU. torch refuses operations whose
result depends on values, which on a GPU would wait for it. The mode below refuses what it lets
pass: copies that wait, and tensors of two devices in one operation.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    with nullcontext() if may_wait else _Waits():
        yield
