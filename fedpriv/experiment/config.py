"""The configuration of an experiment: TOML, checked key by key; see docs/configuration.md."""

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function as checked_first

from fedpriv.audit.verdict import Audit
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.experiment.grouping import CLIPPINGS, ClippingPolicy, Grouped, Part
from fedpriv.experiment.mechanism import (
    CONTRIBUTORS_SHARE,
    DEFAULT_PROBABILITY,
    DEFAULT_ROUNDS,
    NOISE_POLICIES,
    SAMPLING_POLICIES,
    CohortPolicy,
    Mechanism,
    NoisePolicy,
    PoissonExamples,
    check_private,
    checked_unit,
    lacks_norm,
)
from fedpriv.ledger.events import SecureSum, Unit
from fedpriv.privacy.gaussian_mechanism import Averaging
from fedpriv.support.checks import plain_numbers
from fedpriv.support.importing import Choice
from fedpriv.training.local import ALGORITHMS, COMMON, GRADIENT
from fedpriv.training.optimizers import SCHEDULES, SERVER_OPTIMIZERS, RateSchedule, ServerOptimizer
from fedpriv.training.plan import AdaptiveClipping
from fedpriv.training.request import LocalTraining

_Model = TypeVar("_Model", bound=BaseModel)
_PATHS = {"privacy.ledger", "federation.enrolment", "federation.certificates"}
_PATHS |= {"federation.held_out", "data.options.train", "data.options.test"}
_PATHS |= {"tune.public.options.train", "tune.public.options.test"}


def read_toml(path: Path) -> dict[str, object]:
    """Read a TOML file; InvalidValueError if it cannot be read or is not valid TOML."""
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{path} is not valid TOML: {error}") from error


def parse_toml(text: str, source: str) -> dict[str, object]:
    """Return the table in a text; an InvalidValueError names `source` if it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or a number of too many digits
        hint = "; a section [model] has name = … instead of model = …" * ("overwrite" in str(error))
        raise InvalidValueError(f"{source} is not valid TOML: {error}{hint}") from error
    except RecursionError as error:
        raise InvalidValueError(f"{source} is nested too deeply to be read") from error


def read_experiment(path: Path) -> dict[str, object]:
    """Read an experiment from a file as a `spelled_out` table with absolute paths.

    InvalidValueError: the file cannot be read, is not valid TOML, or is a study.
    """
    table = read_toml(path)
    if "base" in table:
        raise InvalidValueError(f"{path} is a study, not an experiment; use `fedpriv compare`")
    return from_folder(path.parent, table)


def from_folder(folder: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's table, `spelled_out`, with its paths in `folder` made absolute."""
    home = folder.resolve()
    return with_paths(spelled_out(table), lambda path: os.path.normpath(home / path))


def for_folder(folder: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's table with paths relative to `folder`, for a file in it."""
    home = folder.resolve()
    return with_paths(table, lambda path: os.path.relpath(path, home))


def with_paths(table: Mapping[str, Any], move: Callable[[str], str]) -> dict[str, Any]:
    """Return an experiment's table with `move` applied to each path.

    Options of populations that are not built in stay unchanged.
    """
    copy, values = deepcopy(dict(table)), flattened(table)
    for key in _PATHS & values.keys():
        population = values.get(f"{key.partition('.options.')[0]}.name")
        if isinstance(path := values[key], str) and ":" not in str(population):
            put(copy, key.split("."), move(path))
    return copy


def checked(model: type[_Model], table: Mapping[str, object], source: str) -> _Model:
    """Return the settings in a table; an InvalidValueError names `source` and the first bad key."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # If a number or a literal word is legal, pydantic reports an error for each; name both.
        first, *others = error.errors()
        sentence = _sentence(table, first)
        literals = (error for error in others if str(error["loc"][-1]).startswith("literal["))
        if (word := next(literals, None)) and word["loc"][:-1] == first["loc"][:-1]:
            sentence += f" or {word['ctx']['expected']}"  # a number or this word
        raise InvalidValueError(f"{source}: {sentence}") from error


# TOML's names for types that pydantic names after Python.
_TYPES = {
    **dict.fromkeys(("model_type", "dict_type", "mapping_type", "dataclass_type"), "a table"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
}
_NAMES = "use letters, digits, '.', '_' and '-', and begin with a letter or digit"


def _sentence(table: Any, error: ErrorDetails) -> str:
    """Return one sentence for a validation error: the key, its value and the legal values."""
    keys: list[str] = []
    for part in error["loc"]:
        try:
            table = table[part]
        except (KeyError, IndexError, TypeError):
            if error["type"] != "missing":
                break  # pydantic adds the names of the branches of a union
        keys.append(str(part))
    where, context, value = ".".join(keys), error.get("ctx", {}), error["input"]
    match error["type"]:
        case "unknown_key":
            return f"unknown key {'.'.join([*keys, context['key']])}; {context['hint']}"
        case "missing":
            return f"key {where} is absent"
        case "value_error":
            return f"{where}: {context['error']}" if where else str(context["error"])
        case "string_pattern_mismatch":  # a hash in a consent, or a name
            limit = "it must be a hash of 64 digits" if "64" in context["pattern"] else _NAMES
        case "greater_than_equal":  # pydantic writes 1e-60 with all of its zeros
            limit = f"it must be greater than or equal to {context['ge']:.15g}"
        case kind if kind in _TYPES:
            limit = f"it must be {_TYPES[kind]}"
        case _:
            limit = re.sub("^(Input|Value|String) should", "it must", error["msg"])
            limit = f"{limit[0].lower()}{limit[1:]}"
    return f"{where} is {'absent' if value is None else repr(value)}; {limit}"


Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Seed = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Options = dict[str, object]


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path")
    return text


PathText = Annotated[str, AfterValidator(_path)]

# Defaults of an experiment; `simulations.defaults` is the study behind them. The defaults of
# `Mechanism` are in fedpriv/experiment/mechanism.py.
DEFAULT_LOCAL_LEARNING_RATE = 0.3
DEFAULT_OPTIMIZER = "fedadam"  # its step size suits the norm of `Mechanism.for_users`

_ALGORITHM = Choice("local.algorithm", ALGORITHMS, LocalTraining)
_CORRELATION = Choice("noise.correlation", NOISE_POLICIES, NoisePolicy)
_OPTIMIZER = Choice("server.optimizer", SERVER_OPTIMIZERS, ServerOptimizer)
_POLICY = Choice("sampling.policy", SAMPLING_POLICIES, CohortPolicy)
_SCHEDULE = Choice("learning_rate.schedule", SCHEDULES, RateSchedule)
_STRATEGY = Choice("clipping.strategy", CLIPPINGS, ClippingPolicy)


def _know_keys(known: Collection[str], table: object) -> object:
    for key in table if isinstance(table, Mapping) else ():
        if key not in known:
            hint = known_names(key, known)
            raise PydanticCustomError("unknown_key", "{hint}", {"key": key, "hint": hint})
    return table


class _Value:
    """Reads a table into a frozen value, whose own checks apply."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        schema = handler(kind)
        handler.resolve_ref_schema(schema)["strict"] = False  # else only an instance would do
        return checked_first(partial(_know_keys, kind.__dataclass_fields__), schema)


class Section(BaseModel):
    """A table of settings: unknown keys and values of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _know_keys(cls, table: object) -> object:
        return _know_keys(cls.model_fields, table)


class PeopleSection(Section):
    """A population, by name or import path, with its options."""

    name: str
    options: Options = {}


class DataSection(PeopleSection):
    """The enrolled population."""

    succeeds: str | None = None  # name of the population whose ledger this one continues


class PopulationSection(Section):
    """The larger population that simulated users represent; see `Population.as_if`."""

    as_if: Count | None = None
    cohort: Count | None = None

    @model_validator(mode="after")
    def _must_have_both(self) -> Self:
        if self.cohort is not None and self.as_if is None:
            raise ValueError(f"cohort is {self.cohort}; without as_if it must be absent")
        return self


class AdaptersSection(Section):
    """Low-rank adapters of the layers that match these patterns; the model itself is frozen."""

    rank: Count
    alpha: Positive | None = None  # by default the rank
    layers: Annotated[tuple[str, ...], Field(strict=False)] = ("*",)


class ModelSection(Section):
    """The model, by name or import path, its options, seed and loss.

    `inputs` and `targets` name fields; several inputs are passed as arguments of these names.
    """

    name: str
    options: Options = {}
    seed: Annotated[Seed, Field(lt=2**64)] = 0  # of torch's generator
    loss: str = "cross-entropy"
    inputs: str | Annotated[tuple[str, ...], Field(strict=False)] = "x"
    targets: str = "y"
    ignore_index: int = -100  # targets of this class never count
    # Patterns of names of parameters that stay with users, are trained, or are frozen.
    personal: Annotated[tuple[str, ...], Field(strict=False)] = ()
    trained: Annotated[tuple[str, ...], Field(strict=False)] = ()
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    adapters: AdaptersSection | None = None

    @property
    def task(self) -> dict[str, Any]:
        """All fields, under the names of arguments of `fedpriv.experiment.build.build_task`."""
        fields, adapters = dict(self), self.adapters
        options = adapters.model_dump(mode="json", exclude_none=True) if adapters else {}
        return {"model": fields.pop("name"), **fields, "adapters": options}


class LocalSection(Section):
    """Local training of each user; `options` are fields that only this algorithm has.

    A learning rate may be a table that describes a schedule, as for the server.
    """

    algorithm: str = "sgd"
    learning_rate: Positive | Options  # has a default for SGD only
    batch_size: Count | Literal["all"] = "all"
    epochs: Count | None = None
    steps: Count | None = None
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    proximal: NonNegative = 0.0
    max_examples: Count | None = None
    options: Options = {}

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, table: object) -> object:
        if not isinstance(table, Mapping):
            return table
        length = {} if {"epochs", "steps"} & table.keys() else {"epochs": 1}
        sgd = table.get("algorithm", "sgd") == "sgd"
        rate = {"learning_rate": DEFAULT_LOCAL_LEARNING_RATE} if sgd else {}
        return {**rate, **length, **table}

    @model_validator(mode="after")
    def _must_say_once(self) -> Self:
        if repeated := [key for key in self.options if key in COMMON]:
            raise ValueError(f"options has {repeated[0]!r}; it must be given next to options")
        return self

    def build(self) -> LocalTraining:
        """Return local training with these settings."""
        settings = self.model_dump(exclude={"algorithm", "options"}) | self.options
        settings["learning_rate"] = _scheduled(self.learning_rate)
        examples = None if self.batch_size == "all" else self.batch_size
        return _ALGORITHM.build(self.algorithm, settings | {"batch_size": examples}, {})


DEFAULT_LOCAL = LocalSection.model_validate({"batch_size": 32})  # if the section is absent
# `GRADIENT`, the only local training of examples and microbatches, as files may spell it out.
_GRADIENTS = (LocalSection(learning_rate=1.0, steps=1), LocalSection(learning_rate=1.0, epochs=1))


class ServerSection(Section):
    """The server's steps along the released average; `options` are the optimiser's fields.

    A learning rate may be a table with the name of a `schedule`, and its fields.
    """

    optimizer: str = "fedavg"
    options: dict[str, float | Options] = {}

    def build(self) -> ServerOptimizer:
        """Return the optimiser with these settings."""
        options = {key: _scheduled(value) for key, value in self.options.items()}
        return _OPTIMIZER.build(self.optimizer, options, {})


def _scheduled(value: object) -> object:
    """Return the schedule that a table describes, or any other value unchanged."""
    if not isinstance(value, Mapping):
        return value
    fields = {key: number for key, number in value.items() if key != "schedule"}
    return _SCHEDULE.build(str(value.get("schedule", "")), fields, {})


class SamplingSection(Section):
    """The sampling of cohorts: a policy, and its fields except `probability`."""

    policy: str = "poisson"
    options: Options = {}

    def build(self, q: float | None) -> CohortPolicy:
        """Return the policy, with q if it has that field."""
        fields = {} if q is None else {"probability": q}
        policy = _POLICY.build(self.policy, self.options, fields)
        if (value := getattr(policy, "probability", None)) != q:
            no_other = f"sampling.options must not give {value} as the probability"
            cure = f"it must be absent for {self.policy!r}" if value is None else no_other
            raise InvalidValueError(f"privacy.sampling_probability is {q}; {cure}")
        return policy


class PrivacySection(Section):
    """The guarantee, and the mechanism's two numbers.

    Without `noise_multiplier`, calibration finds the least noise that keeps all rounds within
    `epsilon`; with it, training stops before exceeding `epsilon`.
    """

    sampling_probability: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    unit: str = "user"
    microbatch: Count | None = None
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]
    epsilon: Positive | None = None
    noise_multiplier: NonNegative | None = None
    accountant: str = "tight"
    ledger: PathText | None = None
    unsafe_no_privacy: bool = False

    @model_validator(mode="after")
    def _must_be_private(self) -> Self:
        checked_unit(self.unit, self.microbatch)
        check_private(self.noise_multiplier, self.epsilon, self.unsafe_no_privacy)
        return self


class ClippedSection(Section):
    """Clipping; `parts` and `split` are for the strategy per-layer, and `scales` for joint."""

    norm: Annotated[float, Field(gt=0.0)] | None = None
    strategy: str = "flat"
    parts: Literal["layer", "tensor"] = "layer"
    split: Literal["equal", "dimension"] | dict[str, float] = "equal"
    scales: Literal["dimension"] | dict[str, float] = "dimension"

    def policy(self) -> ClippingPolicy:
        """Return the policy of the strategy, with the keys that it has as fields."""
        fields = self.model_dump(include=_CLIPPING_KEYS, exclude_none=True)
        return _STRATEGY.build(self.strategy, {}, fields)


_CLIPPING_KEYS = ClippedSection.model_fields.keys() - {"strategy"}


class GroupSection(ClippedSection):
    """Tensors that are clipped together: the first pattern that they match is in this group."""

    name: Name
    tensors: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]  # globs, as "*.bias"
    norm: Positive
    share: Positive | None = None  # weight in the update's privacy; for all groups, or none


class ClippingSection(ClippedSection):
    """The clipping of updates: all tensors together, to `norm`, or each of `groups` separately."""

    groups: Annotated[tuple[GroupSection, ...], Field(strict=False)] = ()
    adaptive: Annotated[AdaptiveClipping, _Value()] | None = None

    @property
    def lacks_norm(self) -> bool:
        """True if it needs the default norm."""
        return self.norm is None and not self.groups and self.strategy in CLIPPINGS

    @model_validator(mode="after")
    def _must_say_once(self) -> Self:
        if not self.groups:
            return self
        for key, field in ClippedSection.model_fields.items():
            if getattr(self, key) != field.default:
                raise ValueError(f"{key} is given next to groups; it belongs in each of the groups")
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups are named {names}; names must be unique")
        return self

    def build(self) -> ClippingPolicy:
        """Return one policy for all tensors, or one for each group."""
        if not self.groups:
            return self.policy()
        return Grouped({g.name: Part(g.tensors, g.policy(), g.share) for g in self.groups})


class MetricsSection(Section):
    """Releases besides the update, and their shares of a round's privacy.

    `share` is for all metrics of `report` together, `contributors_share` for the number of users in
    a cohort whose update counted; with 0, that number is not released.
    """

    share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    contributors_share: Annotated[float, Field(ge=0.0, lt=1.0)] = CONTRIBUTORS_SHARE
    report: dict[str, dict[str, int | float | list[int | float]]] = {}  # options of metrics by name


class EvaluationSection(Section):
    """Figures of models on held-out rows, under your own names; users are not involved.

    A figure is a name, an import path, or a table with one of these as `figure`, and its options.
    """

    figures: Options = {}
    by: Annotated[tuple[str, ...], Field(strict=False)] = ()  # fields whose values group the rows
    classes: Annotated[tuple[str, ...], Field(strict=False)] = ()  # their public names, by number


class FederatedEvaluationSection(Section):
    """Queries to users about released models, on examples that are kept from training."""

    noise_multiplier: Positive
    report: dict[str, dict[str, int | float | list[int | float]]] = {"accuracy": {}}
    sampling_probability: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    every: Count | None = None
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2


class PersonalisationSection(Section):
    """The personalisation of released models by users; see `Personalisation`."""

    local: LocalSection = LocalSection.model_validate({})
    parameters: Annotated[tuple[str, ...], Field(strict=False)] = ()
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5


class NoiseSection(Section):
    """The shares of vector groups in the noise, and its correlation over a series of rounds.

    An allocation may be a table of weights by group; `options` are fields of the correlation.
    """

    allocation: Literal["proportional", "dimension"] | dict[str, float] = "proportional"
    correlation: str = "independent"
    options: Options = {}

    def build(self) -> NoisePolicy:
        """Return the policy with these options."""
        return _CORRELATION.build(self.correlation, self.options, {})


class EngineSection(Section):
    """The resources for training; they affect results only by rounding."""

    device: str = "auto"
    chunk_mebibytes: Count | None = None
    activations: Literal["float32", "tf32", "bfloat16"] = "float32"
    processes: Count | None = None
    path: Literal["auto", "alone", "together"] = "auto"


class OutputSection(Section):
    """Outputs and their intervals in rounds; no guarantee covers `simulation_only` outputs."""

    evaluate_every: Count = 1
    checkpoint_every: Count = 1
    simulation_only: bool = False


class RangeSection(Section):
    """Numbers from `low` to `high` on a logarithmic scale; whole numbers if both ends are whole."""

    low: int | float
    high: int | float

    @model_validator(mode="after")
    def _must_have_room(self) -> Self:
        if not 0.0 < self.low < self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; 0 < low < high must hold")
        return self

    @property
    def whole(self) -> bool:
        """True if its numbers are whole."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class TuneSection(Section):
    """The search of `fedpriv tune`; see docs/choosing-settings.md."""

    trials: Count = 30  # on users the mean, because their number is then random and secret
    law: Literal["negative-binomial", "poisson"] = "negative-binomial"  # of the random number
    # η of the truncated negative binomial; 1 is geometric, and 0 would be logarithmic.
    shape: Annotated[Positive, Field(ge=1e-9)] = 1.0
    objective: str = "accuracy"  # a figure of the held-out rows
    better: Literal["larger", "smaller"] | None = None  # None: only for built-in objectives
    held_out_is_public: bool = False  # must be true to compare trials on users
    public: PeopleSection | None = None  # people who are not enrolled
    users: Count | None = None  # number of enrolled users, which determines the noise
    space: dict[str, RangeSection | list[Any]] = {}  # by key; values in a list are equally likely


class FederationSection(Section):
    """Address and purpose of a deployment, and how long the server waits for its nodes.

    A round begins once `least_nodes` of the connected nodes agree to it; they vote before its
    cohort is drawn. The run stops if too few nodes agree for `patience_seconds`. A round ends when
    all nodes have answered, after `deadline_seconds`, or once all missing nodes have been
    disconnected for `absent_seconds`. With `fixed_length` it always takes `deadline_seconds`, so
    its length reveals nothing about the cohort.

    With `trust = "none"`, neither the server nor `colluding_nodes` of the nodes need to be trusted:
    nodes draw their users, add the noise and mask their sums. A round succeeds if at most
    `dropouts` nodes drop out. A simulation has `least_nodes` nodes, and each drops out of a round
    with probability `simulated_dropout`.
    """

    trust: Literal["server", "none"] = "server"
    colluding_nodes: Annotated[int, Field(ge=0)] = 0
    dropouts: Annotated[int, Field(ge=0)] = 0
    simulated_dropout: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    address: str = "127.0.0.1:7443"
    enrolment: PathText | None = None
    certificates: PathText | None = None
    held_out: PathText | None = None
    purpose: Annotated[str, Field(max_length=1024)] = ""
    deadline_seconds: Positive = 600.0
    absent_seconds: NonNegative = 10.0
    fixed_length: bool = False
    least_nodes: Count = 1
    patience_seconds: Positive = 3600.0
    transfer_mebibytes: Count = 256
    transfer_seconds: Positive = 120.0
    calls_per_minute: Count = 600
    metrics_address: str | None = None

    @model_validator(mode="after")
    def _check_trust(self) -> Self:
        if self.trust == "server":
            for name in ("colluding_nodes", "dropouts", "simulated_dropout"):
                if value := getattr(self, name):
                    raise ValueError(f'{name} is {value} and trust is "server"; it must be "none"')
        _ = self.secure_sum  # refuses inconsistent numbers
        return self

    @property
    def secure_sum(self) -> SecureSum | None:
        """The nodes of a secure sum; None if the server is trusted."""
        if self.trust == "server":
            return None
        return SecureSum(self.least_nodes, self.colluding_nodes, self.dropouts)


# Keys of the section privacy that are attributes of a mechanism.
_MECHANISM_KEYS = PrivacySection.model_fields.keys() - {"sampling_probability", "ledger"}


class Config(Section):
    """One experiment."""

    name: Name
    rounds: Count = DEFAULT_ROUNDS
    run: Name | None = None  # in the ledger; derived from `name` if absent
    seed: Seed | None = None  # the guarantee does not hold against anyone who knows it
    data: DataSection | None = None  # needed to simulate users
    population: PopulationSection = PopulationSection()  # for simulations
    model: ModelSection
    local: LocalSection | None = None  # required if users train; other units send a gradient
    privacy: PrivacySection
    sampling: SamplingSection = SamplingSection()
    clipping: ClippingSection = ClippingSection()
    server: ServerSection = ServerSection()
    noise: NoiseSection = NoiseSection()
    metrics: MetricsSection = MetricsSection()
    # The next three need users who train in one process.
    federated_evaluation: FederatedEvaluationSection | None = None
    personalisation: PersonalisationSection | None = None
    audit: Annotated[Audit, _Value()] | None = None
    averaging: Annotated[Averaging, _Value()] = Averaging()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()
    # Names of trackers, or import paths of `Tracker` classes or of functions of a `RoundResult`.
    trackers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    tune: TuneSection | None = None  # only for `fedpriv tune`
    federation: FederationSection | None = None

    @model_validator(mode="after")
    def _left_out(self) -> Self:
        # Defaults that depend on other sections. The default optimiser belongs to the default norm,
        # which depends on the number of users; if a norm is given, it is `fedavg`.
        changes, policy = dict[str, Any](), SAMPLING_POLICIES.get(self.sampling.policy)
        draws_by_q = "probability" in getattr(policy, "__dataclass_fields__", ())
        if draws_by_q and self.privacy.sampling_probability is None:
            changes["privacy"] = {"sampling_probability": DEFAULT_PROBABILITY}
        if self.clipping.lacks_norm and "optimizer" not in self.server.model_fields_set:
            changes["server"] = {"optimizer": DEFAULT_OPTIMIZER}
        default = None if self.not_whole else DEFAULT_LOCAL
        return self.changed(**changes).model_copy(update={"local": self.local or default})

    @model_validator(mode="after")
    def _must_fit_the_unit(self) -> Self:
        if self.not_whole is None:
            return self
        setting, must_be = self.not_whole
        settings = {
            "federated_evaluation": self.federated_evaluation,
            "model.personal": self.model.personal,
            "personalisation": self.personalisation,
            "local": self.local not in (None, *_GRADIENTS),
            "averaging.cap": self.averaging.cap,
        }
        why = (
            f"{setting}; that must be {must_be}, since only users train, have weights, and keep "
            "their own examples and models (the step size is server.options.learning_rate)"
        )
        return self._without(settings, why)

    @model_validator(mode="after")
    def _must_fit_the_trust(self) -> Self:
        settings = {
            "audit": self.audit,
            "federated_evaluation": self.federated_evaluation,
            "output.simulation_only": self.output.simulation_only,
            "averaging.floor": self.averaging.floor,
        }
        if self.federation is None or self.federation.secure_sum is None:
            return self
        why = "it must be left out, since it needs a server that draws cohorts or sees their sums"
        return self._without(settings, f'federation.trust is "none"; {why}')

    def _without(self, settings: Mapping[str, object], why: str) -> Self:
        """Raise ValueError for the first of the settings that is given."""
        for name, value in settings.items():
            if value:
                raise ValueError(f"{name} is given and {why}")
        return self

    @property
    def not_whole(self) -> tuple[str, str] | None:
        """The setting by which examples or microbatches take part, and its value for whole users.

        None if whole users take part.
        """
        if (unit := self.privacy.unit) != "user":
            return f"privacy.unit is {unit!r}", "'user'"
        if (policy := self.sampling.policy) == "poisson-examples":
            return f"sampling.policy is {policy!r}", "'poisson'"
        return None

    def with_noise(self, noise_multiplier: float, noise: NoisePolicy | None = None) -> Self:
        """Return the configuration with calibrated noise, so that a resumed run uses the same."""
        z = {"noise_multiplier": noise_multiplier}
        return self.changed(privacy=z, noise=_noise_table(noise) if noise else {})

    def changed(self, **sections: Mapping[str, object]) -> Self:
        """Return the configuration with other, unchecked values of some keys, by section."""
        new = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=new)

    def training(self) -> LocalTraining:
        """Return how a record's data become its update."""
        return self.local.build() if self.local else GRADIENT

    @property
    def simulated_data(self) -> DataSection:
        """The section `data`; InvalidValueError if it is absent."""
        if self.data is None:
            raise InvalidValueError("key data is absent; it names the users to simulate")
        return self.data

    def mechanism(self) -> Mechanism:
        """Return the mechanism, not yet calibrated."""
        return Mechanism(
            sampling=self.sampling.build(self.privacy.sampling_probability),
            clipping=self.clipping.build(),
            allocation=self.noise.allocation,
            noise=self.noise.build(),
            adaptive=self.clipping.adaptive,
            averaging=self.averaging,
            metrics=self.metrics.report,
            metrics_share=self.metrics.share,
            contributors_share=self.metrics.contributors_share,
            **self.privacy.model_dump(include=_MECHANISM_KEYS),
        )


def method_left_out(
    mechanism: Mechanism, local: LocalTraining | None, server: ServerOptimizer | None
) -> tuple[LocalTraining, ServerOptimizer]:
    """Replace None by the local training and optimiser of a file that omits them."""
    if local is None:
        whole = mechanism.unit == Unit.USER and not isinstance(mechanism.sampling, PoissonExamples)
        local = DEFAULT_LOCAL.build() if whole else GRADIENT
    default = DEFAULT_OPTIMIZER if lacks_norm(mechanism.clipping) else "fedavg"
    return local, server or ServerSection(optimizer=default).build()


def tables_of(
    mechanism: Mechanism, local: LocalTraining, optimizer: ServerOptimizer
) -> dict[str, Any]:
    """Return the sections of a configuration that describe these values."""
    averaging, adaptive, sampling = mechanism.averaging, mechanism.adaptive, mechanism.sampling
    rates = {k: v for k, v in _options(optimizer).items() if not isinstance(v, str | list)}
    clipping = _clipping_table(mechanism.clipping) | {"adaptive": adaptive and asdict(adaptive)}
    calibrated = mechanism.rounds and not mechanism.unsafe_no_privacy
    return {
        "local": local_table(local),
        "server": {"optimizer": _OPTIMIZER.name_of(optimizer), "options": rates},
        "sampling": {
            "policy": _POLICY.name_of(sampling),
            "options": _options(sampling, ("probability",)),
        },
        "privacy": {
            **{key: getattr(mechanism, key) for key in _MECHANISM_KEYS},
            "unit": str(mechanism.unit),
            "sampling_probability": getattr(sampling, "probability", None),
            # Calibrated noise is a result, not a setting.
            "noise_multiplier": None if calibrated else mechanism.noise_multiplier,
        },
        "clipping": clipping,
        "noise": {"allocation": mechanism.allocation, **_noise_table(mechanism.noise)},
        "metrics": {
            "share": mechanism.metrics_share,
            "contributors_share": mechanism.contributors_share,
            "report": mechanism.metrics,
        },
        "averaging": asdict(averaging),
    }


def _noise_table(noise: NoisePolicy) -> dict[str, Any]:
    """Return the section of correlated noise."""
    return {"correlation": _CORRELATION.name_of(noise), "options": _options(noise)}


def local_table(local: LocalTraining) -> dict[str, Any]:
    """Return the section of local training."""
    options = _options(local)
    return {
        **{name: options.pop(name, None) for name in COMMON},
        "algorithm": _ALGORITHM.name_of(local),
        "batch_size": local.batch_size or "all",
        "options": options,
    }


def _clipping_table(policy: ClippingPolicy) -> dict[str, Any]:
    if not isinstance(policy, Grouped):
        fields = {key: getattr(policy, key) for key in _CLIPPING_KEYS if hasattr(policy, key)}
        return {"strategy": _STRATEGY.name_of(policy), **fields}
    groups = [
        _clipping_table(part.clipping)
        | {"name": name, "tensors": list(part.tensors), "share": part.share}
        for name, part in policy.parts.items()
    ]
    return {"groups": groups}


def plain(value: object) -> Any:
    """Return a value as TOML can hold it, without keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: plain(element) for key, element in value.items() if element is not None}
    if isinstance(value, tuple | list):
        return [plain(element) for element in value]
    return plain_numbers(value)


def _options(value: object, except_for: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes that TOML can hold: numbers, words, lists of these, and schedules."""
    options = dict[str, Any]()
    for name, option in vars(value).items():
        if isinstance(option, RateSchedule):
            options[name] = {"schedule": _SCHEDULE.name_of(option), **_options(option)}
        elif isinstance(option, int | float | str) and name not in except_for:
            options[name] = option
        elif isinstance(option, tuple) and option:
            options[name] = list(option)
    return options


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment from a TOML file; overrides "a.b=value" replace its keys.

    Paths in the file are relative to its folder, those in overrides to the working directory.
    """
    source = f"{path} with --set" if overrides else str(path)
    return parse_config(overridden(read_experiment(path), overrides), source)


def overridden(table: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return an experiment's table after overrides "a.b=value" of its keys."""
    changed = spelled_out(deepcopy(dict(table)))
    for override in overrides:
        assign(changed, override)
        changed = spelled_out(changed)
    return changed


def parse_config(table: Mapping[str, object], source: str) -> Config:
    """Check a table of settings; messages name `source`."""
    return checked(Config, spelled_out(table), source)


def spelled_out(table: Mapping[str, object]) -> dict[str, object]:
    """Return the table of an experiment, with data and model as tables, also if they are names."""
    names = {key: table[key] for key in ("data", "model") if isinstance(table.get(key), str)}
    return {**table, **{key: {"name": name} for key, name in names.items()}}


def flattened(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested tables as one table with keys "a.b".

    >>> flattened({"a": {"b": 1, "c": {}}, "d": 2})
    {'a.b': 1, 'a.c': {}, 'd': 2}
    """
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def assign(table: dict[str, object], override: str) -> None:
    """Replace a key of a table in place, given "a.b=value"; the value is TOML or plain text."""
    path, separator, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not separator or not all(keys):
        raise InvalidValueError(f"--set {override!r} is not of the form a.b=value")
    try:
        parsed = parse_toml(f"value = {text}", override)
    except InvalidValueError:
        parsed = {}
    value = parsed["value"] if len(parsed) == 1 else text.strip()  # several lines have more keys
    try:
        put(table, keys, value)
    except InvalidValueError as error:
        raise InvalidValueError(f"--set {override!r}: {error}") from error


def put(table: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Replace a key of a table in place, given the path of keys to it."""
    *sections, final_key = path
    for key in sections:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InvalidValueError(f"{key} is not a table")
    table[final_key] = value
