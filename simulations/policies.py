"""Costs of sampling policies: their noise at equal ε, rounds and expected cohorts.

    python -m simulations.policies [--epsilon 2 8] [--folder FOLDER]

The plan is that of MNIST by writer in mnist_writers.toml: 539 users, 100 rounds and δ = 1e-3. The
table compares Poisson coins with q = 1/n, random allocation to one round of a pass of n, and
cohorts of the fixed size nearest to N/n. correlated_noise.toml compares the accuracy of the first
two.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import fedpriv
from fedpriv.experiment.mechanism import CohortPolicy
from fedpriv.report.tables import Column, Table
from simulations.papers.results import write_results

USERS, ROUNDS, DELTA = 539, 100, 1e-3


@dataclass(frozen=True)
class Cost:
    """The cost of one policy at one ε."""

    epsilon: float
    policy: str
    cohort: float  # expected number of users in a round
    relation: str  # of the two populations that ε compares
    noise_multiplier: float  # z: noise on a sum over the clipping norm


def policies(n: int) -> Mapping[str, CohortPolicy]:
    """Return policies by which about an n-th of the users is in a round."""
    return {
        "poisson": fedpriv.Poisson(1.0 / n),
        "random allocation": fedpriv.RandomAllocation(n),
        "fixed size": fedpriv.FixedSize(round(USERS / n)),
    }


def cost(epsilon: float, name: str, policy: CohortPolicy) -> Cost:
    """Return the least noise of a policy within ε."""
    mechanism = fedpriv.Mechanism(policy, fedpriv.Flat(1.0)).calibrate(
        epsilon=epsilon, delta=DELTA, rounds=ROUNDS, users=USERS
    )
    event, z = policy.of(USERS, mechanism.unit).event(), mechanism.noise_multiplier or 0.0
    return Cost(epsilon, name, event.expected_cohort_size, event.relation, z)


def table_of(costs: Sequence[Cost]) -> Table:
    """Return a table with a row for each ε, size of cohorts and policy."""
    rows = [
        (f"{c.epsilon:g}", c.policy, f"{c.cohort:.4g}", c.relation, f"{c.noise_multiplier:.4f}")
        for c in costs
    ]
    columns = [Column("ε"), Column("policy", "text"), Column("cohort")]
    title = f"{ROUNDS} rounds, N = {USERS} users, δ = {DELTA:g}"
    return Table(title, [*columns, Column("neighbours", "text"), Column("z")], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, print, and write the results."""
    parser = argparse.ArgumentParser(description="noise of sampling policies at equal ε")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--passes", type=int, nargs="+", default=[2, 10, 50], help="n")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    costs = list[Cost]()
    for epsilon in options.epsilon:
        costs.append(cost(epsilon, "every user", fedpriv.EveryUser()))
        for n in options.passes:
            costs += [cost(epsilon, name, policy) for name, policy in policies(n).items()]
    write_results(table_of(costs), [asdict(row) for row in costs], options.folder, "policies")


if __name__ == "__main__":
    main()
