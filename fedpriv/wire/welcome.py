"""What a node takes part in: its place in the population, and the task."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.limits import (
    MAX_NAME,
    MAX_TENSORS,
    MAX_USERS,
    NODE_RECEIVES_BYTES,
    at_most,
    check_names,
    refusing,
)

LONGEST_OPTIONS = 2**16  # characters
LONGEST_WELCOME = NODE_RECEIVES_BYTES - 16  # leaves room for the tag and length of a FromServer


@dataclass(frozen=True)
class TaskDescription:
    """Model and loss by name, as `fedpriv.tasks.build_task` reads them.

    Attributes:
        model: name of a model, or import path of a function that makes one.
        options: arguments of that function; values that JSON has, so lists and no tuples.
        seed: of the model's initial and frozen parameters, in 63 bits.
        loss: name of a loss, or import path.
        metrics: import paths of the metrics that are not built in.

    Raises:
        InvalidValueError: the seed is out of range.
    """

    model: str
    options: Mapping[str, object]
    seed: int
    loss: str
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise InvalidValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")

    @property
    def imports(self) -> tuple[str, ...]:
        """The import paths in it: code that whoever builds the task runs."""
        return tuple(name for name in (self.model, self.loss, *self.metrics) if ":" in name)


@dataclass(frozen=True, eq=False)
class Welcome:
    """What the server says to a node that has connected.

    Attributes:
        population_name: as in the ledger, from 1 to 1024 characters.
        population: N, the number of enrolled users, at least 1.
        users: positions of the node's users, ascending: the k-th is that of the node's k-th user,
            ids sorted by code points; at most 2^20, read-only.
        task: what is trained.

    Raises:
        InvalidValueError: a field is out of range.
    """

    population_name: str
    population: int
    users: npt.NDArray[np.int64] = field(repr=False)
    task: TaskDescription

    def __post_init__(self) -> None:
        if not 1 <= len(self.population_name) <= MAX_NAME:
            raise InvalidValueError(
                f"population_name has {len(self.population_name)} characters; legal are 1 to "
                f"{MAX_NAME}"
            )
        if not 1 <= self.population < 2**63:
            raise InvalidValueError(f"population is {self.population}; it must be at least 1")
        users = self.users
        if users.ndim != 1 or users.dtype != np.int64 or np.any(users[1:] <= users[:-1]):
            raise InvalidValueError("users are no ascending vector of int64, each once")
        if users.size and not 0 <= users[0] <= users[-1] < self.population:
            raise InvalidValueError(f"users are not from 0 to {self.population - 1}")
        users.flags.writeable = False


def encode_welcome(welcome: Welcome) -> pb.Welcome:
    """The message of a welcome.

    Raises:
        WireError: it passes a limit, or an option has no place in JSON.
    """
    task = welcome.task
    with refusing("a welcome"):
        message = pb.Welcome(
            population_name=welcome.population_name,
            population=welcome.population,
            users=welcome.users.tolist(),
            task=pb.Task(
                model=task.model,
                options=_text_of(task.options),
                seed=task.seed,
                loss=task.loss,
                metrics=task.metrics,
            ),
        )
    _check(message)
    at_most("bytes in a welcome", message.ByteSize(), LONGEST_WELCOME)
    return message


def decode_welcome(message: pb.Welcome) -> Welcome:
    """The welcome in a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    _check(message)
    task = message.task
    with refusing("a welcome"):
        described = TaskDescription(
            task.model, _options(task.options), task.seed, task.loss, tuple(task.metrics)
        )
        users = np.array(message.users, np.int64)
        return Welcome(message.population_name, message.population, users, described)


def _check(message: pb.Welcome) -> None:
    task = message.task
    at_most("users in a welcome", len(message.users), MAX_USERS)
    at_most("metrics in a welcome", len(task.metrics), MAX_TENSORS)
    at_most("characters in the options of a model", len(task.options), LONGEST_OPTIONS)
    check_names("model, loss or metric", (task.model, task.loss, *task.metrics))


def _text_of(options: Mapping[str, object]) -> str:
    try:
        text = json.dumps(dict(options), allow_nan=False)
    except RecursionError as error:
        raise WireError("the options of a model are nested too deeply") from error
    # Tuples and keys that are numbers would arrive as something else.
    if json.loads(text) != options:
        raise WireError("the options of a model hold what JSON has no place for")
    return text


def _options(text: str) -> dict[str, object]:
    try:
        options = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise WireError("the options of a model are nested too deeply") from error
    if not isinstance(options, dict):
        raise WireError("the options of a model are no JSON object")
    return options


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(number: str) -> NoReturn:
    raise WireError(f"the options of a model hold {number[:20]}, which is no number of JSON")
