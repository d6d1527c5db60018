"""Attacks on a plan: a lower bound on its ε from many short runs, against the ledger's ε.

Read `certification` first, which turns guesses into a bound on ε. Then read `populations`, which
has pairs that differ in one user, `distinguishers`, which tell releases of two worlds apart, and
`suite`, which makes the runs. `report` prints the results. `study` also attacks engines that are
broken on purpose. `docs/attack.md` explains the results.
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
