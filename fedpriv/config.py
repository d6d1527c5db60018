"""The configuration of an experiment: TOML, checked key by key.

The sections say only what may be written; `fedpriv.build` makes the values that a run needs.
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from fedpriv.errors import InvalidValueError, known_names
from fedpriv.mechanism import CLIPPINGS, check_private
from fedpriv.training.optimizers import SERVER_OPTIMIZERS

_Model = TypeVar("_Model", bound=BaseModel)


def read_toml(path: Path) -> dict[str, object]:
    """Read a file of TOML.

    Raises:
        InvalidValueError: it cannot be read, or is not valid TOML.
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
        case "greater_than_equal":  # pydantic writes 1e-60 with all of its zeros
            return f"{where} is {error['input']!r}; input should be greater than or equal to " + (
                f"{error['ctx']['ge']:.15g}"
            )
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


Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Options = dict[str, object]


def _one_of(known: Collection[str]) -> AfterValidator:
    """One of these names, or the import path of a class."""

    def check(value: str) -> str:
        if value not in known and ":" not in value:
            hint = f"{known_names(value, known)}, or package.module:Class"
            raise PydanticCustomError("unknown_name", "{hint}", {"hint": hint})
        return value

    return AfterValidator(check)


class Section(BaseModel):
    """A table of settings: unknown keys and values of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataSection(Section):
    """Who is enrolled: a population by name or import path, with its options."""

    name: str
    options: Options = {}


class ModelSection(Section):
    """What is trained: a model by name or import path, its options, seed and loss."""

    name: str
    options: Options = {}
    seed: Annotated[int, Field(ge=0)] = 0
    loss: str = "cross-entropy"


class LocalSection(Section):
    """How each user trains; `batch_size = "all"` with `steps = 1` is FedSGD."""

    learning_rate: Positive
    batch_size: Count | Literal["all"] = "all"
    epochs: Count | None = None
    steps: Count | None = None
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    proximal: NonNegative = 0.0
    max_examples: Count | None = None


class ServerSection(Section):
    """How the server steps along the released average; `options` are the optimiser's fields."""

    optimizer: Annotated[str, _one_of(SERVER_OPTIMIZERS)] = "fedavg"
    options: dict[str, float] = {}


class PrivacySection(Section):
    """The guarantee that is asked for and the mechanism's two numbers.

    Without `noise_multiplier` the least noise is calibrated that keeps all rounds within
    `epsilon`; with it, training stops before `epsilon` would be passed.
    """

    sampling_probability: Annotated[float, Field(gt=0.0, le=1.0)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]
    epsilon: Positive | None = None
    noise_multiplier: NonNegative | None = None
    accountant: str = "tight"
    ledger: str | None = None
    unsafe_no_privacy: bool = False

    @model_validator(mode="after")
    def _must_be_private(self) -> Self:
        check_private(self.noise_multiplier, self.epsilon, unsafe_no_privacy=self.unsafe_no_privacy)
        return self


class ClippedSection(Section):
    """One key, `strategy`, chooses how to clip.

    `parts` and `split` are read by per-layer clipping, `scales` by joint clipping.
    """

    strategy: Annotated[str, _one_of(CLIPPINGS)] = "flat"
    parts: Literal["layer", "tensor"] = "layer"
    split: Literal["equal", "dimension"] | dict[str, float] = "equal"
    scales: Literal["dimension"] | dict[str, float] = "dimension"


class GroupSection(ClippedSection):
    """Tensors that are clipped in their own way: those that fit one of the patterns first.

    `tensors` are globs over parameter names, such as "conv*" or "*.bias". `share` is a weight: how
    much of the update's privacy these tensors get; all groups have one, or none.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    tensors: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    norm: Positive
    share: Positive | None = None


class AdaptiveSection(Section):
    """Clipping norms that follow a quantile of the updates' norms; see `AdaptiveClipping`."""

    quantile: float = 0.5
    learning_rate: float = 0.2
    share: float = 0.02


class ClippingSection(ClippedSection):
    """How updates are clipped: all tensors alike, to `norm`, or `groups` each in their own way."""

    norm: Positive | None = None
    groups: Annotated[tuple[GroupSection, ...], Field(strict=False)] = ()
    adaptive: AdaptiveSection | None = None

    @model_validator(mode="after")
    def _must_say_once(self) -> Self:
        if not self.groups:
            if self.norm is None and self.strategy in CLIPPINGS:
                raise ValueError("norm is absent; it must be a positive clipping norm")
            return self
        fields = type(self).model_fields
        alone = [
            name
            for name in ("norm", "strategy", "parts", "split", "scales")
            if getattr(self, name) != fields[name].default
        ]
        if alone:
            raise ValueError(
                f"{alone[0]} is given beside groups; with groups it belongs into each of them"
            )
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups are named {names}; names must be unique")
        if len({group.share is None for group in self.groups}) > 1:
            raise ValueError("some groups have a share; all must have one, or none")
        return self


class MetricsSection(Section):
    """What is released beside the update, and the share of a round's privacy for all of it.

    `report` has a table of options for each metric, by its name.
    """

    share: float = 0.05
    report: dict[str, dict[str, int | float | list[float]]] = {}


class AveragingSection(Section):
    """How much users count, and what sums are divided by.

    With `weights = "examples"` a user with n examples counts min(n, cap)/cap. `total_weight`, about
    the sum of all weights, is a public constant that divides averages: if it were computed from the
    users, each of them would move all averages. With `floor` the denominator is the cohort's own
    weight, but at least that share of the expected.
    """

    weights: Literal["equal", "examples"] = "equal"
    cap: Count | None = None
    total_weight: Positive | None = None
    floor: float | None = None

    @model_validator(mode="after")
    def _must_have_a_cap(self) -> Self:
        if self.weights == "examples" and self.cap is None:
            raise ValueError(
                'weights is "examples" without a cap; one user could then move the average without '
                "bound, so cap must be given"
            )
        if self.weights == "examples" and self.total_weight is None:
            raise ValueError(
                'weights is "examples" without a total_weight; averages are divided by it, so it '
                "must be given: a public estimate of the sum of all users' weights"
            )
        if self.weights == "equal" and (self.cap is not None or self.total_weight is not None):
            raise ValueError('cap and total_weight are read with weights = "examples" only')
        return self


class NoiseSection(Section):
    """How the noise is shared among vector groups; a table gives a weight to each group."""

    allocation: Literal["proportional", "dimension"] | dict[str, float] = "proportional"


class EngineSection(Section):
    """Where and how fast; nothing here changes the guarantee.

    The result changes only by rounding: in `activations` of "bfloat16" to 8 bits while users train.
    On a CPU users train side by side in so many `processes`, where a process can be forked; absent,
    one for each of torch's threads.
    """

    device: str = "auto"
    chunk_mebibytes: Count = 128
    activations: Literal["float32", "bfloat16"] = "float32"
    processes: Count | None = None


class OutputSection(Section):
    """What is written, and how often, in rounds; `tensorboard` adds event files.

    With `simulation_only` a simulation in this process records true figures of each round, which no
    guarantee covers.
    """

    evaluate_every: Count = 1
    checkpoint_every: Count = 1
    simulation_only: bool = False
    tensorboard: bool = False


class CallbacksSection(Section):
    """Functions by import path that are given each released round; see `RoundResult`."""

    on_round: Annotated[tuple[str, ...], Field(strict=False)] = ()


class FederationSection(Section):
    """Where real nodes take part, and how long the server waits for them.

    `enrolment` is a file of nodes, their users and their certificates' fingerprints. `certificates`
    is a folder with ca.pem, server.pem and server.key. `held_out` is an .npz file of the server's
    own rows; absent, those of `data` are measured on.

    A round ends when all have answered; at the latest after `deadline_seconds`; and before if only
    nodes are missing that have not been connected for `absent_seconds`. With `fixed_length` it
    always takes `deadline_seconds`, so that how long it took says nothing of who was drawn.
    Updates in transfer take `transfer_mebibytes` of memory at most, each for `transfer_seconds`.
    """

    address: str = "127.0.0.1:7443"
    enrolment: str
    certificates: str | None = None
    held_out: str | None = None
    deadline_seconds: Positive = 600.0
    absent_seconds: NonNegative = 10.0
    fixed_length: bool = False
    least_nodes: Count = 1
    transfer_mebibytes: Count = 256
    transfer_seconds: Positive = 120.0
    calls_per_minute: Count = 600
    metrics_address: str | None = None


class Config(Section):
    """One experiment.

    Attributes:
        name: short name of the experiment.
        rounds: number of rounds.
        run: name of the run in the ledger; made up from `name` if absent.
        seed: makes cohorts, noise and local training reproducible; the guarantee then does not hold
            against those who know it, and every report says so. Absent: the operating system's.
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
    callbacks: CallbacksSection = CallbacksSection()
    federation: FederationSection | None = None


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment from TOML.

    Args:
        path: the file.
        overrides: assignments "a.b=value" that replace keys of the file; the value is TOML, or
            text if it is not.

    Raises:
        InvalidValueError: the file is absent or not valid TOML, a key is unknown, absent or of the
            wrong type, or a value is out of range.
    """
    table = spelled_out(read_toml(path))
    for override in overrides:
        assign(table, override)
    return parse_config(table, str(path))


def parse_config(table: Mapping[str, object], source: str) -> Config:
    """Check a table of settings; `source` names it in messages.

    Raises:
        InvalidValueError: as for `load_config`.
    """
    return checked(Config, spelled_out(table), source)


def spelled_out(table: Mapping[str, object]) -> dict[str, object]:
    """The table of an experiment in which data and model that are names alone are tables.

    >>> spelled_out({"model": "mypkg.mymodule:build", "rounds": 3})
    {'model': {'name': 'mypkg.mymodule:build'}, 'rounds': 3}
    """
    return {
        key: {"name": value} if key in ("data", "model") and isinstance(value, str) else value
        for key, value in table.items()
    }


def assign(table: dict[str, object], override: str) -> None:
    """Replace one key of a table in place, as `--set` does.

    Args:
        table: the table; inner tables on the way are changed or made.
        override: "a.b=value"; the value is TOML, or text if it is not.

    Raises:
        InvalidValueError: it is not an assignment, or a key on its way does not hold a table.
    """
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
