"""The task that users train: a model, its loss and its metrics.

Batch normalisation uses its running statistics in training too, so neither examples nor users mix.
The server updates the statistics from a private metric, "batch-norm".
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function

from fedpriv.engine.arithmetic import Activations
from fedpriv.engine.leftovers import WithinBounds, lazy_clone, lazy_copy
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.measures.figures import ALWAYS, SCORES_FIRST, Seen, figure_of
from fedpriv.measures.metrics import MetricFunction
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.support.checks import check_types, plain_numbers, require
from fedpriv.support.importing import import_function

HeldOut = Mapping[str, npt.NDArray[np.generic]]
"""Rows of users who are not enrolled, by field; `HELD_OUT_USER` allows figures by user."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]."""
Inputs = Tensor | dict[str, Tensor]
"""The inputs of a model: one tensor [B, …], or several tensors by the names of its arguments."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LEAST_SHARE = 2.0**-60
_IGNORED = -100  # the target that torch's losses ignore


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy [B, …] of class scores [B, K, …] against classes [B, …].

    For contiguous scores it takes a third of the time that torch's function takes. ModelError: K is
    1, or the targets are not classes.
    """
    if has_torch_function((outputs, targets)):
        pair = outputs, targets
        losses: Tensor = handle_torch_function(cross_entropy, pair, *pair)
        return losses
    # With one score, the loss would always be 0.
    if outputs.dim() > 1 and outputs.shape[1] == 1:
        raise ModelError(
            f"outputs are {list(outputs.shape)}, one score; cross-entropy needs a score of each "
            "class: with one score use the loss binary-cross-entropy, and for numbers mse"
        )
    if outputs.dim() == targets.dim() and not targets.is_floating_point():
        raise ModelError(
            f"outputs are {list(outputs.shape)} and targets {list(targets.shape)}, whole numbers; "
            "cross-entropy needs classes with one axis less, as y[:, 0] has, or y.argmax(1) of "
            "one-hot rows"
        )
    if outputs.dim() == targets.dim() + 1 and targets.is_floating_point():
        raise ModelError(
            f"targets are {str(targets.dtype).removeprefix('torch.')}{list(targets.shape)}; "
            "cross-entropy needs classes that are whole numbers, as y.astype(int) makes; for other "
            "numbers use mse"
        )
    if outputs.dim() == targets.dim() + 1 and outputs.shape[2:] != targets.shape[1:]:
        raise ModelError(
            f"outputs are {list(outputs.shape)} and targets {list(targets.shape)}; {SCORES_FIRST}"
        )
    if outputs.dim() == targets.dim() + 1 > 2 and outputs.stride(1) == 1:
        scores = outputs.movedim(1, -1).flatten(0, -2)
        losses = functional.cross_entropy(scores, targets.flatten(), reduction="none")
        return losses.view(targets.shape)
    return functional.cross_entropy(outputs, targets, reduction="none")


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy [B, …] of logits of class 1 against targets 0 and 1, [B, …].

    The logits are [B, …] or [B, 1, …]; ModelError if they have another shape.
    """
    pair = _alike("binary-cross-entropy", outputs, targets)
    return functional.binary_cross_entropy_with_logits(*pair, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of outputs [B, …] or [B, 1, …] against targets [B, …].

    ModelError: the outputs have another shape.
    """
    return functional.mse_loss(*_alike("mse", outputs, targets), reduction="none")


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return Huber's loss with δ = 1 of outputs [B, …] or [B, 1, …] against targets [B, …].

    ModelError: the outputs have another shape.
    """
    return functional.huber_loss(*_alike("huber", outputs, targets), reduction="none")


def _alike(loss: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets with one shape and type; ModelError if the shapes do not match."""
    if outputs.dim() == targets.dim() + 1 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    if outputs.shape != targets.shape:  # torch would broadcast [B, 1] − [B] to [B, B]
        shapes = f"outputs are {list(outputs.shape)} and targets {list(targets.shape)}"
        raise ModelError(f"{shapes}; under {loss} they must have the same shape")
    return outputs, targets.to(outputs.dtype)


LOSSES: Mapping[str, Loss] = {
    "binary-cross-entropy": binary_cross_entropy,
    "cross-entropy": cross_entropy,
    "huber": huber,
    "mse": squared_error,
}


def find_loss(name: str) -> Loss:
    """Return the loss with a name in `LOSSES` or at an import path "package.module:function".

    ModelError: the name is unknown, or the function cannot be imported.
    """
    return cast(Loss, import_function(f"loss {name!r}", name, ModelError, LOSSES))


@dataclass(frozen=True)
class Task:
    """A model, its loss and its metrics.

    >>> task = Task(nn.Linear(4, 3), loss="cross-entropy")
    >>> sorted(task.parameters())
    ['bias', 'weight']

    ModelError: a layer mixes examples, keeps state across them or is TorchScript, or a trained
    parameter is complex or has a hook.

    Attributes:
        model: a module that maps inputs [B, …] to outputs [B, …]. It must not mix examples if
            examples, rather than users, are protected. Its `forward` must reach parameters through
            `self`, since users train copies of the model; any state left by a user is reset. A copy
            has `RunningNorm` in place of batch normalisation.
        loss: a function that maps outputs and targets [B, …] to one loss per example [B], or to
            losses [B, …], which are averaged over all axes but the first. It must not depend on
            other trained tensors. Or a name: "cross-entropy", "binary-cross-entropy" (one logit for
            each target, 0 or 1), "mse", "huber" or "package.module:function".
        inputs: the name of the field that the model reads, or the names of several fields, which
            are passed as arguments with these names.
        targets: the name of the field that the loss reads.
        metrics: your own metrics by name, for example from `own_metrics`. Each is a function of
            outputs and targets [B, …], which it must not change, and returns a vector for each
            example, [B, *shape]. A user's metric is the mean over the user's examples. A round can
            measure these and built-in metrics.
        ignore_index: integer targets of this class are ignored in losses and their means, in
            metrics and in evaluation. A loss gets −100 instead, which torch's losses ignore; the
            values that other losses return for such targets are not read. Your own metrics get
            these targets unchanged, but their means skip examples that have no other target.
        figures: more figures for held-out rows, in addition to accuracy and loss, by name. Each is
            a name in `measures.figures.FIGURES`, a table with such a name as `figure` and its
            options, "package.module:function", or a function that maps the outputs and targets of
            all rows to a number. Users never compute figures.
        personal: names of trainable parameters, or patterns such as "head.*", that stay with users.
            In every round, each user starts with the model's values, trains them along with the
            other parameters, and sends nothing about them; the algorithm, such as `FedRecon`,
            decides how.
        trained: names or patterns of the parameters that users train; by default, the parameters
            that require gradients. All others are frozen: the model has them, but updates do not.
        frozen: names or patterns of parameters to freeze among the trained ones. If `trained` or
            `frozen` changes which parameters require gradients, the task has a copy of the model
            that shares its numbers.
        by: fields of the held-out rows, such as a site or the targets. Accuracy, loss and figures
            are also computed over the rows with each value of such a field.
    """

    model: nn.Module
    loss: Loss | str = "cross-entropy"
    inputs: str | tuple[str, ...] = "x"
    targets: str = "y"
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    ignore_index: int = _IGNORED
    figures: Mapping[str, object] = field(default_factory=dict)  # later of type `Figure`
    personal: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore_index", plain_numbers(self.ignore_index))
        self._check_types()
        for name in ("trained", "frozen", "by"):
            patterns = getattr(self, name)
            is_single = isinstance(patterns, str)
            object.__setattr__(self, name, (patterns,) if is_single else tuple(patterns))
        object.__setattr__(self, "model", unwrapped(self.model))
        for name, layer in self.model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):
                raise ModelError(
                    f"{f'layer {name!r}' if name else 'the model'} is TorchScript, into which no "
                    "user's parameters can be put; give the module that it was made from"
                )
        model = without_batch_norm(self.model)
        named = dict(self.model.named_parameters())  # copies have no hooks
        for name, tensor in (*named.items(), *self.model.named_buffers()):
            check_holds(name, tensor)
        object.__setattr__(self, "model", training_only(model, self.trained, self.frozen))
        for name in self.trainable():
            _check_trainable(name, named[name])
        object.__setattr__(
            self, "personal", matching(self.personal, self.trainable(), "trainable parameter")
        )
        if self.personal and not self.parameters():
            raise ModelError("personal names all parameters of the model; users must send some")
        if isinstance(self.loss, type):
            name = self.loss.__name__
            raise ModelError(
                f'loss is the class {name}; give an object of it, as {name}(reduction="none")'
            )
        if isinstance(self.loss, str):
            object.__setattr__(self, "loss", find_loss(self.loss))
        if not isinstance(self.inputs, str):
            names = tuple(self.inputs)
            if not names or len(set(names)) < len(names):
                raise ModelError(f"inputs are {names}; there must be at least one, each once")
            object.__setattr__(self, "inputs", names[0] if len(names) == 1 else names)
        figures = {
            n: figure_of(n, spec)
            for n, spec in self.figures.items()
            if spec != n or n not in ALWAYS
        }
        if reserved := sorted(figures.keys() & ALWAYS):
            raise InvalidValueError(f"figure {reserved[0]!r} is always measured; use another name")
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
            by=(self.by, Iterable),
        )
        for name in (*self.inputs, *self.metrics, *self.figures):
            require(isinstance(name, str), f"a name is {name!r}; it must be of the type str")
        for name, metric in self.metrics.items():
            require(callable(metric), f"metric {name!r} is {metric!r}; it must be a function")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields to read: inputs, then targets, without repeats."""
        inputs = (self.inputs,) if isinstance(self.inputs, str) else self.inputs
        return tuple(dict.fromkeys((*inputs, self.targets)))

    def given(self, columns: Mapping[str, Tensor]) -> tuple[Inputs, Tensor]:
        """Return the model's inputs and the loss's targets from the columns of a batch.

        Float64 becomes float32, the type of parameters. Booleans become 0 and 1 if they are the
        model's only input, or targets of a loss in `LOSSES`.
        """
        y = _as_input(columns[self.targets])
        if self.loss in LOSSES.values() and not (y.is_floating_point() or y.is_complex()):
            y = y if y.dtype == torch.uint8 else y.long()
        if isinstance(self.inputs, str):
            x = _as_input(columns[self.inputs])
            x = x.float() if x.dtype == torch.bool else x
            return x, y.clone() if y is x else y  # a model may change its input in place
        y = y.clone() if self.targets in self.inputs else y
        return {name: _as_input(columns[name]) for name in self.inputs}, y

    def evaluated(self) -> "Task":
        """Return the task with a copy of the model in evaluation mode, without dropout."""
        return replace(self, model=lazy_copy(self.model).eval())

    def apart(self) -> "Task":
        """Return the task with a lazy copy of the model, which may store users' data."""
        return replace(self, model=lazy_copy(self.model))

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return a copy of the parameters for which users send updates, in the model's order."""
        tensors = {n: p for n, p in self.trainable().items() if n not in self.personal}
        return {n: lazy_clone(p).cpu().float().numpy().copy() for n, p in tensors.items()}

    def statistics(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return a copy of the normalisations' running statistics by name, in the model's order."""
        return {
            f"{layer}.{kind}" if layer else kind: tensor.detach().to("cpu").numpy().copy()
            for layer, norm in running_norms(self.model).items()
            for kind, tensor in norm.statistics.items()
        }

    def trainable(self) -> TorchTensors:
        """Return the trainable parameters, including personal ones, in the model's own memory."""
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def constants(self, device: torch.device) -> TorchTensors:
        """Return copies, on a device, of the tensors that are not in updates.

        They are frozen parameters, buffers, and the initial values of personal parameters.
        """
        update_names = self.trainable().keys() - set(self.personal)
        copies = {n: lazy_clone(p.detach()) for n, p in self.model.named_parameters()}
        copies |= {n: b.detach().clone() for n, b in self.model.named_buffers()}
        return {n: t.to(device) for n, t in copies.items() if n not in update_names}

    def losses_of(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example [B], from the model's outputs [B, …] and targets [B, …].

        It is the sum over the example's targets that count, divided by the number of its targets:
        the mean over targets that count, times their share. For a batch, the sum of losses divided
        by the sum of `shares` is the mean over all targets that count.
        """
        ignored_by_torch = self.loss is cross_entropy and self.ignore_index == _IGNORED
        counts, loss_targets = None if ignored_by_torch else self.counts(y), y
        if counts is not None and self.ignore_index != _IGNORED:
            loss_targets = torch.where(counts, y.long(), _IGNORED)
        with nullcontext() if self.loss in LOSSES.values() else WithinBounds():
            losses = cast(Loss, self.loss)(outputs, loss_targets)
        means = losses if losses.dim() <= 1 else losses.flatten(1).mean(1)
        # Cross-entropy is zero for ignored targets; a loss without axes is refused elsewhere.
        if counts is None or self.loss is cross_entropy or losses.dim() == 0:
            return means
        if losses.shape == counts.shape:
            losses = torch.where(counts, losses, 0.0)
            return losses if losses.dim() == 1 else losses.flatten(1).mean(1)
        shares = self.shares(y)  # the loss has averaged over an example's targets itself
        return torch.where(shares > 0.0, means * shares, 0.0)

    def weight(self, y: Tensor) -> Tensor:
        """Return the factor [] that makes the sum of a batch's losses their mean.

        It is the mean over all targets that count. If none does, losses and the mean are 0.
        """
        return self.shares(y).sum().clamp_(min=_LEAST_SHARE).reciprocal_()

    def seen(
        self, outputs: Tensor, y: Tensor, moments: Mapping[str, Sequence[Tensor]] | None = None
    ) -> Seen:
        """Return the view of rows that metrics get, from outputs [n, …] and targets [n, …].

        `moments` are the metrics of running statistics, [n, 2·channels] for each call of a layer.
        """
        counts = self.counts(y)
        counts = torch.ones_like(y, dtype=torch.bool) if counts is None else counts
        losses = self.losses_of(outputs.clone(), y.clone())  # a loss may change them in place
        if self.loss is binary_cross_entropy:  # classes, with one score for each target
            y = (y > 0.5).long() if y.is_floating_point() else y.long()
            outputs = outputs.unsqueeze(1) if outputs.shape == y.shape else outputs
        elif self.loss in (squared_error, huber) and outputs.dim() > y.dim():
            outputs = outputs.squeeze(1)
        return Seen(outputs, y, counts, losses, moments or {})

    def counts(self, y: Tensor) -> Tensor | None:
        """Return whether each target counts, in the shape of y; None if no target can be ignored.

        Only integer targets that can hold `ignore_index` can be ignored.
        """
        kind = y.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            return None
        limits = torch.iinfo(kind)  # beyond them, the index would wrap to another class
        return y != self.ignore_index if limits.min <= self.ignore_index <= limits.max else None

    def shares(self, y: Tensor, axes: int = 1) -> Tensor:
        """Return the share of targets that count for each index of the first `axes` axes of y."""
        counts = self.counts(y)
        if counts is None:
            return torch.ones(y.shape[:axes], device=y.device)
        if counts.dim() == axes:
            return counts.float()
        counts = counts.flatten(axes)
        return counts.sum(axes).float() / counts.shape[axes]


def _as_input(column: Tensor) -> Tensor:
    return column.float() if column.dtype == torch.float64 else column


def check_holds(name: str, tensor: Tensor) -> None:
    """Raise ModelError if a parameter or buffer does not hold numbers yet."""
    why = "its layer is lazy; call the model on a row first" if is_lazy(tensor) else None
    why = "it is on the device meta; make the model on cpu" if tensor.is_meta else why
    if why:
        raise ModelError(f"{name!r} of the model holds no numbers, as {why}")


def _check_trainable(name: str, parameter: Tensor) -> None:
    """Raise ModelError if training would drop a parameter's imaginary part or its hooks."""
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

    parameters: TorchTensors  # trained parameters, including personal ones
    constants: TorchTensors  # frozen parameters and buffers
    # The server's control variates, if the local algorithm has any.
    control: TorchTensors = field(default_factory=dict)
    personal: tuple[str, ...] = ()  # names of the parameters that stay with users


def each_input(change: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Return a model's inputs with `change` applied to each tensor."""
    return {name: change(t) for name, t in x.items()} if isinstance(x, dict) else change(x)


def called(model: nn.Module, tensors: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """Return the outputs of a model that uses these tensors in place of its own, by name.

    If the model returns an object with `logits`, these are the outputs; ModelError if it has none.
    """
    positional, keywords = ((), x) if isinstance(x, dict) else ((x,), {})
    put_in = _in_all_places(model, tensors)
    with WithinBounds():
        outputs = functional_call(model, put_in, positional, keywords, tie_weights=False)
    return outputs if isinstance(outputs, Tensor) else _logits_of(outputs)


def called_apart(model: nn.Module, tensors: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """Return outputs as `called` does, with tensors and inputs that the model cannot change."""
    buffers = dict(model.named_buffers())
    copies = {n: t.clone() if n in buffers else lazy_clone(t) for n, t in tensors.items()}
    return called(model, copies, each_input(torch.clone, x))


def outputs_of(model: nn.Module, x: Inputs, activations: Activations = "float32") -> Tensor:
    """Return the outputs of a model with its own tensors; float32 if activations are bfloat16.

    Functions of torch stay `WithinBounds`. If the model returns an object with `logits`, these are
    the outputs; ModelError if it has none.
    """
    if activations == "bfloat16":
        device = next(iter(x.values())).device if isinstance(x, dict) else x.device
        # Users' weights are cast again in each step, so a cache has no use.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return outputs_of(model, x).float()
    with WithinBounds():
        outputs = model(**x) if isinstance(x, dict) else model(x)
    return outputs if isinstance(outputs, Tensor) else _logits_of(outputs)


def _logits_of(outputs: object) -> Tensor:
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        kind = type(outputs).__name__
        raise ModelError(
            f"the model returns a {kind}; it must return one tensor, or an object with a tensor "
            "logits, so wrap it in a module whose forward returns the output that the loss reads"
        )
    return logits


def _in_all_places(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name, tied ones under each of their names, once for each module.

    If torch finds these names itself, it replaces the tensors of a module that occurs twice two
    times, and afterwards restores its first replacement instead of the model's own tensor.
    """
    by_name, first_names = dict[str, Tensor](), dict[int, str]()
    for path, module in model.named_modules():
        for members in (module.named_parameters, module.named_buffers):
            for name, tensor in members(path, recurse=False, remove_duplicate=False):
                if (first := first_names.setdefault(id(tensor), name)) in tensors:
                    by_name[name] = tensors[first]
    return by_name


def matching(patterns: Iterable[str], names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names that match a pattern, in order; ModelError if a pattern matches none.

    `what` describes a name in the message of the error.
    """
    patterns, names = [patterns] if isinstance(patterns, str) else list(patterns), list(names)
    for pattern in patterns:
        check_types(**{"a pattern of names": (pattern, str)})
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(f"{pattern!r} matches no {what}; they are {names}")
    return tuple(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of `torch.compile` and data parallelism, if any."""
    parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    module = getattr(model, "module" if parallel else "_orig_mod", None)  # no public name
    return unwrapped(module) if isinstance(module, nn.Module) else model


def training_only(model: nn.Module, trained: Iterable[str], frozen: Iterable[str]) -> nn.Module:
    """Return the model with only the chosen parameters trainable; patterns are those of `Task`.

    The result is a copy that shares the model's numbers, or the model itself if nothing changes.
    ModelError: a pattern matches no parameter, or no parameter is left to train.
    """
    named = dict(model.named_parameters())
    names = [name for name, p in named.items() if p.is_floating_point()]
    selection = {*(matching(trained, names, "parameter"))} or {
        name for name, p in named.items() if p.requires_grad
    }
    excluded = {*matching(frozen, names, "parameter")}
    if excluded and not selection - excluded:
        raise ModelError(f"frozen leaves none of {sorted(selection)} to train")
    memo: dict[int, object] = {id(t): t for t in (*named.values(), *model.buffers())}
    changed = False
    for name, parameter in named.items():
        trains = name in selection - excluded
        if trains != parameter.requires_grad:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=trains)
            changed = True
    return copy.deepcopy(model, memo) if changed else model


class RunningNorm(nn.Module):
    """A batch normalisation (Ioffe & Szegedy 2015) that is always in evaluation mode.

    The output is x̂·weight + bias per channel with x̂ = (x − running_mean)/√(running_var + eps), so
    examples do not mix and no buffer changes. Weight and bias are those of the layer; buffers are
    copies.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, layer.get_buffer(name).clone())

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The buffers that a private metric may change: running mean and variance, [channels]."""
        return {"running_mean": self.running_mean, "running_var": self.running_var}

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.running_mean)

    def standardised(self, x: Tensor) -> Tensor:
        """Return x̂ for inputs [n, channels, …], in the same shape."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(self.running_var + self.eps)
        return (x - self.running_mean.view(shape)) * scale.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise inputs [n, channels, …]."""
        x, shape = self.standardised(x), (1, -1, *[1] * (x.dim() - 2))
        return x if self.weight is None else x * self.weight.view(shape) + self.bias.view(shape)


def without_batch_norm(model: nn.Module) -> nn.Module:
    """Return a copy of the model with a `RunningNorm` in place of each batch normalisation.

    Without batch normalisation, return the model itself. ModelError: another layer mixes examples
    or keeps statistics of them.
    """
    for name, layer in model.named_modules(remove_duplicate=False):
        # torch has no public common base of the normalisations with running statistics.
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        tracking = bool(getattr(layer, "track_running_stats", False))
        complete = tracking and all(b is not None for b in layer._buffers.values())
        if (batch_norm or tracking) and not (complete and type(layer) in _BATCH_NORMS):
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
    """Return the layers that normalise with running statistics by name, in the model's order."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, RunningNorm)}
