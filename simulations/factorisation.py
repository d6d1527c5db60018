"""Errors of optimised strategies of correlated noise, compared with jax-privacy's optimisers.

Both are computed here from the coefficients, at equal noise per sensitivity, for prefix sums of
2,000 rounds. Without jax-privacy the table has only our strategies.

    python -m simulations.factorisation [--rounds N] [--json FILE]
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.factorisation import (
    Errors,
    Objective,
    errors,
    optimal_bands,
    optimal_buffers,
    relative_errors,
)
from fedpriv.ledger.events import Schedule

PARTICIPATIONS = ((1, 1.0), (5, 0.2), (20, 0.05), (4, 0.05))
"""k, and b as a fraction of the number of rounds."""
BUFFERS = (2, 4)
Strategy = tuple[float, ...]


def settings(rounds: int) -> Iterator[tuple[str, Schedule, int, Objective]]:
    """Yield kind of strategy, schedule, number of bands or buffers, and objective."""
    for k, share in PARTICIPATIONS:
        schedule = Schedule(rounds, k, max(1, round(share * rounds)))
        for objective in Objective:
            # jax-privacy takes a minute for more bands.
            yield "bands", schedule, min(schedule.separation, 400), objective
            for buffers in BUFFERS:
                yield "buffers", schedule, buffers, objective


def ours(kind: str, schedule: Schedule, size: int, objective: Objective) -> Strategy:
    """Return this library's coefficients."""
    if kind == "bands":
        return optimal_bands(schedule, size, objective)
    return optimal_buffers(schedule, size, objective).coefficients(schedule.rounds)


def theirs(kind: str, schedule: Schedule, size: int, objective: Objective) -> Strategy:
    """Return jax-privacy's coefficients; RuntimeError if it finds none."""
    import jax  # noqa: PLC0415 - not a requirement of ours
    import jax.numpy as jnp  # noqa: PLC0415
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz  # noqa: PLC0415

    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    n, mean = schedule.rounds, objective is Objective.MEAN
    if kind == "bands":
        reduction = jnp.mean if mean else jnp.max
        result = toeplitz.optimize_banded_toeplitz(n, size, reduction_fn=reduction)
    else:
        loss = buffered_toeplitz.LossFn.build_min_sep(
            n,
            error="mean" if mean else "max",
            min_sep=schedule.separation,
            max_participations=schedule.participations,
        )
        matrix, _ = buffered_toeplitz.optimize_loss(loss, size)
        # With θ near 1, coefficients may grow by an ulp; the sensitivity would not be exact.
        result = np.minimum.accumulate(matrix.toeplitz_coefs(n))
    return tuple(np.asarray(result, dtype=np.float64).tolist())


def row(kind: str, schedule: Schedule, size: int, objective: Objective, *, compare: bool) -> Any:
    """Return one line of the table, as values of JSON."""

    def found(by: Callable[..., Strategy]) -> tuple[Strategy | None, dict[str, float] | None]:
        start = time.perf_counter()
        try:
            strategy = by(kind, schedule, size, objective)
        except RuntimeError as error:
            print(f"none found: {str(error).splitlines()[0]}", file=sys.stderr)
            return None, None
        seconds = time.perf_counter() - start
        at: Errors = errors(strategy, schedule)
        return strategy, {"mean": at.mean, "largest": at.largest, "seconds": round(seconds, 2)}

    strategy, own = found(ours)
    assert strategy is not None
    assert own is not None
    relative = relative_errors(strategy, schedule)
    line = {
        "kind": kind,
        "size": size,
        "participations": schedule.participations,
        "separation": schedule.separation,
        "objective": str(objective),
        "fedpriv": own,
        "of_independent_noise": {"mean": relative.mean, "largest": relative.largest},
    }
    if compare:
        _, other = found(theirs)
        ratio = other and own[objective] / other[objective]
        line |= {"jax_privacy": other, "ratio": ratio}
    return line


def installed(name: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Print the table and, if requested, write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    compare = installed("jax-privacy") is not None
    print(
        "strategy      k    b  small    mean    largest of independent  seconds  jax-privacy ratio"
    )
    lines = []
    for setting in settings(chosen.rounds):
        line = row(*setting, compare=compare)
        lines.append(line)
        own, objective, other = line["fedpriv"], line["objective"], line.get("jax_privacy")
        print(
            f"{line['size']:4} {line['kind']:7} {line['participations']:3} {line['separation']:4} "
            f"{objective:7} {own['mean']:8.4f} {own['largest']:8.4f} "
            f"{line['of_independent_noise'][objective]:15.4f} {own['seconds']:8} "
            + (f"{other[objective]:12.4f} {line['ratio']:.5f}" if other else f"{'–':>12}"),
            flush=True,
        )
    if chosen.json is not None:
        packages = ("numpy", "scipy", "jax", "jax-privacy")
        results = {
            "command": f"python -m simulations.factorisation --rounds {chosen.rounds} --json FILE",
            "rounds": chosen.rounds,
            "versions": {name: installed(name) for name in packages},
            "python": platform.python_version(),
            "rows": lines,
        }
        chosen.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
