"""What ledgers cost and what budgets allow, as JSON for other programs."""

import json
import math
from collections.abc import Mapping
from typing import TextIO

from fedpriv.accounting.calibration import Plan
from fedpriv.accounting.pricing import LedgerContent, Price, Spending


def write_spending(spending: Spending, stream: TextIO) -> None:
    """Write one JSON object: what was priced, and a row for each part and accountant.

    In a row, `ledger` is null for all ledgers and `run` is null for all runs. A δ that was found
    stands in `delta` of its row, an ε in `epsilon`, with the lower end `epsilon_low`.
    `refusals` says why an accountant has no row. An infinite ε is the string "Infinity", which no
    program takes for a small number.
    """
    given = {"delta": spending.delta} if spending.epsilon is None else {"epsilon": spending.epsilon}
    content = {
        "ledgers": [_ledger(ledger) for ledger in spending.ledgers],
        "runs": [
            {"ledger": str(ledger.path), "run": run, "rounds": len(events)}
            for ledger in spending.ledgers
            for run, events in ledger.runs().items()
        ],
        **given,
        "randomness": str(spending.randomness),
        "arithmetic": str(spending.arithmetic),
        "rows": [_row(price, spending) for price in spending.prices],
        "refusals": list(spending.refusals),
    }
    _write(content, stream)


def write_plan(plan: Plan, stream: TextIO) -> None:
    """Write one JSON object: the settings, which of them was found, and what they cost."""
    content = {
        "found": plan.found,
        "rounds": plan.rounds,
        "sampling_probability": plan.sampling_probability,
        "noise_multiplier": plan.noise_multiplier,
        "share": plan.share,
        "share_noise_multiplier": plan.share_noise_multiplier,
        "policy": str(plan.sampled.policy),
        "target_epsilon": plan.target_epsilon,
        "epsilon_low": plan.loss.epsilon_low,
        "epsilon": plan.loss.epsilon,
        "delta": plan.loss.delta,
        "accountant": plan.loss.accountant,
        "bound": str(plan.loss.bound),
        "relation": str(plan.loss.relation),
        "assumptions": plan.loss.assumptions,
    }
    _write(content, stream)


def number(value: float) -> float | str:
    """A number of JSON, or the string "Infinity", since JSON has no such number.

    >>> number(0.5), number(float("inf"))
    (0.5, 'Infinity')
    """
    return "Infinity" if math.isinf(value) else value


def _write(content: Mapping[str, object], stream: TextIO) -> None:
    stream.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _ledger(ledger: LedgerContent) -> dict[str, object]:
    return {
        "path": str(ledger.path),
        "ledger_id": ledger.ledger_id,
        "population": ledger.population,
        "charges": len(ledger.charges),
        "head": ledger.charges[-1].hash if ledger.charges else None,
    }


def _row(price: Price, spending: Spending) -> dict[str, object]:
    low = {} if spending.delta is None else {"epsilon_low": number(price.loss.epsilon_low)}
    return {
        "ledger": price.part.ledger,
        "run": price.part.run,
        "rounds": price.part.rounds,
        "accountant": price.loss.accountant,
        **low,
        "epsilon": number(price.epsilon),
        "delta": price.delta,
        "bound": str(price.loss.bound),
        "relation": str(price.loss.relation),
        "assumptions": price.loss.assumptions,
    }
