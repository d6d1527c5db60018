"""Load released models into modules, and export them to files of other libraries."""

import io
import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedpriv.engine.adapters import Adapted, merge_adapters
from fedpriv.engine.reading import rows_for
from fedpriv.engine.released import read_released, sha256_of, state_tensors
from fedpriv.engine.task import Task, check_holds, unwrapped
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.experiment.build import begun_in_python, build_task, few_rows, population_of
from fedpriv.experiment.config import Config, load_config
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import held_out_rows
from fedpriv.support.checks import checked_arguments
from fedpriv.support.disk import write_new
from fedpriv.support.logs import one_line, silenced

Format = Literal["torch", "onnx", "hf"]
_NAMES: Mapping[Format, str] = {"torch": "model.pt", "onnx": "model.onnx", "hf": "model"}
_MOST_IN_ONNX = 2**31 - 2**24  # bytes of tensors: a file has at most 2 GiB
_log = logging.getLogger(__name__)


@checked_arguments
def load_model(source: Path | str, model: nn.Module, *, merge: bool = False) -> nn.Module:
    """Load a released model's numbers into a module, and return it in evaluation mode.

    Everything in the module's state_dict is replaced: parameters, including frozen ones, and
    buffers. If the module has frozen parameters, their values are first compared with those of the
    run; a warning reports a difference, which another pre-trained base causes.

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
        merge: return `merge_adapters` of it: a copy with plain layers.

    Raises:
        InvalidValueError: there is no released model.
        DataError: the file is damaged, or was not written by fedpriv.
        ModelError: the module has other names or shapes; the first of them is named.
    """
    wrapped, model = model, unwrapped(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_holds(name, tensor)
    if merge and not any(isinstance(layer, Adapted) for layer in model.modules()):
        raise ModelError("merge is true and the model has no adapters; with_adapters gives it some")
    path = model_file(Path(source))
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
    return merge_adapters(model.eval()) if merge else wrapped.eval()


def export_model(source: Path, to: Format, out: Path | None = None) -> Path:
    """Write a released model for another library; return the new file or folder.

    Its adapters are merged into plain layers, except in torch's format, whose state_dict has the
    names of the trained model.

    Raises:
        InvalidValueError: there is no released model, `out` exists, the plan of the run does not
            say how the model is made, or the library or method that writes it is missing.
        ModelError: the other library cannot write the model.
    """
    path = model_file(source)
    out = out or path.with_name(_NAMES[to])
    if out.exists():
        raise InvalidValueError(f"{out} exists already; it is not overwritten")
    if to == "torch":
        tensors, _ = read_released(path)
        torch.save(tensors, content := io.BytesIO())
        write_new(out, content.getvalue())
        return out
    if to == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise InvalidValueError(
            "onnx or onnxscript cannot be imported; pip install onnx onnxscript installs them"
        )
    config = _plan_of(source)
    task = build_task(**config.model.task)
    model = merge_adapters(load_model(path, task.model))
    if to == "onnx":
        _write_onnx(model, _two_rows(config, task), out)
        return out
    if not callable(save := getattr(model, "save_pretrained", None)):
        raise InvalidValueError(
            f"the model is a {type(model).__name__} without the method save_pretrained that models "
            "of transformers have; --to torch writes its state_dict"
        )
    try:
        save(out)
    except OSError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise ModelError(f"the model's save_pretrained cannot write it: {reason}") from error
    return out


def _plan_of(source: Path) -> Config:
    """Return the configuration from which the model of a folder can be rebuilt."""
    paths = (RunFolder(source).plan, source / "experiment.toml")  # of a run, of a search
    plan = next((path for path in paths if path.is_file()), None)
    if plan is None:
        sentence = f"{source} does not say how its model is made; give the folder of its run"
        raise InvalidValueError(sentence)
    config = load_config(plan)
    if begun_in_python(config):
        raise InvalidValueError(
            f"{source} was begun in Python, so its plan does not say how the model is made; use "
            "fedpriv.load_model(folder, model), and then torch.onnx.export or save_pretrained"
        )
    return config


def _two_rows(config: Config, task: Task) -> dict[str, Tensor]:
    """Return two equal rows of the model's inputs [2, …], by field, not from an enrolled user."""
    if config.federation is None or config.data is not None:
        rows = few_rows(population_of(config))
    else:
        rows, _ = held_out_rows(config, config.federation)
    if not rows:
        sentence = "there is no row to try the model on; federation.held_out must name some"
        raise InvalidValueError(sentence)
    rows = rows_for(task, rows)
    x, _ = task.given({name: torch.tensor(rows[name][:1]) for name in task.fields})
    inputs = x if isinstance(x, dict) else {str(task.inputs): x}
    return {name: torch.cat([row, row]) for name, row in inputs.items()}


def _write_onnx(model: nn.Module, rows: dict[str, Tensor], out: Path) -> None:
    """Export a model for any number of rows; its inputs have the names of the fields."""
    number = {0: torch.export.Dim.DYNAMIC}  # torch treats a single row as a fixed number of rows
    inputs: dict[str, Any] = {"kwargs": rows, "dynamic_shapes": dict.fromkeys(rows, number)}
    if len(rows) == 1:  # by position, since its argument may have any name
        inputs = {"args": (*rows.values(),), "dynamic_shapes": (number,)}
    try:
        with silenced(logging.ERROR), warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                model, **inputs, input_names=[*rows], dynamo=True, verbose=False
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise ModelError(f"torch.onnx cannot export the model: {reason}") from error
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    program.save(out, external_data=size > _MOST_IN_ONNX)


def model_file(source: Path) -> Path:
    """Return the file of a released model, given it or its folder; InvalidValueError if absent."""
    path = RunFolder(source).model if source.is_dir() else source
    if not path.is_file():
        raise InvalidValueError(
            f"{source} holds no released model, since {path} is absent; a run writes it at its "
            "end, so resume a run that was interrupted"
        )
    return path


def _check_fits(path: Path, tensors: Mapping[str, Tensor], in_model: Mapping[str, Tensor]) -> None:
    """Raise ModelError for the first name or shape in which a model differs from a file."""
    extra, values = [n for n in tensors if n not in in_model], dict[int, tuple[str, Tensor]]()
    cure = "give a model like the one that the run trained"
    if any("lora_" in name for name in extra):
        cure += ", by with_adapters"
    for name, tensor in in_model.items():
        if name not in tensors:
            raise ModelError(f"the model has {name!r}, which {path} lacks; {cure}")
        shape, shape_in_file = [*tensor.shape], [*tensors[name].shape]
        if shape != shape_in_file:
            raise ModelError(
                f"{name!r} has the shape {shape} in the model, {shape_in_file} in {path}; {cure}"
            )
        alias, value = values.setdefault(id(tensor), (name, tensors[name]))
        if value is not tensors[name] and not torch.equal(value, tensors[name]):
            raise ModelError(
                f"{alias!r} and {name!r} are one tensor in the model and two in {path}; {cure}"
            )
    if extra:
        raise ModelError(f"{path} has {extra[0]!r}, which the model lacks; {cure}")
