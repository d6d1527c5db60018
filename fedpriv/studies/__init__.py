"""Studies: one experiment under several settings at equal privacy, and what came out.

A study file names arms, seeds and targets; `fedpriv compare` runs all of them into a folder, and
`read_study` reads that folder. Nothing here trains.
"""

from fedpriv.studies.results import ArmSummary, Interval, ReadStudy, RunResult, read_study
from fedpriv.studies.study import Arm, Cell, Study, Target

__all__ = [
    "Arm",
    "ArmSummary",
    "Cell",
    "Interval",
    "ReadStudy",
    "RunResult",
    "Study",
    "Target",
    "read_study",
]
