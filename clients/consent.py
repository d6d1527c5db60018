"""What a node consents to: limits of its own, to which it holds every offer."""

import math
from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from fedpriv.accounting.pricing import delta_for_population
from fedpriv.experiment.config import NonNegative, Positive, Section, checked, read_toml
from fedpriv.ledger.events import Unit
from fedpriv.wire import Price, RoundOffer, Terms, Welcome

_ROUNDING = 1e-9  # relative; splitting a norm or the noise among groups may make such a difference


class Consent(Section):
    """The limits within which a node takes part; an absent one limits nothing."""

    largest_clipping_norm: Positive | None = None  # how far a user may move it, see `reach_of`
    least_noise_multiplier: NonNegative | None = None  # of a whole round
    # Answers with sums in the last 24 hours, and so the most of any user.
    most_rounds_per_day: Annotated[int, Field(ge=0)] | None = None
    total_epsilon: Positive | None = None  # at `delta`, of all charges and the offered round
    delta: Annotated[float, Field(ge=1e-60, lt=1.0)] | None = None
    # Names or shell-style patterns (fnmatch), of which one must match.
    purposes: list[str] | None = None
    models: list[str] | None = None
    runs: list[str] | None = None
    # Each has a limit of its own; if absent, the one that the node's journal knows, or the first.
    populations: list[str] | None = None

    @model_validator(mode="after")
    def _must_have_a_delta(self) -> Self:
        if self.total_epsilon is not None and self.delta is None:
            given = f"total_epsilon is {self.total_epsilon} without a delta"
            raise ValueError(f"{given}; an ε says nothing without its δ, so delta must be given")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read limits from TOML, by the names of the attributes."""
        return checked(cls, read_toml(path), str(path))

    def delta_for(self, population: int) -> float:
        """δ at which a node of this population asks for ε: its own, or the default of reports."""
        return delta_for_population(population) if self.delta is None else self.delta

    def objection_to_task(self, welcome: Welcome) -> str | None:
        """Why the node trains no such model, or none for this purpose, in one sentence, or None.

        Upper and lower case differ.
        """
        return _unlisted("purpose", welcome.purpose, self.purposes) or _unlisted(
            "model", welcome.task.model, self.models
        )

    def objection_to_run(self, run: str) -> str | None:
        """Why the node has no part in a run of this name, as `objection_to_task`."""
        return _unlisted("run", run, self.runs)

    def objection_to_population(self, name: str, known: Set[str]) -> str | None:
        """Why the node has no part in this population, in one sentence, or None.

        What was spent under a name that the node knows would not count for another.
        """
        if self.populations is not None:
            return _unlisted("population", name, self.populations)
        others = "the node knows another and consents to no more"
        return None if known <= {name} else f"the population is {name!r}; {others}"

    def objection_today(self, answers: int) -> str | None:
        """Why the node gives no more answers after so many in a day, in one sentence, or None."""
        most = self.most_rounds_per_day
        if most is not None and not answers < most:
            return f"the node gives no more sums today; it consents to at most {most} in a day"
        return None

    def objection(self, offer: Terms, epsilon_after: float | None = None) -> str | None:
        """Why the node does not take part, in one sentence that says nothing of users, or None.

        Clipping norm and noise multiplier may miss their limits by the rounding of sums over
        groups, one part in 10⁹. Whatever cannot be compared, NaN, is an objection.

        `epsilon_after` is ε at `delta` of all charges and this round, from the node's own reading
        of the ledger; without it the server's word counts, if it is given at no larger δ.
        """
        norm, largest = reach_of(offer), self.largest_clipping_norm
        if largest is not None and not norm <= largest * (1.0 + _ROUNDING):
            return f"the clipping norm is {norm}; this node consents to at most {largest}"
        price, least = offer.price, self.least_noise_multiplier
        # Of the first round of a series; later ones have no less, see `RoundEvent`.
        noise = price.noise_multiplier / price.event.strategy[0]
        if least is not None and not noise >= least * (1.0 - _ROUNDING):
            return f"the noise multiplier is {noise}; this node consents to at least {least}"
        if price.seeded and (least or self.total_epsilon is not None):
            return "cohort and noise come from a seed; this node consents to secret noise"
        return self._objection_to_price(offer.price, epsilon_after)

    def _objection_to_price(self, price: Price, epsilon_after: float | None) -> str | None:
        total, delta = self.total_epsilon, self.delta
        if total is None or delta is None:
            return None
        if epsilon_after is None and not price.delta <= delta:
            consents = f"this node consents to ε at δ = {delta} or less"
            return f"ε is given at δ = {price.delta}; {consents}, as it has not read the ledger"
        after = price.epsilon_after if epsilon_after is None else epsilon_after
        if after <= total:
            return None
        return f"ε would be {after}; this node consents to at most {total} at δ = {delta}"


def _unlisted(what: str, name: str, patterns: Sequence[str] | None) -> str | None:
    if patterns is None or any(fnmatchcase(name, each) for each in patterns):
        return None
    return f"the {what} is {name!r}; this node consents to {patterns}"


def reach_of(offer: Terms) -> float:
    """How far one user can move the update at most, in the units of the model.

    With S_g the clipping norm and α_j the scales of group g, √(Σ_g (S_g·max_j α_j)²) over the
    groups that hold tensors of the update; not those of metrics alone or of the indicator. Without
    scales it is the norm of the whole clipped update.
    """
    clipping = offer.clipping
    apart, norms = {metric.tensor for metric in offer.metrics}, []
    if clipping.indicator is not None:
        apart.add(clipping.indicator.tensor)
    for group in clipping.groups:
        scaled = zip(group.tensors, group.scales, strict=True)
        scales = [scale for tensor, scale in scaled if tensor not in apart]
        if scales:
            norms.append(group.clipping_norm * max(scales))
    return math.hypot(*norms)


def misfit(welcome: Welcome, offer: Terms) -> str | None:
    """Why no node can take part in a round, whatever it consents to, or None."""
    if offer.price.population != welcome.population:
        offered = f"the offer is of a population of {offer.price.population}"
        return f"{offered}; the node was welcomed to one of {welcome.population}"
    drawn = offer.price.event.sampling
    if drawn.unit is not Unit.USER:
        protected = f"the offer protects each {drawn.unit}"
        return f"{protected}; a node takes part where each user is protected"
    if drawn.examples_per_user is not None:
        return "the offer draws examples of users; a node takes part where whole users are drawn"
    if isinstance(offer, RoundOffer) and not np.all(np.isin(offer.users, welcome.users)):
        return "the offer is to users that the node was not welcomed with"
    if offer.local.max_examples is None:
        legal = "the offer must say how many examples of a user count"
        return f"local.max_examples is absent; {legal}, so that no user takes the time of all"
    return _uncovered(offer)


def _uncovered(offer: Terms) -> str | None:
    """Why the event does not bound how far one user moves the sum that the offer asks for."""
    groups, queries = offer.clipping.groups, offer.price.event.queries
    if [query.group for query in queries] != [group.name for group in groups]:
        return "the offer clips other vector groups than its event charges for"
    for group, query in zip(groups, queries, strict=True):
        clipped = f"the offer clips vector group {group.name!r} to {group.clipping_norm}"
        if not group.clipping_norm <= query.clipping_norm:
            return f"{clipped}; its event charges for {query.clipping_norm}"
        if query.granularity not in (None, group.granularity):  # None: noise of real numbers
            steps = f"in steps of {group.granularity}"
            return f"{clipped} {steps}; its event charges for steps of {query.granularity}"
    return None
