"""Every error that fedpriv raises on purpose: one sentence says what is wrong and what is legal."""

import difflib
from collections.abc import Iterable

_MOST_NAMES = 40  # that a sentence lists


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


class UntrustedLedgerError(FedprivError):
    """A ledger of another machine breaks its promises."""


class RefutedError(FedprivError):
    """What a run released cannot be what its ledger says."""


class CheckpointError(FedprivError):
    """A checkpoint does not fit the plan or the ledger it is resumed with."""


class WireError(FedprivError):
    """A message of another machine is malformed, too large, or does not fit what was agreed."""


class UnreachableError(FedprivError):
    """Another machine cannot be reached or does not answer; later it may."""


class StoppedError(FedprivError):
    """The operator asked the server to stop; nothing of a round under way is released."""


class NoiseError(FedprivError):
    """Correlated noise left the range in which its arithmetic is exact; it never should."""


class DeclinedError(FedprivError):
    """Too few nodes agreed to a round; its cohort was not drawn and nothing charged."""


class RunError(FedprivError):
    """A server's run ended for a reason that was not there when it began; it can be resumed."""


class WorkerError(FedprivError):
    """A worker of a simulation does not do its part; nothing of the round is released."""


def known_names(name: str, known: Iterable[str]) -> str:
    """End of a sentence about an unknown name: the closest known one, then all but very many.

    >>> known_names("digts", ["digits", "synthetic"])
    "did you mean 'digits'? known names: digits, synthetic"
    """
    names = sorted(map(str, known))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if len(names) > _MOST_NAMES:
        return hint.strip() or f"none of {len(names)} known names is like it"
    return f"{hint}known names: {', '.join(names)}" if names else "there is none"


def sentence_of(error: FedprivError | OSError) -> str:
    """What an error says to the one who gave the command."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be used: {error.strerror or error}"
    return str(error)


def reason_of(error: Exception) -> str:
    """Why something failed, without the number and the path of an OSError, said elsewhere."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
