"""Configuration of an experiment: TOML, checked key by key."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedpriv.errors import InvalidValueError
from fedpriv.sections import (
    AveragingSection,
    CallbacksSection,
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
from fedpriv.settings import checked, read_toml


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
    callbacks: CallbacksSection = CallbacksSection()
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
        InvalidValueError: it is no assignment, or a key on its way holds no table.
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
