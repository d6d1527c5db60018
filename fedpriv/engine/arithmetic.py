"""The arithmetic and the random generators for training, independent of the caller's settings."""

import hashlib
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch

from fedpriv.errors import InvalidValueError

Activations = Literal["float32", "tf32", "bfloat16"]
"""With "bfloat16", layers multiply numbers of 8 significant bits during training, as under
`torch.autocast`. With "tf32", which only GPUs support, products of float32 round their factors to
11 bits. Parameters, losses, updates, their sums and all metrics remain float32."""

# Held while one thread uses torch's process-wide settings and the models' parameters; also while a
# thread forks, so that no child process inherits those of another thread.
ARITHMETIC_LOCK = threading.RLock()

_CPU = torch.device("cpu")
_SMALLEST = torch.finfo(torch.float32).tiny
_PER_THREAD = 2**15  # numbers; torch gives no thread fewer


def activations_named(name: object, device: torch.device) -> Activations:
    """Return the activations with this name; InvalidValueError if the device lacks them."""
    names = [a for a in get_args(Activations) if a != "tf32" or device.type != "cpu"]
    if name not in names:
        raise InvalidValueError(
            f"activations is {name!r}; legal on {device.type} are {', '.join(names)}"
        )
    return cast(Activations, name)


# A function that changes a setting, the value for training, and the caller's value.
_Setting = tuple[Callable[[Any], object], object, object]


@contextmanager
def _temporarily(settings: Sequence[_Setting]) -> Iterator[None]:
    """Apply settings within the context, and restore the caller's values."""
    try:
        for put, value, _ in settings:
            put(value)
        yield
    finally:
        for put, _, previous in settings:
            put(previous)


def tf32(*, allowed: bool) -> AbstractContextManager[None]:
    """Set whether GPUs may round the factors of float32 products; convolutions do by default."""
    backends: Any = torch.backends
    products, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    libraries: list[Any] = [products, cudnn]  # before torch 2.9
    name, value = "allow_tf32", cast(Any, allowed)
    if hasattr(products, "fp32_precision"):
        libraries = [cudnn.conv, cudnn.rnn, mkldnn.conv, mkldnn.rnn, products, mkldnn.matmul]
        name, value = "fp32_precision", "tf32" if allowed else "ieee"
    return _temporarily(
        [(partial(setattr, library, name), value, getattr(library, name)) for library in libraries]
    )


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, for streams and kernels."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device(device) if on_gpu else nullcontext()


def _plain_settings(device: torch.device) -> list[_Setting]:
    """Return the settings under which results depend only on the dtypes and the device.

    By default, a GPU does not add numbers in the same order each time: for instance, it sums
    gradients of an embedding with many words by atomic additions. If torch has no deterministic
    algorithm, it warns, and trials find the differences.
    """
    cudnn, attention = torch.backends.cudnn, torch.backends.mha
    settings: list[_Setting] = [
        # The dtype of literals in a model's code.
        (torch.set_default_dtype, torch.float32, torch.get_default_dtype()),
        # A GPU must use the same convolution each time, not the one measured to be fastest.
        (partial(setattr, cudnn, "benchmark"), False, cudnn.benchmark),
        (partial(setattr, cudnn, "deterministic"), True, cudnn.deterministic),
        # In evaluation, torch uses another attention if all masks of a batch are equal.
        (attention.set_fastpath_enabled, False, attention.get_fastpath_enabled()),
    ]
    if device.type == "cuda":
        mode, memory = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
        fill = partial(setattr, memory, "fill_uninitialized_memory")  # which would take time
        settings.append((torch.set_deterministic_debug_mode, "warn", mode))
        settings.append((fill, False, memory.fill_uninitialized_memory))
    return settings


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute exactly as the dtypes say, with gradients, for any settings of the caller.

    Only one thread at a time can be within the context.
    """
    # A flag of the processor, which torch and NumPy share in a thread.
    flushed = bool(np.float32(_SMALLEST) / np.float32(2.0) == 0.0)
    torch.set_flush_denormal(False)
    try:
        with (
            ARITHMETIC_LOCK,
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False),
            _current(device),
            _temporarily(_plain_settings(device)),
            tf32(allowed=False),
        ):
            yield
    finally:
        torch.set_flush_denormal(flushed)


def refuse_flushing_threads() -> None:
    """Raise InvalidValueError if torch's threads flush subnormal numbers, which changes results."""
    halves = torch.full((torch.get_num_threads() * _PER_THREAD,), _SMALLEST) / 2
    if not bool(halves.all()):
        raise InvalidValueError(
            "threads of torch take subnormal numbers for zero, since they started after "
            "torch.set_flush_denormal(True); it must not be called before users train"
        )


@contextmanager
def generators_apart(seed: int | None = None, device: torch.device = _CPU) -> Iterator[None]:
    """At the end, restore the generators of torch, NumPy and Python, which models may use.

    With a seed, seed torch's first. All threads share the generators, so they take turns.
    """
    devices = [device] if device.type == "cuda" else []
    with ARITHMETIC_LOCK, torch.random.fork_rng(devices=devices):
        states = random.getstate(), np.random.get_state()
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def own_generators() -> bytes:
    """Return the states of all generators on the CPU that models may use."""
    torch_state = torch.random.get_rng_state().numpy().tobytes()
    return torch_state + pickle.dumps((random.getstate(), np.random.get_state()))


def seed_generators(local_key: bytes, user: int, device: torch.device) -> None:
    """Seed all generators for a user in a round, from the round's key."""
    digest = hashlib.sha256(local_key + user.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not `torch.manual_seed`, which formats the stack for each kind of absent device.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


@contextmanager
def seeded(local_key: bytes, user: int, device: torch.device) -> Iterator[None]:
    """Seed all generators for a user in a round, and restore them after the context."""
    with generators_apart(device=device):
        seed_generators(local_key, user, device)
        yield
