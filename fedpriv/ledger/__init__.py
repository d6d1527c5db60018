"""The privacy ledger: what was released about users, charged before it is released.

Read `events` first (what is charged, and when a budget refuses it), then `ledger` (charge, then
release once; the ledger as text) and `participation` (who took part; secret).
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
