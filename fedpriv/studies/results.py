"""What one run of a study came to, as the file that marks it finished."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedpriv.errors import DataError

RESULT = "result.json"
ALL_RESULTS = "runs.jsonl"
SIMULATION_ONLY = "simulation_only.jsonl"


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    What begins with `simulation_only` is computed from users' data without noise: it is for
    simulations, no guarantee covers it, and it must not be published of real users.

    Attributes:
        arm: name of the arm.
        target_epsilon: ε that the noise was calibrated to.
        delta: δ of the target, and of `epsilon`.
        seed: of cohorts, noise, local training and initial parameters.
        settings: digest of all settings of the run.
        stop: why it ended, in words.
        rounds: rounds that it released.
        noise_multiplier: z of a round, calibrated to the target.
        epsilon: ε that its ledger holds in the end, an upper bound.
        accuracy: of the last model on held-out rows, in [0, 1]; None if targets are no classes.
        loss: mean loss of the last model on held-out rows.
        evaluations: (rounds done, accuracy then) each time that the model was measured.
        clipping_norms: S of each vector group of the update in the last round.
        noise_stddevs: σ on the sum of each of these groups in the first round, in its own units.
        simulation_only_users_per_second: expected cohort over the median time of a round, in one
            thread, beside the other runs of the study.
        simulation_only_clipped: share of users clipped in each vector group, mean over rounds.
        simulation_only_update_norms: mean over rounds of the mean L2 norm of users' updates before
            clipping, by layer, in the model's units.
        simulation_only_signal_to_noise: by layer, mean over rounds of the norm of the sum of
            clipped updates over the root mean square norm of the noise on it.
    """

    # JSON has no such numbers, and a model that diverged has a loss that is none.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings"
    )

    arm: str
    target_epsilon: float
    delta: float
    seed: int
    settings: str
    stop: str
    rounds: int
    noise_multiplier: float
    epsilon: float
    accuracy: float | None
    loss: float
    evaluations: tuple[tuple[int, float], ...] = ()
    clipping_norms: Mapping[str, float] = field(default_factory=dict)
    noise_stddevs: Mapping[str, float] = field(default_factory=dict)
    simulation_only_users_per_second: float = 0.0
    simulation_only_clipped: Mapping[str, float] = field(default_factory=dict)
    simulation_only_update_norms: Mapping[str, float] = field(default_factory=dict)
    simulation_only_signal_to_noise: Mapping[str, float] = field(default_factory=dict)

    def rounds_to(self, accuracy: float) -> int | None:
        """After how many rounds a measured model first had an accuracy; None if none had."""
        return next((rounds for rounds, had in self.evaluations if had >= accuracy), None)

    def to_json(self) -> str:
        """The result as one JSON object; numbers that are not finite are "NaN", "Infinity"."""
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"


_ADAPTER = TypeAdapter(RunResult)


def read_result(folder: Path) -> RunResult | None:
    """The result in the folder of a run; None if the run is not finished.

    Raises:
        DataError: there is a file that holds no result.
    """
    path = folder / RESULT
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise _unreadable(path, error) from error


def read_all_results(folder: Path) -> list[RunResult]:
    """The results in the one file of a study that holds those of all runs; none without it.

    Raises:
        DataError: a line of it is no result.
    """
    path = folder / ALL_RESULTS
    try:
        lines = path.read_bytes().splitlines()
        return [_ADAPTER.validate_json(line) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        raise _unreadable(path, error) from error


def all_results(results: Iterable[RunResult]) -> str:
    """Results as one file, a line each, which `read_all_results` reads as equal ones."""
    return "".join(_ADAPTER.dump_json(result).decode() + "\n" for result in results)


def _unreadable(path: Path, error: OSError | ValidationError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else str(error.errors()[0]["msg"])
    return DataError(f"{path} cannot be read as the result of a run: {reason}")


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object a line; numbers that are not finite are null."""
    lines = (json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Rows of a file of one JSON object a line; none if there is no such file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def finite(value: object) -> object:
    """A value of JSON with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
