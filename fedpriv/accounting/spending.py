"""What the charges of a ledger come to, kept up as its chain grows."""

from fedpriv.accounting.budget import PrivacyBudget, repeated
from fedpriv.accounting.events import RoundEvent
from fedpriv.accounting.forecast import Forecast, price
from fedpriv.accounting.ledger_rows import ChargedRow, Head


class Spending:
    """The charges up to a head, equal events counted together, and the last price.

    Attributes:
        head: the last charge that was added, or where the chain begins.
    """

    def __init__(self, genesis: Head) -> None:
        self.head = genesis
        self._rounds: dict[RoundEvent, int] = {}
        self._forecast: Forecast | None = None
        self._asked: tuple[Head, RoundEvent, PrivacyBudget] | None = None
        self._told = 0.0

    @property
    def events(self) -> list[RoundEvent]:
        """All events with equal ones merged, in order of first use."""
        return list(repeated(self._rounds))

    def add(self, row: ChargedRow) -> None:
        """Count the charge that follows the head."""
        self._forecast = self._forecast and self._forecast.plus(row.event)
        self._rounds[row.event] = self._rounds.get(row.event, 0) + 1
        self.head = row.head

    def with_one_more(self, event: RoundEvent, budget: PrivacyBudget) -> float:
        """What `forecast.price` says of these charges and one more event of count 1.

        A round asks twice, before its users are asked and when it is charged. What was said is
        said again for the same event and budget while the head, which stands for all before it,
        has not moved.
        """
        asked = (self.head, event, budget)
        if asked != self._asked:
            self._told, self._forecast = price(self._forecast, budget, self._rounds, event)
            self._asked = asked
        return self._told
