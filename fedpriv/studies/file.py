"""The file of a study: a base experiment, axes or arms, seeds and targets."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import tomli_w
from pydantic import Field, model_validator

from fedpriv.config import spelled_out
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.sections import Count, Options, Positive, Section
from fedpriv.settings import checked, read_toml
from fedpriv.studies.axes import NAME, crossed
from fedpriv.studies.numeric import settings_of
from fedpriv.studies.study import Arm, Study, Table, Target, varied

Name = Annotated[str, Field(pattern=NAME)]
Assignments = Annotated[tuple[str, ...], Field(strict=False)]
# What an arm may not vary, as the study sets it, or as arms would then not cost the same.
_FIXED = {
    "name": "the study names its runs",
    "run": "the study names its runs",
    "seed": "the study's seeds are those of every arm",
    "model.seed": "the study's seeds are those of every arm",
    "privacy.epsilon": "the study's target is that of every arm",
    "privacy.delta": "the study's target is that of every arm",
    "privacy.noise_multiplier": "the noise of every arm is calibrated to the study's target",
    "privacy.accountant": "all arms are calibrated by one accountant",
}


class ArmSection(Section):
    """One arm: a name, and what it sets as `--set` would."""

    name: Name
    set: Assignments = ()


class TargetSection(Section):
    """What each run may cost; with several ε, every arm runs at each of them."""

    epsilon: Positive | Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]


class StudySection(Section):
    """A study.

    Attributes:
        name: short name.
        base: file of the experiment, beside that of the study, or its table.
        seeds: the seeds, or how many, from 0.
        target: what each run may cost.
        baseline: name of the arm to compare with; absent: the first.
        accuracies: levels of which is told when they were reached.
        arms: the arms, unless axes make them.
        axes: what makes the arms otherwise; see `crossed`.
    """

    name: Name
    base: str | dict[str, object]
    seeds: Count | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = 5
    target: TargetSection
    baseline: str | None = None
    accuracies: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(strict=False)
    ] = ()
    arms: Annotated[tuple[ArmSection, ...], Field(strict=False)] = ()
    axes: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _must_have_arms(self) -> Self:
        if bool(self.arms) == bool(self.axes):
            raise ValueError("exactly one of arms and axes must be given, with at least one arm")
        return self


def load_study(path: Path) -> Study:
    """Read a study from TOML and check it as far as that goes without data and models.

    Raises:
        InvalidValueError: a file is absent or no TOML, a key is unknown, absent or out of range,
            names, seeds or targets are not unique, or an arm sets what the study sets for all.
    """
    section = checked(StudySection, read_toml(path), str(path))
    base, seeds, epsilons = section.base, section.seeds, section.target.epsilon
    arms = tuple(Arm(arm.name, arm.set) for arm in section.arms)
    arms = arms or crossed(section.axes)
    study = Study(
        name=section.name,
        base=spelled_out(read_toml(path.parent / base) if isinstance(base, str) else base),
        arms=arms,
        targets=tuple(
            Target(epsilon, section.target.delta)
            for epsilon in (epsilons if isinstance(epsilons, tuple) else (epsilons,))
        ),
        seeds=seeds if isinstance(seeds, tuple) else tuple(range(seeds)),
        baseline=section.baseline or arms[0].name,
        accuracies=section.accuracies,
    )
    _check(study, str(path))
    return study


def study_toml(study: Study) -> str:
    """The study as TOML, with base and arms written out; `load_study` reads an equal one."""
    (delta,) = {target.delta for target in study.targets}
    return tomli_w.dumps(
        {
            "name": study.name,
            "seeds": list(study.seeds),
            "baseline": study.baseline,
            "accuracies": list(study.accuracies),
            "target": {"epsilon": [t.epsilon for t in study.targets], "delta": delta},
            "arms": [{"name": arm.name, "set": list(arm.assignments)} for arm in study.arms],
            "base": study.base,
        }
    )


def _check(study: Study, source: str) -> None:
    _unique([arm.name for arm in study.arms], f"{source}: arms")
    _unique(study.seeds, f"{source}: seeds")
    _unique([target.epsilon for target in study.targets], f"{source}: target.epsilon")
    names = [arm.name for arm in study.arms]
    if study.baseline not in names:
        raise InvalidValueError(
            f"{source}: baseline is {study.baseline!r}, which is no arm; "
            f"{known_names(study.baseline, names)}"
        )
    for arm in study.arms:
        _check_arm(study.base, arm, f"{source}: arm {arm.name!r}")
    seen: dict[str, str] = {}
    for arm in study.arms:
        other = seen.setdefault(repr(settings_of(study, arm.name)), arm.name)
        if other != arm.name:
            raise InvalidValueError(
                f"{source}: arms {other!r} and {arm.name!r} are alike; they must differ in what "
                "they set"
            )


def _check_arm(base: Table, arm: Arm, source: str) -> None:
    """Refuse an arm that would cost something else, or charge something else, than the others."""
    try:
        table = varied(base, arm)
    except InvalidValueError as error:
        raise InvalidValueError(f"{source}: {error}") from error
    for key, reason in _FIXED.items():
        if _value(table, key) != _value(base, key):
            raise InvalidValueError(f"{source} sets {key}; {reason}")
    if _value(table, "privacy.ledger") is not None:
        raise InvalidValueError(f"{source} has a privacy.ledger; every run of a study has its own")
    if _value(table, "privacy.unsafe_no_privacy"):
        raise InvalidValueError(
            f"{source} has unsafe_no_privacy; a study compares at equal privacy"
        )


def _value(table: Table, key: str) -> object:
    """What a table holds under "a.b"; None if there is nothing."""
    value: object = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _unique(values: Sequence[object], what: str) -> None:
    if not values:
        raise InvalidValueError(f"{what} are none; there must be at least one")
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise InvalidValueError(f"{what} hold {repeated[0]!r} more than once; each must be unique")
