"""Configuration of an experiment: TOML, checked key by key."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from fedpriv.errors import InvalidValueError, known_names
from fedpriv.sections import (
    AveragingSection,
    ClippingSection,
    Count,
    DataSection,
    EngineSection,
    FederationSection,
    LocalSection,
    MetricsSection,
    ModelSection,
    NoiseSection,
    OutputSection,
    PrivacySection,
    Section,
    ServerSection,
)


class Config(Section):
    """One experiment.

    Attributes:
        name: short name of the experiment.
        rounds: number of rounds.
        run: name of the run in the ledger; made up from `name` if absent.
        seed: makes cohorts, noise and local training reproducible; the guarantee is then void for
            whoever knows the seed, and every report says so. Absent: the operating system's.
        federation: where real nodes take part; read by `fedpriv serve` alone.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    rounds: Count
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    data: DataSection
    model: ModelSection
    local: LocalSection
    privacy: PrivacySection
    clipping: ClippingSection
    server: ServerSection = ServerSection()
    noise: NoiseSection = NoiseSection()
    metrics: MetricsSection = MetricsSection()
    averaging: AveragingSection = AveragingSection()
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()
    federation: FederationSection | None = None


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment from TOML.

    Args:
        path: the file.
        overrides: assignments "a.b=value" that replace keys of the file; the value is TOML, or
            text if it is not.

    Raises:
        InvalidValueError: the file is absent or no TOML, a key is unknown, absent or of the wrong
            type, or a value is out of range.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _assign(table, override)
    return parse_config(table, str(path))


def parse_config(table: Mapping[str, object], source: str) -> Config:
    """Check a table of settings; `source` names it in messages.

    Raises:
        InvalidValueError: as for `load_config`.
    """
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        # The branch of a union that fits least must not hide the message of the other.
        first = error.errors()[0]
        raise InvalidValueError(f"{source}: {_sentence(first)}") from error


def _assign(table: dict[str, object], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not separator or not all(keys):
        raise InvalidValueError(f"--set {override!r} is not of the form a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InvalidValueError(f"--set {override!r}: {key} is not a table")
        table = inner
    table[keys[-1]] = value


def _sentence(error: ErrorDetails) -> str:
    """One sentence for a validation error: the key, its value and what is legal."""
    where = ".".join(str(part) for part in _keys(error["loc"]))
    match error["type"]:
        case "extra_forbidden":
            known = _section(error["loc"][:-1]).model_fields
            return f"unknown key {where}; {known_names(str(error['loc'][-1]), known)}"
        case "missing":
            return f"key {where} is absent"
        case "value_error":
            return f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
        case _:
            message = error["msg"][0].lower() + error["msg"][1:]
            return f"{where} is {error['input']!r}; {message}"


def _keys(location: tuple[int | str, ...]) -> list[int | str]:
    """Location without the names of union branches that pydantic adds at its end."""
    keys: list[int | str] = []
    model: type[BaseModel] | None = Config
    for part in location:
        if isinstance(part, int):
            keys.append(part)
            continue
        if model is None or part not in model.model_fields:
            return [*keys, part] if model is not None else keys
        keys.append(part)
        model = _model_of(model, part)
    return keys


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = Config
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
