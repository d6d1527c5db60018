"""Studies: one experiment under several settings at equal privacy, and the results.

`fedpriv compare` runs the study of a file and writes a folder, which `read_study` reads.
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
