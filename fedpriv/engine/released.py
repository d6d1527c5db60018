"""A released model: as a module, and as a file of safetensors that holds its whole state_dict.

The file holds a tensor with several names, such as an embedding that is also a head, once, under
the first name in alphabetical order, as `safetensors.torch.save_model` does.
"""

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedpriv.engine.task import Task
from fedpriv.errors import DataError, ModelError
from fedpriv.privacy.layout import Tensors
from fedpriv.training.rounds import RoundResult, ServerState

_TOLD = ("run", "rounds", "epsilon", "delta", "unit", "relation", "randomness")  # of the last round


def released(task: Task, moved: Tensors) -> nn.Module:
    """A copy of a task's model in evaluation mode, with tensors that rounds released, by name."""
    model = copy.deepcopy(task.model).eval()
    held = _named(model)
    for name, array in moved.items():
        held[name].data = torch.tensor(array).to(held[name])
    return model


def released_model(
    task: Task,
    state: ServerState,
    results: Iterable[RoundResult],
    classes: tuple[str, ...] = (),
) -> bytes:
    """The model of a state as a file of safetensors; its metadata say what it cost.

    Under the key "release" they are a JSON object: `round`, and of its result `run`, `rounds`,
    `epsilon` ("Infinity" without noise), `delta`, `unit`, `relation` and `randomness`; `tied`, the
    name in the file of each name that is left out; and `frozen`, with `names` of the tensors that
    no round or user moves, and `sha256`, their `sha256_of`. Names of `classes` must be public.
    """
    told: dict[str, object] = {"round": state.round} | ({"classes": classes} if classes else {})
    for result in results:
        if result.round == state.round:
            told |= {key: getattr(result, key) for key in _TOLD}
            if math.isinf(result.epsilon):  # JSON has no such number
                told["epsilon"] = "Infinity"
    tensors, told["tied"] = _each_once(released(task, state.model))
    frozen = frozen_of(task)
    told["frozen"] = {"names": [*frozen], "sha256": sha256_of(frozen)}
    apart = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    # One key: safetensors writes several in any order, and equal runs have equal files.
    return save(apart, {"release": json.dumps(told)})


def read_released(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """All tensors of a released model by every name, those that are tied too, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("release")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        release = json.loads(text) if text else {}
        tied = {name: tensors[first] for name, first in release["tied"].items()}
        return tensors | tied, release
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        reason = f"its metadata lack {error}" if isinstance(error, KeyError) else error
        raise DataError(
            f"{path} cannot be read as a released model: {reason}; it must be model.safetensors of "
            "a run, or a file that `fedpriv model` fetched"
        ) from error


def frozen_of(task: Task) -> dict[str, Tensor]:
    """The tensors of a task's model that no round or user moves, by their names in the file."""
    held, (tensors, _) = _named(task.model), _each_once(task.model)
    moved = {id(held[name]) for name in (*task.trainable(), *task.statistics())}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) not in moved}


def check_can_be_released(task: Task) -> None:
    """Raise ModelError if a file cannot hold the whole state_dict of the task's model."""
    held, (tensors, _) = _named(task.model), _each_once(task.model)
    kept = {id(tensor) for tensor in tensors.values()}
    for name in task.trainable():
        if id(held[name]) not in kept:
            raise ModelError(
                f"parameter {name!r} is trained and absent from the model's state_dict, so no file "
                "could hold it; the state_dict must hold every parameter itself"
            )
    for name, tensor in tensors.items():
        try:
            save({name: torch.empty(0, dtype=tensor.dtype, layout=tensor.layout)})
        except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            raise ModelError(
                f"{name!r} of the model is {kind}, which no file of safetensors can hold; it must "
                "be dense and of a type that safetensors knows, or a buffer with persistent=False"
            ) from error


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors, with their names, types and shapes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        tensor = (tensor if tensor.layout is torch.strided else tensor.to_dense()).contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), [*tensor.shape]]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers themselves of a model's state_dict, by every name."""
    own = {id(tensor) for tensor in _named(model).values()}
    state = model.state_dict(keep_vars=True)  # else they would be other objects
    return {name: tensor for name, tensor in state.items() if id(tensor) in own}


def _each_once(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state_dict, each under its first name; and the first of each other name."""
    kept, tied, first_names = dict[str, Tensor](), dict[str, str](), dict[int, str]()
    for name, tensor in sorted(state_tensors(model).items()):
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            kept[name] = tensor
        else:
            tied[name] = first
    return kept, tied


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
