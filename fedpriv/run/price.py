"""The exact price of settings as other tools state them, and verdicts on their claims.

Other tools state an ε for rounds that differ from the actual ones: they draw cohorts of a fixed
size, or fewer users than the noise is for. The `tight` accountant prices each reading.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w

from fedpriv.accounting import (
    PrivacyLoss,
    calibrate_noise_multiplier,
    epsilon,
    fixed_size_gaussian,
    poisson_gaussian,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent, check_delta, check_query
from fedpriv.report.tables import Column, Table, json_text, print_table, screen
from fedpriv.support.checks import (
    check_range,
    check_ranges,
    epsilon_down,
    epsilon_up,
    hold_numbers,
    is_whole,
    require,
    text_down,
    text_up,
)
from fedpriv.support.disk import write_new

_LOOSE = 1.01  # a claim above the exact ε by less than this factor is not called loose
_USERS = 287  # most users in the data of a written experiment
_PFL_KEYS = {  # names of the fields in a benchmark of pfl
    "cohort": "cohort_size",
    "noise_cohort": "noise_cohort_size",
    "population": "population",
    "rounds": "central_num_iterations",
    "delta": "central_delta",
    "clip": "central_privacy_clipping_bound",
    "claimed_epsilon": "central_epsilon",
}


@dataclass(frozen=True)
class ForeignSetting:
    """Rounds of a clipped sum with Gaussian noise, and the ε claimed for them.

    The noise may be that of a larger cohort M: a sum of m users then has noise of z·S·m/M, so that
    its average has the noise of an average of M users. The claim is for M of N users.
    """

    noise_multiplier: float  # z > 0: noise on the sum of M users over the clip
    cohort: int  # m ≥ 1, users of an actual round
    noise_cohort: int  # M ≥ m
    population: int  # N ≥ M
    enrolled: int  # n in [m, N], users who are enrolled
    rounds: int  # T
    delta: float
    clip: float | None = None  # S, which the price does not depend on
    sampling: Literal["poisson", "fixed-size", "unknown"] = "unknown"
    claimed_epsilon: float | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_query(self.noise_multiplier, 1.0)
        check_delta(self.delta)
        valid = is_whole(self.rounds, 1 << 53)
        require(valid, f"rounds is {self.rounds}; it must be a whole number from 1 to 2^53")
        m, larger, n, people = self.cohort, self.noise_cohort, self.enrolled, self.population
        setting = f"cohort is {m}, noise_cohort {larger}, enrolled {n} and population {people}"
        limit = "it must be 1 ≤ cohort ≤ noise_cohort, enrolled ≤ population ≤ 2^53"
        valid = 1 <= m <= min(larger, n) and max(larger, n) <= people <= 1 << 53
        require(valid, f"{setting}; {limit}")
        check_ranges(self, clip="(0, inf)?", claimed_epsilon="(0, inf)?")

    @classmethod
    def stated(cls, pfl: Path | None, noise_stddev: float | None, given: Mapping[str, Any]) -> Self:
        """Return the setting with these fields, which override those of a benchmark of pfl.

        The noise is the given multiplier or `noise_stddev`, on the sum of an actual round. For a
        benchmark, it is by default the least noise that keeps its ε. InvalidValueError if a field
        is absent.
        """
        valid = noise_stddev is None or given.get("noise_multiplier") is None
        require(valid, f"noise_stddev is {noise_stddev}; with noise_multiplier it must be absent")
        fields = {} if pfl is None else _read_pfl(pfl)
        fields |= {name: value for name, value in given.items() if value is not None}
        required = [*_PFL_KEYS]
        if pfl is None:
            m = fields.get("cohort")
            fields = {"population": m, "noise_cohort": m} | fields
            noise = "noise_multiplier" if noise_stddev is None else "clip"
            required = ["cohort", "rounds", "delta", noise]
        for name in required:
            option = name.replace("_", "-")
            require(name in fields, f"{name} is absent; --{option} must be given")
        fields.setdefault("enrolled", fields["population"])
        if "noise_multiplier" in fields:
            return cls(**fields)
        setting = cls(1.0, **fields)
        if noise_stddev is None:
            q, target = setting.noise_cohort / setting.population, fields["claimed_epsilon"]
            z = calibrate_noise_multiplier(target, setting.delta, setting.rounds, q)
        else:
            check_range("noise_stddev", noise_stddev, "(0, inf)")
            z = noise_stddev / fields["clip"] * (setting.noise_cohort / setting.cohort)
        return replace(setting, noise_multiplier=z)

    def readings(self) -> Iterator[tuple[str, str, RoundEvent]]:
        """Yield for each reading its name, the reason for it, and the event of all rounds."""
        m, claimed, z = self.cohort, self.noise_cohort, self.noise_multiplier
        cohort, q = f"{claimed:,} of {self.population:,}", claimed / self.population
        coins = f"Poisson, about {cohort}", "Each user joins each round by its own secret coin."
        everybody = "every user, in every round", "Only a random and secret draw lowers the price."
        yield (
            *(coins if q < 1.0 else everybody),
            poisson_gaussian(q, z, self.rounds, self.population),
        )
        if self.sampling == "fixed-size":
            yield (
                f"exactly {cohort}",
                "Neighbours differ by one replaced user, who moves a sum by up to two clips.",
                fixed_size_gaussian(claimed, self.population, z, self.rounds),
            )
        if self.sampling == "unknown" and q < 1.0:
            yield *everybody, poisson_gaussian(1.0, z, self.rounds, self.population)
        if (m, self.enrolled) != (claimed, self.population):
            yield (
                f"users who are there, about {m:,} of {self.enrolled:,}",
                f"Noise for an average of {claimed:,} is z times a clip on a sum of {m:,}.",
                poisson_gaussian(m / self.enrolled, z * (m / claimed), self.rounds, self.enrolled),
            )

    def experiment(self) -> str:
        """Return an experiment in TOML with the claim's q, noise, rounds and budget.

        Each user joins by its own coin. The data and the model are examples. If fewer than N users
        are enrolled, the experiment is a projection to N.
        """
        require(self.clip is not None, "clip is absent; with --write it must be given")
        _, _, event = next(self.readings())
        cost = epsilon([event], self.delta).epsilon
        require(math.isfinite(cost), "no finite ε holds for these rounds; --write must have one")
        users = min(self.enrolled, _USERS)
        table: dict[str, Any] = {
            "name": "priced",
            "rounds": self.rounds,
            "data": {"name": "digits", "options": {"users": users}},
            "model": {"name": "softmax", "options": {"inputs": 64, "classes": 10}},
            "clipping": {"norm": self.clip},
            "metrics": {"contributors_share": 0.0},  # it would add noise to the update
            "privacy": {
                "sampling_probability": event.sampling.sampling_probability,
                "noise_multiplier": self.noise_multiplier,
                "epsilon": float(epsilon_up(cost)),
                "delta": self.delta,
            },
        }
        if self.cohort < self.noise_cohort:
            table["population"] = {"as_if": self.population, "cohort": min(self.cohort, users)}
        elif users < self.population:
            table["population"] = {"as_if": self.population}
        return f"# Replace the data and the model by yours.\n{tomli_w.dumps(table)}"


def _read_pfl(path: Path) -> dict[str, Any]:
    """Return the fields of a benchmark of pfl; its YAML has one `key: value` per line."""
    text = path.read_text("utf-8", "replace")
    stated = dict(re.findall(r"^(\w+)\s*:\s*['\"]?([^#'\"\s]+)", text, re.MULTILINE))
    fields: dict[str, Any] = {"sampling": "fixed-size"}
    for name, key in _PFL_KEYS.items():
        try:
            number = float(stated[key])
        except KeyError:
            continue
        except ValueError as error:
            problem = f"{key} is {stated[key]!r} in {path}; it must be a number"
            raise InvalidValueError(problem) from error
        fields[name] = int(number) if number.is_integer() else number
    return fields


def verdict_on(claimed: float | None, loss: PrivacyLoss) -> str | None:
    """Return in words whether a claimed ε holds at a loss's δ; None without a claim."""
    if claimed is None:
        return None
    if claimed < loss.epsilon_low:
        return "does not hold"
    if claimed < loss.epsilon:
        return "not proved, and not refuted"
    if claimed < _LOOSE * loss.epsilon:
        return "holds"
    factor = claimed / loss.epsilon if loss.epsilon else math.inf
    return f"holds, loose by a factor of {factor:.3g}"


def price_setting(setting: ForeignSetting, write: Path | None, *, as_json: bool) -> None:
    """Print a setting's cost in each reading and whether its claim holds; write an experiment.

    As JSON: the setting, and for each reading its numbers; `verdict` is null without a claim.
    """
    if write is not None:
        write_new(write, setting.experiment().encode())
    rows, cells, reasons = [], [], []
    for reading, reason, event in setting.readings():
        loss, q = epsilon([event], setting.delta), event.sampling.sampling_probability
        verdict, z = verdict_on(setting.claimed_epsilon, loss), event.noise_multiplier
        row = {"reading": reading, "sampling_probability": q, "noise_multiplier": z}
        rows.append(row | asdict(loss) | {"verdict": verdict, "reason": reason})
        lower_end = epsilon_down(loss.epsilon_low) if math.isfinite(loss.epsilon) else ""
        ends = lower_end, epsilon_up(loss.epsilon)
        cells.append([reading, loss.relation, text_up(q, 4), text_down(z), *ends, verdict or ""])
        reasons.append(f"{reading}: {reason}")
    if as_json:
        print(json_text({"setting": asdict(setting), "prices": rows}))  # noqa: T201
        return
    headings = [Column("reading", "text"), Column("neighbours", "text"), Column("q"), Column("z")]
    headings += [Column("ε, at least"), Column("ε, at most"), Column("the claim", "text")]
    claim = f", claimed {setting.claimed_epsilon:g}" if setting.claimed_epsilon else ""
    title = f"ε of {setting.rounds:,} rounds at δ = {setting.delta}{claim}"
    console = screen()
    print_table(Table(title, headings, cells), console)
    if write is not None:
        reasons.append(f"{write} has Poisson sampling, so the first row applies.")
    for reason in reasons:
        console.print(reason)
