"""Every error that fedpriv raises on purpose.

FedprivError
├── InvalidValueError        a setting outside its legal range (also a ValueError)
├── DataError                users' data that cannot be read or is inconsistent
├── ModelError               a model that cannot be trained for users separately
├── UnsupportedEventError    an accountant has no analysis of this event
├── BudgetExceededError      the next release would pass the privacy budget
├── LedgerError              a ledger that cannot be opened, extended or believed
└── CheckpointError          a checkpoint that does not fit the plan or the ledger

Each message is one sentence that says what is wrong, its value and what is legal.
"""


class FedprivError(Exception):
    """Base class of every error that fedpriv raises on purpose."""


class InvalidValueError(FedprivError, ValueError):
    """A setting is outside its legal range."""


class DataError(FedprivError):
    """Users' data cannot be read or are inconsistent."""


class ModelError(FedprivError):
    """A model cannot be trained for users separately."""


class UnsupportedEventError(FedprivError):
    """An accountant has no analysis of an event; it must not yield an ε."""


class BudgetExceededError(FedprivError):
    """The next release would pass the privacy budget; nothing was charged."""


class LedgerError(FedprivError):
    """A ledger cannot be opened, extended or believed."""


class CheckpointError(FedprivError):
    """A checkpoint does not fit the plan or the ledger it is resumed with."""
