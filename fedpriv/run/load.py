"""Load released models into modules of torch."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpriv.engine.adapters import Adapted, merge_adapters
from fedpriv.engine.released import read_released, sha256_of, state_tensors
from fedpriv.engine.task import check_holds, unwrapped
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.run.folder import RunFolder
from fedpriv.support.checks import checked_arguments

_log = logging.getLogger(__name__)


@checked_arguments
def load_model(source: Path | str, model: nn.Module, *, merge: bool = False) -> nn.Module:
    """Put a released model's numbers into a module, and return it in evaluation mode.

    Everything in the module's state_dict is replaced: parameters, frozen ones too, and buffers. If
    the module has frozen parameters, its frozen values are first compared with those of the run,
    and a warning says if they differ, which they do with another pre-trained base.

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
    whole, model = model, unwrapped(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_holds(name, tensor)
    if merge and not any(isinstance(layer, Adapted) for layer in model.modules()):
        raise ModelError("merge is true and the model has no adapters; with_adapters gives it some")
    path = RunFolder(Path(source)).model if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise InvalidValueError(
            f"{source} holds no released model, since {path} is absent; a run writes it at its "
            "end, so resume a run that was interrupted"
        )
    tensors, release = read_released(path)
    in_model = state_tensors(model)
    _check_fits(path, tensors, in_model)
    frozen = {name: in_model[name] for name in release["frozen"]["names"]}
    freezes = not all(parameter.requires_grad for parameter in model.parameters())
    if freezes and frozen and sha256_of(frozen) != release["frozen"]["sha256"]:
        _log.warning(
            "the model's frozen values differ from those of the run, as with another pre-trained "
            "base; those in %s replace them",
            path,
        )
    for name, tensor in in_model.items():
        tensor.data = tensors[name].to(tensor, copy=True)
    return merge_adapters(model.eval()) if merge else whole.eval()


def _check_fits(path: Path, tensors: Mapping[str, Tensor], in_model: Mapping[str, Tensor]) -> None:
    """Raise ModelError for the first name or shape by which a model differs from a file."""
    extra, values = [n for n in tensors if n not in in_model], dict[int, tuple[str, Tensor]]()
    cure = "give a model that is made like the one that the run trained"
    if any("lora_" in name for name in extra):
        cure += ", by with_adapters"
    for name, tensor in in_model.items():
        if name not in tensors:
            raise ModelError(f"the model has {name!r}, which {path} lacks; {cure}")
        here, there = [*tensor.shape], [*tensors[name].shape]
        if here != there:
            raise ModelError(
                f"{name!r} has the shape {here} in the model, {there} in {path}; {cure}"
            )
        first, value = values.setdefault(id(tensor), (name, tensors[name]))
        if value is not tensors[name] and not torch.equal(value, tensors[name]):
            raise ModelError(
                f"{first!r} and {name!r} are one tensor in the model and two in {path}; {cure}"
            )
    if extra:
        raise ModelError(f"{path} has {extra[0]!r}, which the model lacks; {cure}")
