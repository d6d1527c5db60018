"""Compiling a local step of many users by torch's inductor.

`torch.func.vmap` takes a step in hundreds of small operations, each of which reads and writes a
tensor of all users. Compiled, those between two matrix products are one loop.
"""

import copy
import logging
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import _inductor
from torch.fx.experimental.proxy_tensor import make_fx

from fedpriv.engine.batches import Batches
from fedpriv.engine.compiled import CompiledStep, Step, at_rest, in_order, step_of
from fedpriv.engine.local import train_chunk
from fedpriv.engine.start import Start
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.threads import one_thread
from fedpriv.errors import ModelError
from fedpriv.federated.transport import LocalTraining

_log = logging.getLogger(__name__)

_LEAST_GAIN = 1.2  # less is lost again to padding, and to threads where processes could be
_SHORTEST = 60.0  # seconds of training: compiling takes 5 to 40, and saves a third at most

_TOLERANCE = 1e-3  # of the largest change in a tensor
_ROUNDING = 1e-6  # of its largest number
# A loop in threads of its own could not hand an error over, such as a word that is out of range.
_OPTIONS = {"cpp.threads": 1}
# Its annotations leave out dictionaries of tensors, which it takes.
_compile: Callable[..., Step] = _inductor.compile


class _Given(NamedTuple):
    """What a `Step` is given."""

    start: TorchTensors
    constants: TorchTensors
    current: TorchTensors
    velocity: TorchTensors
    x: torch.Tensor
    y: torch.Tensor
    weights: torch.Tensor


def compiled_step(
    task: Task,
    start: Start,
    local: LocalTraining,
    shape: tuple[int, int, int],
    x: torch.Tensor,
    y: torch.Tensor,
    ahead: float,
    together: int,
) -> CompiledStep | None:
    """Compile the local step of a task, if that can pay; one line is logged: what came of it.

    What was compiled is then tried on random examples: it must do what was to be compiled, and
    what a user gets must stay the same to the last bit when all others are NaN. It must also be
    faster.

    Args:
        task: model and loss; training draws no random numbers.
        start: any parameters of the model and its constants, on the CPU.
        local: how users train.
        shape: (L, S, B), of which S, the steps of a user, is only for the time that they take.
        x: [1, …] one input that the model accepts; nobody's.
        y: [1, …] one target.
        ahead: users' steps that the run will take in each thread.
        together: users of a chunk that trains by steps that are not compiled.

    Returns:
        None if the run is too short, if there is no C++ compiler, if inductor does not know what
        the model does, or if what it made of that does something else or is slower.
    """
    lanes, steps, width = shape
    step, given = step_of(task, local), _given(start, local, (lanes, width), x, y)
    model = start.parameters, start.constants
    try:
        batches = _batches(given, together, steps)
        plain = seconds_of(lambda: train_chunk(task, *model, batches, local))
        if plain * ahead / (together * steps) < _SHORTEST:
            _log.warning("local steps are not compiled: this run is too short to gain by it")
            return None
        began = time.perf_counter()
        compiled = CompiledStep(local, lanes, width, _compiled(step, given))
        took, batches = time.perf_counter() - began, _batches(given, lanes, steps)
        chunks = -(-together // lanes)
        gain = plain / (seconds_of(lambda: compiled.train(*model, batches)) * chunks)
    except Exception as error:  # whatever it is, users can train without
        said = str(error).strip().partition("\n")[0]
        _log.warning("local steps are not compiled: %s: %s", type(error).__name__, said)
        return None
    if gain < _LEAST_GAIN:
        said = "compiled local steps are not used: they are %.2f times as fast"
        _log.warning(said, gain)
        return None
    _log.info("local steps were compiled in %.1f s: they are %.2f times as fast", took, gain)
    return compiled


def _compiled(step: Step, given: _Given) -> Step:
    """What inductor makes of a step; it was tried.

    Raises:
        Exception: as inductor does, or since it does something else than the step.
    """
    with warnings.catch_warnings(action="ignore"):  # torch warns of parts of itself
        graph = make_fx(step)(*copy.deepcopy(given))
        run = _compile(graph, [*copy.deepcopy(given)], _OPTIONS)
        _check(run, step, given)
    return run


def seconds_of(train: Callable[[], object]) -> float:
    """The least that it takes in a few times, which other programs disturb least."""
    seconds = []
    with one_thread():
        for _ in range(6):
            began = time.perf_counter()
            train()
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def _batches(given: _Given, users: int, steps: int) -> Batches:
    """The same batches again and again, for so many users in so many steps."""
    which = torch.arange(users) % len(given.x)
    x, y, weights = (
        t[which].unsqueeze(1).expand(-1, steps, *t.shape[1:]).contiguous()
        for t in (given.x, given.y, torch.ones_like(given.weights))
    )
    return Batches(x, y, weights, (True,) * steps, (weights.shape[2],) * steps)


def _given(
    model: Start, local: LocalTraining, shape: tuple[int, int], x: torch.Tensor, y: torch.Tensor
) -> _Given:
    """Users who all differ; the last one has no examples."""
    generator = torch.Generator().manual_seed(0)

    def some_like(example: torch.Tensor) -> torch.Tensor:
        examples = example.expand(*shape, *example.shape[1:]).contiguous()
        if not example.is_floating_point():
            return examples  # only these numbers are known to be legal
        return examples + torch.randn(examples.shape, generator=generator).to(example.dtype)

    start = in_order(model.parameters)
    current, velocity = at_rest(start, shape[0], local)
    for p in current.values():
        p.add_(torch.randn(p.shape, generator=generator) / 8)
    weights = torch.ones(shape)
    weights[-1] = 0.0
    examples = some_like(x), some_like(y)
    return _Given(start, in_order(model.constants), current, velocity, *examples, weights)


def _check(run: Step, step: Step, given: _Given) -> None:
    """Compare what was compiled with the step.

    Raises:
        ModelError: it does something else, or lets users see each other.
    """
    beside = copy.deepcopy(given)
    for p in beside.current.values():
        p[1:] = torch.nan
    (expected, *_), (found, *_) = (each(*copy.deepcopy(given)) for each in (step, run))
    alone, *_ = run(*beside)
    for name, end in expected.items():
        within = _TOLERANCE * (end - given.current[name]).abs().max() + _ROUNDING * end.abs().max()
        same = bool((found[name] - end).abs().max() <= within)
        if not same or not torch.equal(found[name][0], alone[name][0]):
            raise ModelError("what was compiled does something else than the model")
