"""Released models in the hands of others: `load_model`."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedpriv.engine.adapters import Adapted, merge_adapters
from fedpriv.engine.released import sha256_of, state_tensors
from fedpriv.engine.task import check_holds
from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.run.folder import RunFolder
from fedpriv.support.checks import check_types

_log = logging.getLogger(__name__)


def load_model(source: Path | str, model: nn.Module, *, merge: bool = False) -> nn.Module:
    """Put a released model's numbers into a module, and return it in evaluation mode.

    Everything in the module's state_dict is replaced: parameters, frozen ones too, and buffers. Of
    a module that has frozen parameters, what the run kept frozen is compared before that; if it
    differs, as that of another pre-trained base does, a warning says so.

    >>> import tempfile, numpy as np, torch, fedpriv
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, 0), np.arange(4).repeat(50)
    >>> people = fedpriv.Population.from_arrays(x, y, np.arange(200), held_out=(x, y))
    >>> mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    >>> mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fedpriv.simulate(
    ...         people, fedpriv.Task(torch.nn.Linear(4, 4)), mechanism, out=folder, quiet=True
    ...     )
    ...     model = fedpriv.load_model(folder, torch.nn.Linear(4, 4))
    >>> torch.equal(model.weight, run.model.weight)
    True

    Args:
        source: the folder of a run or of a search on users, or the file of a released model.
        model: a module like the one that was trained. Its state_dict must have the same names and
            shapes; numbers are converted to its types.
        merge: return `merge_adapters` of it: a copy, with plain layers.

    Raises:
        InvalidValueError: there is no released model.
        DataError: the file is damaged, or was not written by fedpriv.
        ModelError: the module has other names or shapes; the first of them is named.
    """
    check_types(source=(source, Path | str), model=(model, nn.Module), merge=(merge, bool))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_holds(name, tensor)
    if merge and not any(isinstance(layer, Adapted) for layer in model.modules()):
        raise ModelError("merge is true and the model has no adapters; with_adapters gives it some")
    path = model_file(Path(source))
    tensors, release = read_released(path)
    held = state_tensors(model)
    _check_fits(path, tensors, held)
    frozen = {name: held[name] for name in release["frozen"]["names"]}
    freezes = not all(parameter.requires_grad for parameter in model.parameters())
    if freezes and frozen and sha256_of(frozen) != release["frozen"]["sha256"]:
        _log.warning(
            "what is frozen in the model differs from what the run of %s began with, as another "
            "pre-trained base does; all of it is replaced by what the file holds",
            path,
        )
    for name, tensor in held.items():
        tensor.data = tensors[name].to(tensor, copy=True)
    return merge_adapters(model.eval()) if merge else model.eval()


def model_file(source: Path) -> Path:
    """The file of a released model, given itself or a folder; InvalidValueError if it is absent."""
    path = RunFolder(source).model if source.is_dir() else source
    if not path.is_file():
        raise InvalidValueError(
            f"{source} holds no released model, as {path} is absent; a run writes it when it ends, "
            "so resume one that was interrupted"
        )
    return path


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
        raise DataError(
            f"{path} cannot be read as a released model: {error}; it must be model.safetensors of "
            "a run, or a file that `fedpriv model` fetched"
        ) from error


def _check_fits(path: Path, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Raise ModelError for the first name or shape by which a model differs from a file."""
    more, into = [*(name for name in tensors if name not in held)], dict[int, tuple[str, Tensor]]()
    cure = "give a model that is made like the one that the run trained"
    if any("lora_" in name for name in more):
        cure += ", by with_adapters"
    for name, tensor in held.items():
        if name not in tensors:
            raise ModelError(f"the model has {name!r}, which {path} lacks; {cure}")
        found, expected = [*tensors[name].shape], [*tensor.shape]
        if found != expected:
            raise ModelError(
                f"{name!r} has the shape {expected} in the model and {found} in {path}; {cure}"
            )
        first, value = into.setdefault(id(tensor), (name, tensors[name]))
        if value is not tensors[name] and not torch.equal(value, tensors[name]):
            raise ModelError(
                f"{first!r} and {name!r} are one tensor in the model and two in {path}; {cure}"
            )
    if more:
        raise ModelError(f"{path} has {more[0]!r}, which the model lacks; {cure}")
