"""Attacks on a plan: what many short runs certify of its ε, beside what their ledger says.

Read `certification` first, which turns guesses into a bound on ε, then `populations`, of which each
pair differs in one user, `distinguishers`, by which a run's releases are told apart, and `suite`,
which makes the runs. `report` prints what is found. `study` attacks engines that are broken on
purpose, too. `docs/attack.md` says how to read it.
"""

from simulations.attack.certification import Certificate, certified
from simulations.attack.populations import POPULATIONS, Crowd, KeptPopulation, Pair
from simulations.attack.suite import AttackedPlan, Finding, attack

__all__ = [
    "POPULATIONS",
    "AttackedPlan",
    "Certificate",
    "Crowd",
    "Finding",
    "KeptPopulation",
    "Pair",
    "attack",
    "certified",
]
