"""Checks of a task before any user's data are touched; each error is one sentence."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.engine.arithmetic import generators_apart
from fedpriv.engine.reading import outputs_of_zeros
from fedpriv.engine.task import (
    LOSSES,
    HeldOut,
    Inputs,
    Loss,
    Task,
    binary_cross_entropy,
    called_apart,
    cross_entropy,
    each_input,
    huber,
    squared_error,
)
from fedpriv.errors import ModelError
from fedpriv.measures.figures import SCORES_FIRST
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.training.local import SGD
from fedpriv.training.request import LocalTraining

_ROUNDING = 0.02  # relative difference of losses that count as equal, for bfloat16
_ROWS = 16  # rows on which gradients are computed
_UNSCALED = 100.0  # larger inputs make a model learn slowly
_SHORT = 1e-3  # fraction of the clipping norm; shorter updates are lost in the noise
_SUM_ROUNDING = 1e-4  # tolerance for a sum of probabilities in float32


def check_task(task: Task, examples: HeldOut, *, apart: bool = False) -> None:
    """Refuse a task that cannot train, before any user's data are touched.

    Examples are a few rows of public or held-out data; with `apart`, each row is its own record.

    ModelError: a field is absent or not a tensor; model or loss raise; the loss is not one finite
    number per example, reads parameters itself or has no gradient; the model has nothing to train,
    sparse gradients, or copies that do not use their own parameters; or, with `apart`, the result
    of a row depends on other rows or on their number.
    """
    for column in task.fields:
        if column not in examples:
            hint = f"inputs and targets must be among {sorted(examples)}"
            raise ModelError(f"the data have no field {column!r}; {hint}")
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    if not parameters:
        raise ModelError(
            "the model has no trainable parameter, since none requires a gradient; name "
            "those to train in trained, a setting of the task, such as trained='*'"
        )
    for name, layer in task.model.named_modules():
        is_trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if is_trained and getattr(layer, "sparse", False) is True:
            raise ModelError(f"layer {name!r} has sparse gradients; make it with sparse=False")
    x, y = _tensors(task, examples)
    original = task.model
    try:
        task = task.apart()
    except Exception as error:
        raise ModelError(f"the model cannot be copied: {error}") from error
    tensors = parameters | task.constants(torch.device("cpu"))
    _check_losses(task, tensors, x, y)
    _check_copy(original, task, tensors, x)
    if apart:
        _check_apart(task, tensors, x, y)


def check_targets(task: Task, rows: HeldOut) -> None:
    """Refuse targets of public rows that do not fit the loss, with a ModelError.

    "cross-entropy" takes classes from 0, one for each score, or shares of classes, which are not
    negative; "binary-cross-entropy" takes numbers from 0 to 1. Other losses are not checked.
    """
    if not rows.keys() >= {*task.fields} or rows[task.targets].dtype.kind not in "iubf":
        return  # `check_task` reports this
    y = rows[task.targets]
    is_whole = y.dtype.kind in "iub"
    y = y[y != task.ignore_index] if is_whole else y
    if not y.size or task.loss not in (cross_entropy, binary_cross_entropy):
        return
    low, high = float(y.min()), float(y.max())
    if task.loss is binary_cross_entropy:
        limit, rule = 1.0, "; under binary-cross-entropy they must be from 0 to 1"
        cure = "number two classes 0 and 1, and for other numbers use the loss mse"
    elif not is_whole:
        limit, cure = math.inf, "for numbers use the loss mse"
        rule = f" and are {y.dtype}; under cross-entropy shares of classes must not be negative"
    elif not (scores := _number_of_scores(task, rows)):
        return  # other checks report this
    else:
        limit, cure = scores - 1, f"give the model {high + 1.0:g} scores"
        rule = f" and the model gives {scores} scores; cross-entropy takes 0 to {limit}"
        if low < 0.0:
            cure = "number classes from 0; ignore_index names the one that does not count"
        elif (low, high) == (1.0, scores):
            cure = "subtract 1 from all"
    if low < 0.0 or high > limit:
        targets = f"targets of the held-out rows go from {low:g} to {high:g}"
        raise ModelError(f"{targets}{rule}: {cure}")


def _number_of_scores(task: Task, rows: HeldOut) -> int:
    """Return the number of scores per target, or 0 if the model's outputs are not scores."""
    shape = outputs_of_zeros(task, rows) or ()
    is_scores = len(shape) > 1 and shape[2:] == rows[task.targets].shape[1:]
    return shape[1] if is_scores and shape[1] > 1 else 0


def check_learns(
    task: Task,
    rows: HeldOut,
    examples: HeldOut,
    local: LocalTraining,
    clipping_norm: float = 0.0,
) -> tuple[str, ...]:
    """Refuse a task that no user could train, and return reasons why it may train badly.

    Reasons are a softmax or sigmoid at the end of the model that the loss applies again, a loss
    that reaches only some parameters, large inputs, and local steps that are short relative to the
    clipping norm. The task is tried on held-out `rows`, or without them on random rows like
    `examples`.

    ModelError: gradients of all parameters are zero or not finite, or a first local step of SGD is
    not finite.
    """
    task = task.apart()
    trial = _Trial.on(task, _counting(task, rows)) if rows else None
    if trial is None or (trial.finite and not trial.losses.any()):
        # A model that fits these rows exactly may have gradients on others.
        random = [*_on_random_rows(task, examples)]
        if not random or any(t.learns or not t.finite for t in random):
            return random[0].notes if random else ()
        trial = trial or random[0]
    if not trial.learns:
        kind = "zero" if trial.finite else "NaN or infinite"
        general = "check how the model is initialised, and whether units such as ReLU give 0 always"
        raise ModelError(
            f"no user could train the model: gradients of the loss by all parameters are {kind} on "
            f"{len(trial.y)} {'held-out' if rows else 'random'} rows; "
            f"{'; '.join(trial.notes) or general}"
        )
    step_notes = trial.check_first_step(local, clipping_norm)
    return (*trial.notes, *step_notes)


@dataclass(frozen=True)
class _Trial:
    """A task on a few rows, at its initial parameters."""

    task: Task
    x: Inputs
    y: Tensor
    outputs: Tensor
    losses: Tensor
    gradients: TorchTensors  # of a weighted sum of losses, so that those of rows do not cancel

    @classmethod
    def on(cls, task: Task, rows: HeldOut) -> "_Trial":
        """Try all rows; if their gradients are not finite, use those of the first row that are."""
        x, y = _tensors(task, rows)
        weights = 1.0 + torch.rand(len(y), generator=torch.Generator().manual_seed(0))
        outputs, losses, gradients = _differentiated(task, {}, x, y, weights)
        trial = cls(task, x, y, outputs, losses, gradients)
        for row in range(len(y) if not trial.finite else 0):
            of_row = _differentiated(task, {}, *_row(x, y, row), weights[row : row + 1])[2]
            if _finite(of_row):
                return replace(trial, gradients=of_row)
        return trial

    @property
    def finite(self) -> bool:
        """True if all gradients are finite numbers."""
        return _finite(self.gradients)

    @property
    def learns(self) -> bool:
        """True if some parameter moves."""
        return self.finite and any(bool(g.any()) for g in self.gradients.values())

    @property
    def are_probabilities(self) -> bool:
        """True if outputs look like those of the softmax or sigmoid that the loss applies."""
        scores = self.outputs
        if self.task.loss is binary_cross_entropy:
            # Negated parameters negate logits, while outputs of a sigmoid remain in (0, 1).
            negated = {name: -p for name, p in _trained(self.task).items()}
            negated |= self.task.constants(torch.device("cpu"))
            pair = scores, _outputs_once(self.task.model, negated, self.x)
            return all(bool(((outputs > 0.0) & (outputs < 1.0)).all()) for outputs in pair)
        if self.task.loss is not cross_entropy or scores.dim() < 2 or bool((scores < 0.0).any()):
            return False
        sums = scores.sum(1)
        return torch.allclose(sums, torch.ones_like(sums), rtol=0.0, atol=_SUM_ROUNDING)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why the task may train badly, one sentence each, with a cure."""
        notes, last = list[str](), "softmax" if self.task.loss is cross_entropy else "sigmoid"
        inputs = [*self.x.values()] if isinstance(self.x, dict) else [self.x]
        numbers = {"inputs": [t for t in inputs if t.is_floating_point()]}
        if self.task.loss in (squared_error, huber):
            numbers["targets"] = [self.y]
        for kind, tensors in numbers.items():
            largest = max((float(t.abs().max()) for t in tensors), default=0.0)
            if not largest <= _UNSCALED:
                notes.append(
                    f"{kind} are as large as {largest:.3g}, at which models learn slowly: scale "
                    "them to about 1, by constants that are public"
                )
        if not self.y.is_floating_point() and bool((self.losses < 0.0).any()):
            notes.append(
                "losses of classes are negative, as those of NLLLoss without a LogSoftmax are: use "
                "cross-entropy"
            )
        if self.outputs.dim() > 1 and self.outputs.shape[1] == 1 and not self.losses.any():
            notes.append(
                "the model gives one score, and the cross-entropy of one class is always 0: use "
                "the loss binary-cross-entropy, and for numbers mse"
            )
        if self.are_probabilities:
            notes.append(
                f"outputs of the model look like probabilities, to which the loss applies {last} "
                f"again, so that it learns slowly: let the model end before its {last}"
            )
        try:
            tensors_by_name = self.task.constants(torch.device("cpu")) | _trained(self.task)
            _check_apart(self.task, tensors_by_name, self.x, self.y)
        except ModelError as error:  # only a note, since a user's examples may mix
            notes.append(
                f"examples do not stand alone in a batch, so that figures depend on it: {error}"
            )
        if unused := [name for name in self.task.trainable() if name not in self.gradients]:
            notes.append(
                f"the loss has no gradient by {len(unused)} of the trained parameters, such as "
                f"{unused[0]!r}, so that users send zeros and the noise alone moves them: use them "
                f"in forward, without detach, or freeze them, as Task(frozen={unused[0]!r}) does"
            )
        return tuple(notes)

    def check_first_step(self, local: LocalTraining, clipping_norm: float) -> tuple[str, ...]:
        """Refuse a learning rate of SGD at which a user's update is not finite.

        Return a note if updates are likely to be lost in the noise.
        """
        if type(local) not in (LocalTraining, SGD):
            return ()
        rate, steps = local.at(1).rate, max(local.epochs or 1, local.steps or 1)
        tensors = _trained(self.task)
        for _ in range(min(steps, 2)):
            ones = torch.ones(len(self.y))
            gradients = _differentiated(self.task, tensors, self.x, self.y, ones)[2]
            tensors = tensors | {name: tensors[name] - rate * g for name, g in gradients.items()}
        if not _finite(tensors):
            raise ModelError(
                f"learning_rate is {rate:g}, at which users' first steps are NaN or infinite; it "
                "must be smaller"
            )
        length = rate * steps * math.hypot(*(float(g.norm()) for g in self.gradients.values()))
        if not length < _SHORT * clipping_norm:
            return ()
        return (
            f"updates are about {length:.1g} long and the clipping norm is {clipping_norm:g}, so "
            "that noise hides them: raise learning_rate or the number of steps, or lower the norm",
        )


def _differentiated(
    task: Task, overrides: TorchTensors, x: Inputs, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, TorchTensors]:
    """Return outputs, losses [n], and gradients of their weighted mean for trained tensors."""
    constants = task.constants(torch.device("cpu"))
    leaves = {n: p.clone().requires_grad_() for n, p in (_trained(task) | overrides).items()}
    with torch.enable_grad(), generators_apart(0):
        outputs = called_apart(task.model, constants | leaves, x)
        losses = task.losses_of(outputs, y)
        mean = (losses * weights).mean()
        gradients = torch.autograd.grad(mean, [*leaves.values()], allow_unused=True)
    by_name = {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}
    return outputs.detach(), losses.detach(), by_name


def _trained(task: Task) -> TorchTensors:
    return {n: p.to("cpu", torch.float32) for n, p in task.trainable().items()}


def _finite(tensors: TorchTensors) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())


def _row(x: Inputs, y: Tensor, row: int) -> tuple[Inputs, Tensor]:
    piece = slice(row, row + 1)
    return each_input(lambda t: t[piece], x), y[piece]


def _counting(task: Task, rows: HeldOut) -> HeldOut:
    """Return a few rows with targets that count, spread over all rows; if none, the first row."""
    y = rows[task.targets]
    counts = (y != task.ignore_index) if y.dtype.kind in "iu" else np.ones(y.shape, np.bool_)
    places = np.flatnonzero(counts.reshape(len(y), -1).any(1))
    places = places if len(places) else np.zeros(1, np.int64)
    indices = places[np.linspace(0, len(places) - 1, min(_ROWS, len(places))).astype(np.int64)]
    return {column: rows[column][indices] for column in task.fields}


def _on_random_rows(task: Task, examples: HeldOut) -> Iterator[_Trial]:
    """Yield trials of a task on random rows like the examples, if it takes such rows."""
    for seed in range(2 if examples else 0):
        rng, rows = np.random.default_rng(seed), dict[str, npt.NDArray[np.generic]]()
        for column in task.fields:
            kind, shape = examples[column].dtype, (_ROWS, *examples[column].shape[1:])
            discrete = kind.kind in "iub"  # most models take 0 and 1 as words and classes
            numbers = rng.integers(0, 2, shape) if discrete else rng.standard_normal(shape)
            rows[column] = numbers.astype(kind)
        try:
            yield _Trial.on(task, rows)
        except Exception:
            continue


def _tensors(task: Task, rows: HeldOut) -> tuple[Inputs, Tensor]:
    """Return the inputs and targets of rows; ModelError if torch cannot hold a field."""
    return task.given({column: _tensor(column, rows[column]) for column in task.fields})


def _tensor(name: str, column: npt.NDArray[np.generic]) -> Tensor:
    if column.dtype.kind in "US":
        raise ModelError(
            f"field {name!r} holds text; give numbers, for classes their places in a public list"
        )
    try:
        return torch.tensor(np.array(column))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"field {name!r} is of type {column.dtype}, which torch cannot compute with; convert "
            "it to numbers of at most 64 bits, in the byte order of this machine"
        ) from error


def _check_losses(task: Task, tensors: TorchTensors, x: Inputs, y: Tensor) -> None:
    """Refuse a model or a loss that raises, or gives losses that are not finite."""
    try:
        outputs = called_apart(task.model, tensors, x)
        with torch.enable_grad():
            losses = task.losses_of(outputs.detach(), y)
        with torch.enable_grad(), generators_apart():
            leaves = {name: tensors[name].clone().requires_grad_() for name in task.parameters()}
            differentiable = task.losses_of(called_apart(task.model, {**tensors, **leaves}, x), y)
    except Exception as error:
        kinds = (
            f"inputs are {_kinds(x)}, targets {_kinds(y)}, and parameters are trained as float32"
        )
        raise ModelError(
            f"the model cannot be evaluated on the data: {error} ({kinds})"
            f"{_cure_of_images(task, tensors, x)}{about_words(error, x)}"
        ) from error
    if outputs.shape == (*y.shape, 1) and task.loss not in LOSSES.values():
        losses_of_all = cast(Loss, task.loss)(outputs, y)
        if losses_of_all.shape == (len(y), len(y)) and len(y) > 1:
            raise ModelError(
                f"the loss compares each of the outputs {list(outputs.shape)} with all targets "
                f"{list(y.shape)}; let it flatten the outputs, or use the loss mse"
            )
    _check_axes(task, tensors, x, y, outputs.shape)
    if losses.shape != (len(y),):
        raise ModelError(
            f"the loss of {len(y)} examples has shape {list(losses.shape)}; it must be one "
            'number per example, as with reduction="none"'
        )
    if not bool(torch.isfinite(losses).all()):
        raise ModelError(
            "the model returns NaN or infinite losses at its initial parameters; "
            "check its initialisation and the scale of the inputs"
        )
    if losses.requires_grad:
        raise ModelError(
            "the loss reads parameters itself, not those of each user; it must be a function of "
            "outputs and targets alone, so have forward return what else it needs"
        )
    if not differentiable.requires_grad:
        raise ModelError(
            "the loss has no gradient by any parameter that users send, so nothing would be "
            "trained; neither model nor loss may detach, round or compare what they compute"
        )


def _check_axes(
    task: Task, tensors: TorchTensors, x: Inputs, y: Tensor, outputs: torch.Size
) -> None:
    """Refuse scores [B, T, K] of targets [B, T] with K = T, which would be read as [B, K, T]."""
    square = y.dim() == 2 and not y.is_floating_point() and outputs == (*y.shape, y.shape[1])
    if not square or isinstance(x, dict) or x.shape[:2] != y.shape:
        return
    try:
        shorter = called_apart(task.model, tensors, x[:, :-1]).shape
    except Exception:  # the model takes only one length
        return
    if shorter[1:] == (y.shape[1] - 1, y.shape[1]):
        raise ModelError(f"outputs have an axis of positions before one of scores; {SCORES_FIRST}")


def _cure_of_images(task: Task, tensors: TorchTensors, x: Inputs) -> str:
    """Return the cure if the model takes the inputs as images with channels first, else ""."""
    if isinstance(x, dict) or x.dim() not in (3, 4):
        return ""
    images, cure = (
        (x[:, None], "x[:, None]") if x.dim() == 3 else (x.movedim(-1, 1), "np.moveaxis(x, -1, 1)")
    )
    with suppress(Exception), torch.no_grad():
        called_apart(task.model, tensors, x)
        return ""  # the model takes them as they are
    with suppress(Exception), torch.no_grad():
        called_apart(task.model, tensors, images.float())
        scaled = "" if x.is_floating_point() else ".astype('f4') / 255"
        return f"; it takes images with channels first, so give {cure}{scaled}"
    return ""


def about_words(error: Exception, x: Inputs) -> str:
    """Return a sentence about integer inputs for an IndexError, "" for other errors."""
    tensors = x.values() if isinstance(x, dict) else [x]
    words = [t for t in tensors if not t.is_floating_point()]
    if not words or not isinstance(error, IndexError):
        return ""
    low, high = min(int(t.min()) for t in words), max(int(t.max()) for t in words)
    return f"; inputs are integers from {low} to {high}, and an embedding must have a row for each"


def _kinds(inputs: Inputs) -> str:
    """Return the types and shapes of tensors, for messages."""
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')}{list(inputs.shape)}"
    return ", ".join(f"{name} {_kinds(tensor)}" for name, tensor in inputs.items())


def _check_apart(task: Task, tensors: TorchTensors, x: Inputs, y: Tensor) -> None:
    """Refuse a task in which the loss of an example depends on other examples."""
    model = task.evaluated().model

    def losses(rows: slice) -> Tensor:
        outputs = _outputs_once(model, tensors, each_input(lambda t: t[rows], x))
        return task.losses_of(outputs, y[rows])

    try:
        single_losses = torch.cat([losses(slice(row, row + 1)) for row in range(len(y))])
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on one example: {error}") from error
    # Random numbers that a model draws may differ for one example.
    if not _close(single_losses, losses(slice(None))) and not _draws(model, tensors, x):
        raise ModelError(
            "model or loss mix examples: the loss of one depends on the others, or on their "
            "number, as in nn.LSTM without batch_first=True; each must count separately"
        )


def _draws(model: nn.Module, tensors: TorchTensors, x: Inputs) -> bool:
    with generators_apart(), torch.no_grad():
        state = torch.random.get_rng_state()
        called_apart(model, tensors, x)
        return not torch.equal(state, torch.random.get_rng_state())


def _close(first: Tensor, second: Tensor) -> bool:
    """Return whether tensors agree within the rounding of bfloat16."""
    sizes = second.abs().double()
    largest = float(sizes[torch.isfinite(sizes)].max()) if torch.isfinite(sizes).any() else 0.0
    return first.shape == second.shape and torch.allclose(
        first, second, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True
    )


def _check_copy(original: nn.Module, task: Task, tensors: TorchTensors, x: Inputs) -> None:
    """Refuse a model whose copy, at other parameters, gives other outputs than the model."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: tensors[name] + 0.01 * torch.randn(p.shape, generator=generator)
        for name, p in task.trainable().items()
    }
    # Weights do not affect inputs of zeros, such as a blank row.
    x = each_input(lambda t: t.masked_fill(t == 0, 1) if t.is_floating_point() else t, x)
    try:
        first, second = (
            _outputs_once(model, {**tensors, **parameters}, x) for model in (original, task.model)
        )
    except Exception as error:
        raise ModelError(
            f"the model cannot be copied, or not evaluated near its initial parameters: {error}"
        ) from error
    if not torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True):
        raise ModelError(
            "a copy of the model does not use its own parameters, so that users cannot train side "
            "by side; forward must reach them through self"
        )


def _outputs_once(model: nn.Module, tensors: TorchTensors, x: Inputs) -> Tensor:
    """Return outputs, with the same dropout masks each time; torch's generator is restored."""
    with generators_apart(0), torch.no_grad():
        return called_apart(model, tensors, x)
