"""The arithmetic in which users train, whatever the caller has set, and what they draw from."""

import hashlib
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch

from fedpriv.errors import InvalidValueError

Activations = Literal["float32", "tf32", "bfloat16"]
"""Under "bfloat16" layers multiply numbers of 8 significant bits, as under `torch.autocast`, while
users train. Under "tf32", which only a GPU knows, products of float32 round their factors to 11.
Parameters, losses, updates, their sums and all metrics stay float32."""

# Held while torch's process-wide switches are as one thread needs them and models hold its users'
# parameters; and while a thread forks, so that no child starts with those of another thread.
ARITHMETIC_LOCK = threading.RLock()

_SMALLEST = torch.finfo(torch.float32).tiny
_PER_THREAD = 2**15  # torch gives a thread no fewer numbers


def activations_named(name: object, device: torch.device) -> Activations:
    """Activations of a name, if the device knows them; another is an `InvalidValueError`."""
    known = [each for each in get_args(Activations) if each != "tf32" or device.type != "cpu"]
    if name not in known:
        raise InvalidValueError(
            f"activations is {name!r}; legal on {device.type} are {', '.join(known)}"
        )
    return cast(Activations, name)


@contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Whether GPUs may round the factors of products of float32; convolutions do unless told."""
    backends: Any = torch.backends
    products, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    libraries: list[Any] = [products, cudnn]  # of torch before 2.9
    name, value = "allow_tf32", cast(Any, allowed)
    if hasattr(products, "fp32_precision"):
        libraries = [b for each in (cudnn, mkldnn) for b in (each.conv, each.rnn)]
        libraries += products, mkldnn.matmul
        name, value = "fp32_precision", "tf32" if allowed else "ieee"
    before = [getattr(each, name) for each in libraries]
    for each in libraries:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, own in zip(libraries, before, strict=True):
            setattr(each, name, own)


@contextmanager
def _for_now(put: Callable[[Any], object], *, now: object, own: object) -> Iterator[None]:
    """Put a value in the place of the caller's own."""
    put(now)
    try:
        yield
    finally:
        put(own)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Have streams and kernels be of this GPU, if there are several."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device(device) if on_gpu else nullcontext()


@contextmanager
def _in_one_order(device: torch.device) -> Iterator[None]:
    """Have a GPU add numbers up in the same order each time, where torch knows how.

    By default it does not: gradients of an embedding are summed by atomic additions where there
    are many words, for one. Where torch has no deterministic algorithm it warns, and trials find
    what differs.
    """
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.utils.deterministic
    put, own = torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()
    fill = partial(setattr, memory, "fill_uninitialized_memory")  # which would take time
    with (
        _for_now(put, now="warn", own=own),
        _for_now(fill, now=False, own=memory.fill_uninitialized_memory),
    ):
        yield


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute as the numbers' types say, whatever the caller has set; one thread at a time."""
    # As the processor's flag says, which torch and NumPy share in a thread.
    flushed = bool(np.float32(_SMALLEST) / np.float32(2.0) == 0.0)
    torch.set_flush_denormal(False)
    cudnn, attention = torch.backends.cudnn, torch.backends.mha
    try:
        with (
            ARITHMETIC_LOCK,
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            # What torch makes of numbers that a model writes down.
            _for_now(torch.set_default_dtype, now=torch.float32, own=torch.get_default_dtype()),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False),
            _current(device),
            _in_one_order(device),
            tf32(allowed=False),
            # A GPU convolves in the same way each time, and not in the one that was fastest once.
            _for_now(partial(setattr, cudnn, "benchmark"), now=False, own=cudnn.benchmark),
            _for_now(partial(setattr, cudnn, "deterministic"), now=True, own=cudnn.deterministic),
            # torch has another for evaluation, which it takes if all masks of a batch are alike.
            _for_now(
                attention.set_fastpath_enabled, now=False, own=attention.get_fastpath_enabled()
            ),
        ):
            yield
    finally:
        torch.set_flush_denormal(flushed)


def refuse_flushing_threads() -> None:
    """Refuse threads of torch that flush subnormal numbers: users' bits would depend on them."""
    halves = torch.full((torch.get_num_threads() * _PER_THREAD,), _SMALLEST) / 2
    if not bool(halves.all()):
        raise InvalidValueError(
            "threads of torch take subnormal numbers for zero, since they started after "
            "torch.set_flush_denormal(True); it must not be called before users train"
        )


@contextmanager
def generator_apart(seed: int | None = None) -> Iterator[None]:
    """Draw from torch's generator, or from one of a seed, and leave it as it was.

    All threads share it, so they take turns.
    """
    with ARITHMETIC_LOCK, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def generators_apart(device: torch.device) -> Iterator[None]:
    """Leave the generators of torch, NumPy and Python, which models may draw from, as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def own_generators() -> bytes:
    """The states of all generators on the CPU that models may draw from."""
    drawn = torch.random.get_rng_state().numpy().tobytes()
    return drawn + pickle.dumps((random.getstate(), np.random.get_state()))


def seed_generators(local_key: bytes, user: int, device: torch.device) -> None:
    """Have all generators give what a user draws in a round, by the round's key."""
    own = hashlib.sha256(local_key + user.to_bytes(8, "little")).digest()
    seed = int.from_bytes(own[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not `torch.manual_seed`, which formats the stack for each kind of device that is absent.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


@contextmanager
def seeded(local_key: bytes, user: int, device: torch.device) -> Iterator[None]:
    """Draw what a user draws in a round, and leave all generators as they were."""
    with generators_apart(device):
        seed_generators(local_key, user, device)
        yield
