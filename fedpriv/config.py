"""Configuration of an experiment: TOML, checked key by key."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fedpriv.errors import InvalidValueError, known_names

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Options = dict[str, object]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataSection(_Section):
    """Who is enrolled: a population by name or import path, with its options."""

    name: str
    options: Options = {}


class ModelSection(_Section):
    """What is trained: a model by name or import path, its options, seed and loss."""

    name: str
    options: Options = {}
    seed: Annotated[int, Field(ge=0)] = 0
    loss: str = "cross-entropy"


class LocalSection(_Section):
    """How each user trains; `batch_size = "all"` with `steps = 1` is FedSGD."""

    learning_rate: Positive
    batch_size: Count | Literal["all"] = "all"
    epochs: Count | None = None
    steps: Count | None = None
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    proximal: NonNegative = 0.0


class ServerSection(_Section):
    """How the server steps along the released average."""

    optimizer: Literal["fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi"] = "fedavg"
    options: dict[str, float] = {}


class PrivacySection(_Section):
    """The guarantee that is asked for and the mechanism's two numbers.

    Without `noise_multiplier` the least noise is calibrated that keeps all rounds within
    `epsilon`; with it, training stops before `epsilon` would be passed.
    """

    sampling_probability: Annotated[float, Field(gt=0.0, le=1.0)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]
    epsilon: Positive | None = None
    noise_multiplier: NonNegative | None = None
    accountant: str = "pld"
    ledger: str | None = None
    unsafe_no_privacy: bool = False

    @model_validator(mode="after")
    def _must_be_private(self) -> Self:
        if self.noise_multiplier == 0.0 and not self.unsafe_no_privacy:
            raise ValueError(
                "noise_multiplier is 0, which gives no privacy; "
                "set unsafe_no_privacy = true if that is meant"
            )
        if self.unsafe_no_privacy and self.noise_multiplier is None:
            raise ValueError("unsafe_no_privacy is true; noise_multiplier must then be given")
        if self.epsilon is None and not self.unsafe_no_privacy:
            raise ValueError("epsilon is absent; it must be a positive privacy budget")
        return self


class ClippingSection(_Section):
    """How updates are clipped; one key, `strategy`, chooses between the three ways.

    `parts` and `split` are read by per-layer clipping, `scales` by joint clipping.
    """

    strategy: Literal["flat", "per-layer", "joint"] = "flat"
    norm: Positive
    parts: Literal["layer", "tensor"] = "layer"
    split: Literal["equal", "dimension"] | dict[str, float] = "equal"
    scales: Literal["dimension"] | dict[str, float] = "dimension"


class NoiseSection(_Section):
    """How the noise is shared among vector groups; a table gives a weight to each group."""

    allocation: Literal["proportional", "dimension"] | dict[str, float] = "proportional"


class EngineSection(_Section):
    """Where and how fast; nothing here changes the result or the guarantee."""

    device: str = "auto"
    chunk_mebibytes: Count = 32


class OutputSection(_Section):
    """What is written how often, in rounds."""

    evaluate_every: Count = 1
    checkpoint_every: Count = 1


class Config(_Section):
    """One experiment.

    Attributes:
        name: short name of the experiment.
        rounds: number of rounds.
        run: name of the run in the ledger; made up from `name` if absent.
        seed: makes cohorts, noise and local training reproducible; the guarantee is then void for
            whoever knows the seed, and every report says so. Absent: the operating system's.
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
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()


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
        if model is None or part not in model.model_fields:
            return [*keys, part] if model is not None else keys
        keys.append(part)
        model = _model_of(model, part)
    return keys


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = Config
    for part in location:
        model = _model_of(model, part) or model
    return model


def _model_of(model: type[BaseModel], field: int | str) -> type[BaseModel] | None:
    """Section that a field holds, if it holds one."""
    annotation = model.model_fields[str(field)].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
