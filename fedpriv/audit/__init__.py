"""Every run can audit itself: canaries beside its users, and what its releases say of them.

An accountant proves what a correct program would leak; an audit measures what this one leaked.
Read in this order:

1. `canaries`: who they are, how they move, and what is measured of a release; `canary_transport`
   puts them beside users, and is the only module here that imports torch;
2. `likelihood`: how surely a canary is there, given all that was measured;
3. `one_run`: what guesses about canaries prove;
4. `verdict`: what is concluded, and two tests of the noise that need no canaries.

Nothing here is needed for the guarantee, and nothing here can weaken it: canaries are users whose
data are invented, and all the rest follows from what was released.
"""

from fedpriv.audit.canaries import Canaries, Measurement, Past, measure
from fedpriv.audit.likelihood import check_auditable
from fedpriv.audit.verdict import Audit, AuditResult, GuessCounts, conclude

__all__ = [
    "Audit",
    "AuditResult",
    "Canaries",
    "GuessCounts",
    "Measurement",
    "Past",
    "check_auditable",
    "conclude",
    "measure",
]
