"""What users train, a `Task`, and the arithmetic in which they train it.

Batch normalisation uses its running statistics in training too, so that neither examples nor users
mix; the server moves the statistics by a private metric, "batch-norm".
"""

import copy
import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy

from fedpriv.data.population import HELD_OUT_USER
from fedpriv.engine.bounds import WithinBounds
from fedpriv.engine.figures import (
    ALWAYS,
    Collected,
    Figure,
    Seen,
    Sums,
    are_right,
    figure_of,
    spread_over_users,
)
from fedpriv.errors import (
    InvalidValueError,
    ModelError,
    check_types,
    known_names,
    plain_numbers,
    require,
)
from fedpriv.importing import import_function
from fedpriv.privacy.clipping_torch import TorchTensors, to_device
from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.round import RoundRequest

HeldOut = Mapping[str, npt.NDArray[np.generic]]
"""Rows of no enrolled user, by field; figures are also by user if there is a `HELD_OUT_USER`."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]."""
MetricFunction = Callable[[Tensor, Tensor], Tensor]
Inputs = Tensor | dict[str, Tensor]
"""What a model reads of examples: one tensor [B, …], or several by the names of its arguments."""
Activations = Literal["float32", "tf32", "bfloat16"]
"""Under "bfloat16" layers multiply numbers of 8 significant bits, as under `torch.autocast`, while
users train. Under "tf32", which only a GPU knows, products of float32 round their factors to 11.
Parameters, losses, updates, their sums and all metrics stay float32."""

# Held while torch's process-wide switches are as one thread needs them and models hold its users'
# parameters; and while a thread forks, so that no child starts with those of another thread.
ARITHMETIC_LOCK = threading.RLock()

_Result = TypeVar("_Result")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SMALLEST = torch.finfo(torch.float32).tiny
_ROWS = 500  # held-out rows that are evaluated at once; outputs of more would leave the caches
_PER_THREAD = 2**15  # torch gives a thread no fewer numbers
_IGNORED = -100  # the target that torch's losses leave out


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of class scores [B, K, …] against classes [B, …]."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of outputs against targets of the same shape [B, …]; ModelError if not."""
    if outputs.shape != targets.shape:  # torch would broadcast [B, 1] − [B] to [B, B]
        found = f"outputs are {list(outputs.shape)} and targets {list(targets.shape)}"
        raise ModelError(f"{found}; under squared-error they must have the same shape")
    return functional.mse_loss(outputs, targets, reduction="none")


LOSSES: Mapping[str, Loss] = {"cross-entropy": cross_entropy, "squared-error": squared_error}


def find_loss(name: str) -> Loss:
    """Loss of a name, or "package.module:function"; another is a `ModelError`."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ModelError(
            f"unknown loss {name!r}; {known_names(name, LOSSES)}, or package.module:function"
        )
    return cast(Loss, import_function(f"loss {name!r}", name, ModelError))


@dataclass(frozen=True)
class Task:
    """A model, its loss and its own metrics.

    >>> task = Task(nn.Linear(4, 3), loss="cross-entropy")
    >>> sorted(task.parameters())
    ['bias', 'weight']

    A layer that depends on other examples or keeps state across them is a `ModelError`, and so is
    one of TorchScript, or a trained parameter that is complex or has a hook.

    Attributes:
        model: any module that maps inputs [B, …] to outputs [B, …] without mixing examples or
            changing its own buffers. Its forward must reach parameters through `self`, since users
            train on copies of it. Batch normalisation is replaced, in a copy, by `RunningNorm`. If
            it checkpoints activations, with `use_reentrant=False`, users train one at a time.
        loss: maps outputs and targets [B, …], and nothing else that is trained, to one loss per
            example [B], or to losses [B, …] that are averaged over all but the first axis; or the
            name of one: "cross-entropy", "squared-error" or "package.module:function".
        inputs: name of the field that the model reads; or names of several, which it is given as
            arguments of these names; `targets`: of that which the loss reads.
        metrics: own metrics by names of your own, e.g. from `own_metrics`: functions of outputs and
            targets [B, …], which they must not change, to a vector of each example, [B, *shape]. A
            user's metric is the mean over its examples. A round can ask for these and for built-in
            ones.
        ignore_index: integer targets of this class count nowhere: not in losses and their means,
            not in metrics, not in evaluation. A loss gets −100 in their place, which torch's leave
            out; what another gives for them is not read. Own metrics are given them as they are,
            but an example of which no target counts does not count in their means.
        figures: what models are measured by on held-out rows beside accuracy and loss, by names of
            your own: a name of `engine.figures.FIGURES`, a table of one as `figure` and its
            options, "package.module:function", or a function of outputs and targets of all rows
            to a number. None is asked of users.
        personal: names of trainable parameters, or patterns such as "head.*", that stay with users.
            Each user begins every round with them as the model has them, trains them beside the
            others, and sends nothing of them; how is up to the algorithm, such as `FedRecon`.
        trained: names of parameters, or patterns, that users train; by default those that require
            gradients. All others are frozen: they are part of the model, and of no update.
        frozen: names of parameters, or patterns, that are frozen among these. Where `trained` or
            `frozen` changes what requires gradients, the task has a copy of the model with the
            same numbers.
    """

    model: nn.Module
    loss: Loss | str = "cross-entropy"
    inputs: str | tuple[str, ...] = "x"
    targets: str = "y"
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    ignore_index: int = _IGNORED
    figures: Mapping[str, object] = field(default_factory=dict)  # of `Figure`, once it is made
    personal: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore_index", plain_numbers(self.ignore_index))
        self._check_types()
        for name in ("trained", "frozen"):
            patterns = getattr(self, name)
            one = isinstance(patterns, str)
            object.__setattr__(self, name, (patterns,) if one else tuple(patterns))
        for name, layer in self.model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):
                raise ModelError(
                    f"{f'layer {name!r}' if name else 'the model'} is TorchScript, into which no "
                    "user's parameters can be put; give the module that it was made from"
                )
        model = without_batch_norm(self.model)
        given = dict(self.model.named_parameters())  # copies have no hooks
        for name, tensor in (*given.items(), *self.model.named_buffers()):
            _check_holds(name, tensor)
        object.__setattr__(self, "model", training_only(model, self.trained, self.frozen))
        for name in self.trainable():
            _check_trainable(name, given[name])
        object.__setattr__(
            self, "personal", matching(self.personal, self.trainable(), "trainable parameter")
        )
        if self.personal and not self.parameters():
            raise ModelError("personal names all parameters of the model; users must send some")
        if isinstance(self.loss, str):
            object.__setattr__(self, "loss", find_loss(self.loss))
        if not isinstance(self.inputs, str):
            names = tuple(self.inputs)
            if not names or len(set(names)) < len(names):
                raise ModelError(f"inputs are {names}; there must be at least one, each once")
            object.__setattr__(self, "inputs", names[0] if len(names) == 1 else names)
        figures = {
            n: figure_of(n, what)
            for n, what in self.figures.items()
            if what != n or n not in ALWAYS
        }
        if taken := sorted(figures.keys() & ALWAYS):
            raise InvalidValueError(
                f"figure {taken[0]!r} is measured in any case; use another name"
            )
        object.__setattr__(self, "figures", figures)

    def _check_types(self) -> None:
        check_types(
            model=(self.model, nn.Module),
            loss=(self.loss, str | Callable),
            inputs=(self.inputs, str | Collection),
            targets=(self.targets, str),
            metrics=(self.metrics, Mapping),
            ignore_index=(self.ignore_index, int),
            figures=(self.figures, Mapping),
            personal=(self.personal, Iterable),
            trained=(self.trained, Iterable),
            frozen=(self.frozen, Iterable),
        )
        for name in (*self.inputs, *self.metrics, *self.figures):
            require(isinstance(name, str), f"a name is {name!r}; it must be of the type str")
        for name, metric in self.metrics.items():
            require(callable(metric), f"metric {name!r} is {metric!r}; it must be a function")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that are read: inputs, then targets, which may be one of them."""
        inputs = (self.inputs,) if isinstance(self.inputs, str) else self.inputs
        return tuple(dict.fromkeys((*inputs, self.targets)))

    def given(self, columns: Mapping[str, Tensor]) -> tuple[Inputs, Tensor]:
        """What the model reads of these columns, and what the loss reads."""
        if isinstance(self.inputs, str):
            return columns[self.inputs], columns[self.targets]
        return {name: columns[name] for name in self.inputs}, columns[self.targets]

    def evaluated(self) -> "Task":
        """The task with a copy of the model in evaluation mode: without dropout."""
        return replace(self, model=copy.deepcopy(self.model).eval())

    def apart(self) -> "Task":
        """The task with a copy of the model, which shares its parameters.

        What the copy writes down of users' data, in buffers or elsewhere, is not in the model.
        """
        shared: dict[int, object] = {id(p): p for p in self.model.parameters()}
        return replace(self, model=copy.deepcopy(self.model, shared))

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the parameters that users send updates of, in the order of the model."""
        sent = {n: p for n, p in self.trainable().items() if n not in self.personal}
        return {n: p.to("cpu", torch.float32).numpy().copy() for n, p in sent.items()}

    def statistics(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the running statistics of normalisations, by name, in the order of the model."""
        return {
            f"{layer}.{kind}" if layer else kind: tensor.detach().to("cpu").numpy().copy()
            for layer, norm in running_norms(self.model).items()
            for kind, tensor in norm.named_buffers()
        }

    def trainable(self) -> TorchTensors:
        """Trainable parameters, personal ones included, where the model has them."""
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def constants(self, device: torch.device) -> TorchTensors:
        """All that updates leave out: frozen and personal parameters as they begin, and buffers."""
        sent = self.trainable().keys() - set(self.personal)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {n: t.detach().to(device) for n, t in tensors.items() if n not in sent}

    def buffers_in(self, constants: TorchTensors) -> TorchTensors:
        """Copies of the model's buffers, as they are among these constants."""
        return {name: constants[name].clone() for name, _ in self.model.named_buffers()}

    def losses_of(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each example [B] from the model's outputs [B, …] and targets [B, …].

        It is the sum over targets that count, over the number of all: the mean of those that count
        times their `shares`. So sums of both over examples give the mean over targets.
        """
        counts, given = self.counts(y), y
        if counts is not None and self.ignore_index != _IGNORED:
            given = torch.where(counts, y.long(), _IGNORED)
        with nullcontext() if self.loss in LOSSES.values() else WithinBounds():
            losses = cast(Loss, self.loss)(outputs, given)
        means = losses if losses.dim() <= 1 else losses.flatten(1).mean(1)
        # Cross-entropy is zero for what does not count; a loss without axes is refused elsewhere.
        if counts is None or self.loss is cross_entropy or losses.dim() == 0:
            return means
        if losses.shape == counts.shape:
            losses = torch.where(counts, losses, 0.0)
            return losses if losses.dim() == 1 else losses.flatten(1).mean(1)
        shares = self.shares(y)  # the loss took a mean over an example's targets itself
        return torch.where(shares > 0.0, means * shares, 0.0)

    def counts(self, y: Tensor) -> Tensor | None:
        """Whether each target counts, of the same shape; None if none can be ignored."""
        kind = y.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            return None
        limits = torch.iinfo(kind)  # a number beyond them would be taken for another class
        return y != self.ignore_index if limits.min <= self.ignore_index <= limits.max else None

    def shares(self, y: Tensor, axes: int = 1, kind: torch.dtype = torch.float32) -> Tensor:
        """Share of an example's targets that count, over the first axes of y; 1 where all do."""
        counts = self.counts(y)
        if counts is None:
            return torch.ones(y.shape[:axes], dtype=kind, device=y.device)
        if counts.dim() == axes:
            return counts.to(kind)
        counts = counts.flatten(axes)
        return counts.sum(axes).to(kind) / counts.shape[axes]


def _check_holds(name: str, tensor: Tensor) -> None:
    """Refuse a parameter or buffer that has no numbers yet."""
    why = "its layer is lazy; call the model on a row first" if is_lazy(tensor) else None
    why = "it is on the device meta; make the model on cpu" if tensor.is_meta else why
    if why:
        raise ModelError(f"{name!r} of the model holds no numbers, as {why}")


def _check_trainable(name: str, parameter: Tensor) -> None:
    """Refuse what would be lost of a parameter that users train."""
    if not parameter.is_floating_point():
        kind = str(parameter.dtype).removeprefix("torch.")
        raise ModelError(
            f"parameter {name!r} is {kind}; users train floating-point numbers, so let it hold the "
            "real and imaginary parts, for torch.view_as_complex"
        )
    hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    if any(hooks):
        raise ModelError(
            f"parameter {name!r} has a hook, which users would not call; change gradients in a "
            "local algorithm"
        )


@dataclass(frozen=True)
class RoundParameters:
    """The model at the start of a round, on the device where users train; never written to."""

    parameters: TorchTensors  # what is trained
    constants: TorchTensors  # frozen parameters and buffers
    # The server's control variates, where the local algorithm has some.
    control: TorchTensors = field(default_factory=dict)
    personal: tuple[str, ...] = ()  # names of the parameters of which nothing is sent

    @classmethod
    def of(
        cls,
        request: RoundRequest,
        constants: TorchTensors,
        device: torch.device,
        personal: tuple[str, ...] = (),
    ) -> "RoundParameters":
        """Copy a request's tensors to a device; its statistics replace those of the constants."""
        parameters, statistics, control = (
            {name: to_device(torch.tensor(array), device) for name, array in tensors.items()}
            for tensors in (request.parameters, request.statistics, request.control)
        )
        parameters |= {name: constants[name] for name in personal}
        constants = {n: t for n, t in constants.items() if n not in personal}
        return cls(parameters, constants | statistics, control, personal)


@dataclass(frozen=True)
class Evaluation:
    """A model on held-out rows; figures that could not be computed are NaN."""

    loss: float  # mean over targets that count
    accuracy: float | None  # in [0, 1]; None unless targets are classes
    figures: Mapping[str, float]  # those of the task, by name
    # Where rows have a `HELD_OUT_USER`: `spread_over_users` of each figure, loss and accuracy too.
    held_out_users: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str]  # by figure, why it could not be computed


@torch.no_grad()
def evaluate(
    task: Task,
    rows: HeldOut,
    device: torch.device,
    parameters: Tensors,
    personal: Iterable[tuple[npt.NDArray[np.int64], Tensors]] | None = None,
) -> Evaluation:
    """Loss, accuracy and the task's figures of a model without dropout, over all held-out rows.

    Or over the rows [k] that `personal` names, with tensors of their user in the model's place.
    What a model draws in evaluation too is the same each time.
    """
    tensors = task.constants(device)
    tensors |= {name: torch.tensor(p, device=device) for name, p in parameters.items()}
    users, owners = np.empty(1), np.zeros(len(rows[task.targets]), np.int64)
    if HELD_OUT_USER in rows:
        users, owners = np.unique(rows[HELD_OUT_USER], return_inverse=True)
    measured = _Measured(cast(Mapping[str, Figure], task.figures), len(users))
    with _evaluating(task.model), seeded(bytes(32), 0, device):
        tensors = _channels_last(task, tensors, rows, device)
        for piece, replaced in _pieces(len(owners), personal):
            columns = {n: torch.tensor(rows[n][piece], device=device) for n in task.fields}
            x, y = task.given(columns)
            put_in = tensors | {n: torch.tensor(p, device=device) for n, p in replaced.items()}
            outputs, counts = called(task.model, put_in, x), task.counts(y)
            counts = torch.ones_like(y, dtype=torch.bool) if counts is None else counts
            seen = Seen(outputs, y, counts, task.losses_of(outputs, y))
            measured.add(seen, torch.tensor(owners[piece], device=device))
    return measured.evaluation(of_users=HELD_OUT_USER in rows)


class _Measured:
    """Figures of rows that are seen piece by piece, of all and of each of some users.

    A figure that raises costs nothing else: a run must not lose what it has spent.
    """

    def __init__(self, figures: Mapping[str, Figure], users: int) -> None:
        self._figures, self._users = figures, users
        self._summed = {"loss": _LOSS, "accuracy": _ACCURACY}
        self._summed |= {name: each for name, each in figures.items() if isinstance(each, Sums)}
        self._functions = {n: each for n, each in figures.items() if not isinstance(each, Sums)}
        self._sums, self._parts = dict[str, Tensor](), list[Collected]()
        self._failed: dict[str, str] = {}

    def add(self, seen: Seen, owners: Tensor) -> None:
        """Take in rows and the number of each one's user."""
        if seen.targets.dtype.is_floating_point or seen.outputs.dim() != seen.targets.dim() + 1:
            self._summed.pop("accuracy", None)
        for name in [name for name in self._summed if name not in self._failed]:
            try:
                found = self._summed[name].of_rows(seen)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            into = self._sums.setdefault(name, found.new_zeros((self._users, found.shape[1])))
            _ = into.index_add_(0, owners, found) if len(into) > 1 else into.add_(found.sum(0))
        if self._functions:
            self._parts.append(Collected.of(seen, owners))

    def evaluation(self, *, of_users: bool) -> Evaluation:
        """The figures of all rows, and how they differ among users."""
        values, by_user = dict[str, float](), dict[str, npt.NDArray[np.float64]]()
        for name, total in self._sums.items():
            values[name] = float(self._summed[name].finish(total.sum(0, keepdim=True)))
            by_user[name] = self._summed[name].finish(total).cpu().numpy()
        collected = [Collected.joined(self._parts)] if self._functions else []
        for name, function in self._functions.items():
            try:
                values[name] = collected[0].value(function)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            if of_users:
                by_user[name] = collected[0].by_user(function, self._users)
        known = {n: math.nan if n in self._failed else values[n] for n in self._figures}
        told = {n: each for n, each in by_user.items() if of_users and n not in self._failed}
        spreads = {name: spread_over_users(each) for name, each in told.items()}
        accuracy = values.get("accuracy")
        return Evaluation(values["loss"], accuracy, known, spreads, self._failed)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each part of it back into its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _pieces(
    rows: int, personal: Iterable[tuple[npt.NDArray[np.int64], Tensors]] | None
) -> Iterator[tuple[npt.NDArray[np.int64], Tensors]]:
    for some, own in [(np.arange(rows), {})] if personal is None else personal:
        for start in range(0, len(some), _ROWS):
            yield some[start : start + _ROWS], own


def _channels_last(
    task: Task, tensors: TorchTensors, rows: HeldOut, device: torch.device
) -> TorchTensors:
    """The tensors, with weights of convolutions channels last: a CPU pools their outputs faster.

    They stay as they are where the model then fails, as it may on a view, or gives something else.
    """
    weights = {name: t for name, t in tensors.items() if t.dim() == 4}
    if device.type != "cpu" or not weights:
        return tensors
    last = {n: t.clone(memory_format=torch.channels_last) for n, t in weights.items()}
    with suppress(Exception):
        x, _ = task.given({name: torch.tensor(rows[name][:1]) for name in task.fields})
        two = each_input(lambda t: torch.cat([t, t]), x)  # of one alone, more views can be taken
        found, expected = (called(task.model, tensors | each, two) for each in (last, {}))
        if torch.allclose(found, expected, 1e-4, 1e-5, equal_nan=True):
            return tensors | last
    return tensors


def _loss_sums(seen: Seen) -> Tensor:
    counts = seen.counts.double()
    shares = counts if counts.dim() == 1 else counts.flatten(1).mean(1)
    return torch.stack([seen.losses.double(), shares], 1)


def _hits(seen: Seen) -> Tensor:
    hits = are_right(seen.outputs, seen.targets) & seen.counts
    both = torch.stack([hits, seen.counts], -1).double()
    return both.reshape(len(both), -1, 2).sum(1)


def _ratio(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1]


_LOSS, _ACCURACY = Sums(_loss_sums, _ratio), Sums(_hits, _ratio)


def each_input(change: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """What a model reads, with each tensor of it changed."""
    return {name: change(t) for name, t in x.items()} if isinstance(x, dict) else change(x)


def called(model: nn.Module, tensors: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """Outputs of a model with tensors put in by name; their `logits` if they are no tensor."""
    with WithinBounds():
        return called_freely(model, tensors, x)


def called_freely(model: nn.Module, tensors: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """As `called`, but faster, for a model that needs nothing of `WithinBounds`."""
    unnamed, named = ((), x) if isinstance(x, dict) else ((x,), {})
    # functional_call costs as much as a small layer.
    outputs = (
        functional_call(model, _in_all_places(model, tensors), unnamed, named, tie_weights=False)
        if tensors
        else model(*unnamed, **named)
    )
    return outputs if isinstance(outputs, Tensor) else _logits_of(outputs)


def _logits_of(outputs: Any) -> Tensor:
    try:
        return cast(Tensor, outputs.logits)
    except AttributeError as error:
        kind = type(outputs).__name__
        raise ModelError(
            f"the model returns a {kind}; it must return one tensor, or an object with logits"
        ) from error


class _During(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, do: Callable[[], Any]) -> Any:
        return do()


def done_with(
    model: nn.Module, tensors: Mapping[str, Tensor], do: Callable[[], _Result]
) -> _Result:
    """What is returned by a call during which a model has tensors put in by name."""
    put_in = {f"model.{name}": t for name, t in _in_all_places(model, tensors).items()}
    return cast(_Result, functional_call(_During(model), put_in, (do,), tie_weights=False))


def _in_all_places(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, and by all other names of tied ones; a module in two places has one.

    Where torch finds these names itself, it puts tensors into such a module twice, and what was put
    in first comes back at the end in place of the model's own.
    """
    found, first_names = dict[str, Tensor](), dict[int, str]()
    for path, module in model.named_modules():
        for held in (module.named_parameters, module.named_buffers):
            for name, tensor in held(path, recurse=False, remove_duplicate=False):
                if (first := first_names.setdefault(id(tensor), name)) in tensors:
                    found[name] = tensors[first]
    return found


def matching(patterns: Iterable[str], names: Iterable[str], what: str) -> tuple[str, ...]:
    """The names, in their order, that some pattern matches; a `ModelError` if one matches none."""
    patterns, names = [patterns] if isinstance(patterns, str) else list(patterns), list(names)
    for pattern in patterns:
        check_types(**{"a pattern of names": (pattern, str)})
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(f"{pattern!r} matches no {what}; they are {names}")
    return tuple(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


def training_only(model: nn.Module, trained: Iterable[str], frozen: Iterable[str]) -> nn.Module:
    """The model with gradients of the parameters that some of the patterns name, as in a `Task`.

    A copy of it, which shares its numbers, unless that changes nothing. A `ModelError` says that a
    pattern matches no parameter, or that none is left to train.
    """
    held = dict(model.named_parameters())
    names = [name for name, p in held.items() if p.is_floating_point()]
    chosen = {*(matching(trained, names, "parameter"))} or {
        name for name, p in held.items() if p.requires_grad
    }
    stopped = {*matching(frozen, names, "parameter")}
    if stopped and not chosen - stopped:
        raise ModelError(f"frozen leaves nothing of {sorted(chosen)} to train")
    memo: dict[int, object] = {id(t): t for t in (*held.values(), *model.buffers())}
    changed = False
    for name, parameter in held.items():
        needs = name in chosen - stopped
        if needs != parameter.requires_grad:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=needs)
            changed = True
    return copy.deepcopy(model, memo) if changed else model


class RunningNorm(nn.Module):
    """A batch normalisation (Ioffe & Szegedy 2015) that is always in evaluation mode.

    Output is x̂·weight + bias per channel with x̂ = (x − running_mean)/√(running_var + eps), so that
    examples do not mix and no buffer changes. Parameters and buffers keep their names.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None:
            raise ModelError("a layer without running statistics cannot normalise with them")
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean.clone())
        self.register_buffer("running_var", layer.running_var.clone())

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.running_mean)

    def standardised(self, x: Tensor) -> Tensor:
        """x̂ of inputs [n, channels, …]: same shape."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(self.running_var + self.eps)
        return (x - self.running_mean.view(shape)) * scale.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise inputs [n, channels, …]."""
        x, shape = self.standardised(x), (1, -1, *[1] * (x.dim() - 2))
        return x if self.weight is None else x * self.weight.view(shape) + self.bias.view(shape)


def without_batch_norm(model: nn.Module) -> nn.Module:
    """A copy of the model with `RunningNorm` for every batch normalisation; itself if it has none.

    Another layer that mixes examples or keeps statistics of them is a `ModelError`.
    """
    for name, layer in model.named_modules(remove_duplicate=False):
        # torch has no public common base of the normalisations with running statistics.
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        tracking = bool(getattr(layer, "track_running_stats", False))
        if (batch_norm or tracking) and not (tracking and type(layer) in _BATCH_NORMS):
            raise ModelError(
                f"layer {name!r} is {type(layer).__name__}, which mixes examples or keeps "
                "statistics of them; replace it by GroupNorm, or by BatchNorm that tracks running "
                "statistics"
            )
    memo: dict[int, object] = {}
    for layer in model.modules():
        if isinstance(layer, _BATCH_NORMS):
            memo[id(layer)] = RunningNorm(copy.deepcopy(layer, memo))
    return copy.deepcopy(model, memo) if memo else model


def running_norms(model: nn.Module) -> dict[str, RunningNorm]:
    """The layers that normalise with running statistics, by name, in the order of the model."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, RunningNorm)}


def activations_named(name: object, device: torch.device) -> Activations:
    """Activations of a name, if the device knows them; another is an `InvalidValueError`."""
    known = [each for each in get_args(Activations) if each != "tf32" or device.type != "cpu"]
    if name not in known:
        raise InvalidValueError(
            f"activations is {name!r}; legal on {device.type} are {', '.join(known)}"
        )
    return cast(Activations, name)


def outputs_of(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Inputs,
    activations: Activations,
    call: Callable[[nn.Module, Mapping[str, Tensor], Inputs], Tensor] = called,
) -> Tensor:
    """Outputs, float32, of a model in training, with tensors put in by name."""
    # Users' weights are lowered anew in each step, so there is nothing to cache.
    lower = activations == "bfloat16"
    device = next(iter(x.values())).device if isinstance(x, dict) else x.device
    with torch.autocast(device.type, torch.bfloat16, enabled=lower, cache_enabled=False):
        outputs = call(model, tensors, x)
    return outputs.float() if lower else outputs


def lowered(x: Tensor) -> Tensor:
    """A tensor in the type that products have in the forward pass under way."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


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
def seeded(local_key: bytes, user: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, as for dropout, by key and user, and restore them afterwards."""
    own = hashlib.sha256(local_key + user.to_bytes(8, "little")).digest()
    seed = int.from_bytes(own[:8], "little") >> 1
    # Not `torch.manual_seed`, which formats the stack for each kind of device that is absent.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
        yield
