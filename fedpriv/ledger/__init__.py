"""The privacy ledger: what was released about users, charged before it is released.

Read `events` first (what is charged), then `ledger` (charge, then release once), `budget` (when a
charge is refused), `participation` (who took part; secret) and `export` (the ledger as text).
"""

from fedpriv.ledger.budget import PrivacyBudget
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)
from fedpriv.ledger.export import ExportedLedger
from fedpriv.ledger.ledger import Charge, ChargedRow, Head, Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord

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
    "SumQueryEvent",
]
