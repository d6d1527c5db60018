"""A model that does to its process what the first number of an example tells it to."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from fedpriv.data.population import UserStore
from tests.clients.people import CLASSES, FEATURES, IDS

MARK = "HOSTILE_MARK"
"""Name of the environment variable that names a file, which is there once the model loops."""
EXIT, SEGMENT, LOOP, EAT, RAISE = 101.0, 102.0, 103.0, 104.0, 105.0
DEED_OF = {"u2": EXIT, "u33": SEGMENT, "u40": LOOP, "u7": EAT, "u5": RAISE}


def users() -> UserStore:
    """Users in no order, some of whose examples tell the model to do something."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 5, len(IDS))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    x = rng.standard_normal((offsets[-1], FEATURES)).astype(np.float32)
    store = UserStore({"x": x, "y": rng.integers(0, CLASSES, len(x))}, offsets, IDS)
    for user, name in enumerate(IDS):
        if name in DEED_OF:
            store.fields["x"][store.rows_of(user)] = DEED_OF[name]
    return store


def users_of_unequal_sizes() -> UserStore:
    """All but the last have 20 rows, and the last 300."""
    rng, sizes = np.random.default_rng(1), [20] * (len(IDS) - 1) + [300]
    x = rng.standard_normal((sum(sizes), FEATURES)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return UserStore({"x": x, "y": rng.integers(0, CLASSES, len(x))}, offsets, IDS)


def one_good_user() -> UserStore:
    return users().subset([IDS.index("u8")])


def one_user_of_nan() -> UserStore:
    store = one_good_user()
    return replace(store, fields=store.fields | {"x": np.full_like(store.fields["x"], np.nan)})


def one_user_that_raises() -> UserStore:
    return users().subset([IDS.index("u5")])


def one_user_that_hangs() -> UserStore:
    return users().subset([IDS.index("u40")])


def loader_that_raises() -> UserStore:
    raise KeyError("secret of a user")


def loader_that_exits() -> UserStore:
    os._exit(7)


def model(features: int) -> nn.Module:
    return nn.Sequential(Obedient(), nn.Linear(features, CLASSES))


def model_that_exits() -> nn.Module:
    os._exit(9)


def model_that_hangs() -> nn.Module:
    _loop()


class Obedient(nn.Module):
    """The identity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looked: torch.Tensor = _Look.apply(x)
        return looked


class _Look(torch.autograd.Function):
    """The identity, which sees the numbers under vmap too."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        _obey(x)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        _obey(x)
        return x.clone(), in_dims[0]


def _obey(x: torch.Tensor) -> None:
    for told, deed in DEEDS.items():
        if bool((x == told).any()):
            deed()


def _exit() -> None:
    os._exit(3)


def _segment() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _loop() -> NoReturn:
    Path(os.environ[MARK]).touch()
    while True:
        time.sleep(0.001)  # a core is not needed for it


def _eat() -> None:
    """Take 3 GiB, which a limit must refuse."""
    _ = [np.ones(2**24) for _ in range(24)]


def _raise() -> None:
    raise RuntimeError("secret of a user")


DEEDS: Mapping[float, Callable[[], None]] = {
    EXIT: _exit,
    SEGMENT: _segment,
    LOOP: _loop,
    EAT: _eat,
    RAISE: _raise,
}
