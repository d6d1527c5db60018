"""The privacy ledger: every release about users is charged here before it is made.

Read `events` first (the values that are charged, and the budget that limits them), then `ledger`
(charges, receipts for one release, exports) and `participation` (the secret cohorts).
"""

from fedpriv.ledger.events import (
    NeighbouringRelation,
    PrivacyBudget,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    Selection,
    SumQueryEvent,
    Trial,
    Unit,
)
from fedpriv.ledger.ledger import Charge, ChargedRow, ExportedLedger, Ledger, ProposedCharge
from fedpriv.ledger.participation import Head, ParticipationRecord

__all__ = [
    "Charge",
    "ChargedRow",
    "ExportedLedger",
    "Head",
    "Ledger",
    "NeighbouringRelation",
    "ParticipationRecord",
    "PrivacyBudget",
    "ProposedCharge",
    "Randomness",
    "RoundEvent",
    "SamplingEvent",
    "SamplingPolicy",
    "Schedule",
    "Selection",
    "SumQueryEvent",
    "Trial",
    "Unit",
]
