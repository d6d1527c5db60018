"""Errors that fedpriv raises on purpose; messages state the problem and the allowed values."""

import difflib
from collections.abc import Iterable

_MOST_NAMES = 40  # the most names in one message


class FedprivError(Exception):
    """Base class of every error that fedpriv raises on purpose."""


class InvalidValueError(FedprivError, ValueError):
    """A setting is outside its allowed range."""


class DataError(FedprivError):
    """Users' data cannot be read or are inconsistent."""


class ModelError(FedprivError):
    """A model cannot be trained separately for each user."""


class UnsupportedEventError(FedprivError):
    """An accountant has no analysis of an event, so it must not return an ε."""


class BudgetExceededError(FedprivError):
    """The next release would pass the privacy budget; nothing was charged."""


class LedgerError(FedprivError):
    """A ledger cannot be opened, extended or trusted."""


class UntrustedLedgerError(FedprivError):
    """A ledger from another machine breaks its guarantees."""


class RefutedError(FedprivError):
    """A run's releases contradict its ledger."""


class TooFewUsersError(FedprivError):
    """Far fewer users count than expected; charges are not undone."""


class CheckpointError(FedprivError):
    """A checkpoint does not fit the plan or the ledger it is resumed with."""


class WireError(FedprivError):
    """A message from another machine is malformed, too large or violates the agreed terms."""


class UnreachableError(FedprivError):
    """Another machine cannot be reached or does not answer; a retry may succeed."""


class StoppedError(FedprivError):
    """The operator asked the server to stop; an unfinished round releases nothing."""


class NoiseError(FedprivError):
    """Correlated noise left the range of exact arithmetic, which should never happen."""


class DeclinedError(FedprivError):
    """Too few nodes agreed to a round; no cohort was drawn and nothing was charged."""


class RunError(FedprivError):
    """A server's run ended because of a condition that arose after its start; it can be resumed."""


class WorkerError(FedprivError):
    """A worker of a simulation failed; the round releases nothing."""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, then all names.

    >>> known_names("digts", ["digits", "synthetic"])
    "did you mean 'digits'? known names: digits, synthetic"
    """
    names = sorted(map(str, known))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if len(names) > _MOST_NAMES:
        return hint.strip() or f"none of {len(names)} known names is similar"
    return f"{hint}known names: {', '.join(names)}" if names else "there is none"


def sentence_of(error: FedprivError | OSError) -> str:
    """Return the message of an error for users of the command line."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be used: {error.strerror or error}"
    return str(error)


def reason_of(error: Exception) -> str:
    """Return the reason of a failure, without the number and path of an OSError."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
