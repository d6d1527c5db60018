"""Tables of settings: read from TOML, and checked key by key."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedpriv.errors import InvalidValueError, known_names

_Model = TypeVar("_Model", bound=BaseModel)


def read_toml(path: Path) -> dict[str, object]:
    """Read a file of TOML.

    Raises:
        InvalidValueError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise InvalidValueError(f"{path} is not valid TOML: {error}") from error


def checked(model: type[_Model], table: Mapping[str, object], source: str) -> _Model:
    """Make settings of a table, which `source` names in the message.

    Raises:
        InvalidValueError: a key is unknown, absent or of the wrong type, or a value is refused.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # The branch of a union that fits least must not hide the message of the other.
        first = error.errors()[0]
        raise InvalidValueError(f"{source}: {_sentence(model, first)}") from error


def _sentence(root: type[BaseModel], error: ErrorDetails) -> str:
    """One sentence for a validation error: the key, its value and what is legal."""
    where = ".".join(str(part) for part in _keys(root, error["loc"]))
    match error["type"]:
        case "extra_forbidden":
            known = _section(root, error["loc"][:-1]).model_fields
            return f"unknown key {where}; {known_names(str(error['loc'][-1]), known)}"
        case "missing":
            return f"key {where} is absent"
        case "value_error":
            return f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
        case _:
            message = error["msg"][0].lower() + error["msg"][1:]
            return f"{where} is {error['input']!r}; {message}"


def _keys(root: type[BaseModel], location: tuple[int | str, ...]) -> list[int | str]:
    """Location without the names of union branches that pydantic adds at its end."""
    keys: list[int | str] = []
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int):
            keys.append(part)
            continue
        if model is None or part not in model.model_fields:
            return [*keys, part] if model is not None else keys
        keys.append(part)
        model = _model_of(model, part)
    return keys


def _section(root: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    model = root
    for part in location:
        if isinstance(part, str):
            model = _model_of(model, part) or model
    return model


def _model_of(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """Section that a field holds, if it holds one."""
    annotation = model.model_fields[field].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
