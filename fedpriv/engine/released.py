"""Released models, as modules and as files of safetensors with the whole state_dict.

The file holds a tensor with several names, such as an embedding that is also a head, once, under
the alphabetically first name, as `safetensors.torch.load_model` expects.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedpriv.engine.leftovers import lazy_clone, named_tensors
from fedpriv.engine.task import Task
from fedpriv.errors import DataError, ModelError
from fedpriv.privacy.layout import Tensors
from fedpriv.training.rounds import RoundResult, ServerState

# Fields of the last round's result.
_RESULT_KEYS = ("run", "rounds", "epsilon", "delta", "unit", "relation", "randomness")


def released(task: Task, values: Tensors) -> nn.Module:
    """Return a copy of a task's model in evaluation mode, with the tensors that rounds released."""
    model = task.evaluated().model
    tensors = named_tensors(model)
    for name, array in values.items():
        tensors[name].data = torch.tensor(array).to(tensors[name])
    return model


def released_model(
    task: Task, state: ServerState, results: Iterable[RoundResult], classes: tuple[str, ...] = ()
) -> bytes:
    """Return the model of a state as a file of safetensors, with its cost in the metadata.

    The metadata have one key, "release", with a JSON object. Its keys are `round`; `run`, `rounds`,
    `epsilon` ("Infinity" without noise), `delta`, `unit`, `relation` and `randomness` of the
    round's result, and `as_if` for a projection; `tied`, a table from omitted names to names in the
    file; `frozen`, with the `names` of tensors that neither rounds nor users change, and `sha256`,
    their `sha256_of`; and `classes`, their names, which must be public, unless some are "".
    """
    release: dict[str, object] = {"round": state.round}
    if classes and all(classes):
        release["classes"] = classes
    for result in results:
        if result.round == state.round:
            release |= {key: getattr(result, key) for key in _RESULT_KEYS}
            if result.as_if is not None:
                release["as_if"] = result.as_if
            if math.isinf(result.epsilon):  # not a number in JSON
                release["epsilon"] = "Infinity"
    tensors, release["tied"] = _deduplicated(task.model)
    frozen, members = frozen_of(task), named_tensors(task.model)
    release["frozen"] = {"names": [*frozen], "sha256": sha256_of(frozen)}
    new_tensors = {id(members[name]): torch.tensor(array) for name, array in state.model.items()}
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    content = dict[str, Tensor]()
    for name, tensor in tensors.items():  # safetensors refuses tensors that share a storage
        is_shared = storages[tensor.untyped_storage().data_ptr()] > 1
        new = new_tensors.get(id(tensor), tensor).detach()
        content[name] = new.to("cpu", tensor.dtype, copy=is_shared).contiguous()
    # One key, since safetensors writes several in any order, and equal runs must have equal files.
    return save(content, {"release": json.dumps(release)})


def read_released(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return the tensors of a released model by all names, including tied ones, and its metadata.

    DataError: the file cannot be read, or is not a released model.
    """
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
    """Return the tensors of a model that neither rounds nor users change, by name in the file."""
    members, (tensors, _) = named_tensors(task.model), _deduplicated(task.model)
    changing = {id(members[name]) for name in (*task.trainable(), *task.statistics())}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) not in changing}


def check_can_be_released(task: Task) -> None:
    """Raise ModelError unless a file can hold the whole state_dict of the task's model."""
    members, (tensors, _) = named_tensors(task.model), _deduplicated(task.model)
    in_file = {id(tensor) for tensor in tensors.values()}
    for name in task.trainable():
        if id(members[name]) not in in_file:
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
    """Return the SHA-256 of tensors with their names, dtypes and shapes, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = lazy_clone(tensors[name].detach().cpu())  # NumPy would copy those that are shared
        tensor = (tensor if tensor.layout is torch.strided else tensor.to_dense()).contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), [*tensor.shape]]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model's state_dict themselves, by all names."""
    members = {id(tensor) for tensor in named_tensors(model).values()}
    state = model.state_dict(keep_vars=True)  # otherwise these would be different objects
    return {name: tensor for name, tensor in state.items() if id(tensor) in members}


def _deduplicated(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a state_dict by their first names, and other name → first name."""
    tensors = dict(sorted(state_tensors(model).items()))
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    tied = {n: first_names[id(t)] for n, t in tensors.items() if first_names[id(t)] != n}
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied
