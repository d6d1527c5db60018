"""Studies: one experiment under several settings at equal privacy, and what came out.

A study file names arms, seeds and targets; `fedpriv compare` runs all of them into a folder, and
`read_study` reads that folder. Nothing here trains.
"""

from fedpriv.studies.intervals import Interval
from fedpriv.studies.reading import ReadStudy, read_study
from fedpriv.studies.results import RunResult
from fedpriv.studies.study import Arm, Cell, Study, Target
from fedpriv.studies.summary import ArmSummary

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
