"""A node's consent: limits of its own, against which it checks every offer."""

import hashlib
import json
import math
from collections.abc import Sequence, Set
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedpriv.accounting.accountants import sampling_text
from fedpriv.accounting.pricing import delta_for_population
from fedpriv.clients.worker import Built
from fedpriv.experiment.config import NonNegative, Positive, Section, checked, read_toml
from fedpriv.ledger.events import Unit
from fedpriv.support.logs import one_line
from fedpriv.training.request import CONTROL_PREFIX
from fedpriv.wire import Price, RoundOffer, Terms, Welcome, enrolment_digest, update_of
from fedpriv.wire.messages import LOCAL_TRAINING

_MOST_METRICS = 2**20  # components that a round may measure, however small the task
_ROUNDING = 1e-9  # relative error from splitting a norm or the noise among groups


class Consent(Section):
    """The limits within which a node takes part; None: no limit."""

    largest_clipping_norm: Positive | None = None  # how far a user may move the model: `reach_of`
    least_noise_multiplier: NonNegative | None = None  # of a whole round
    # Answers with sums in the last 24 hours; this also bounds how many of them contain one user.
    most_rounds_per_day: Annotated[int, Field(ge=0)] | None = None
    total_epsilon: Positive | None = None  # at `delta`, of all charges and the offered round
    delta: Annotated[float, Field(ge=1e-60, lt=1.0)] | None = None
    # Names or shell-style patterns (fnmatch); at least one must match.
    purposes: list[str] | None = None
    models: list[str] | None = None
    runs: list[str] | None = None
    tasks: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] | None = None  # their `task_hash`
    # The limits apply to each population separately. None: the one population in the node's
    # journal, or the first that the node joins.
    populations: list[str] | None = None
    trust: Literal["none"] | None = None  # "none": only rounds whose server need not be trusted
    # SHA-256 of the names, certificates and numbers of users of all nodes, which such rounds need.
    enrolment: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    least_colluding_nodes: Annotated[int, Field(ge=0)] = 0  # t of such rounds
    fixed_length: bool = False  # whether the node waits with the uploads of such rounds

    @model_validator(mode="after")
    def _check_delta(self) -> Self:
        if self.total_epsilon is not None and self.delta is None:
            setting = f"total_epsilon is {self.total_epsilon} without a delta"
            raise ValueError(f"{setting}; an ε says nothing without its δ, so delta must be given")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read limits from a TOML file, whose keys are the names of the attributes.

        InvalidValueError: the file cannot be read, or a key or value is invalid.
        """
        return checked(cls, read_toml(path), str(path))

    def delta_for(self, population: int) -> float:
        """Return the δ at which a node computes ε: its own, or the default of reports."""
        return delta_for_population(population) if self.delta is None else self.delta

    def objection_to_task(self, welcome: Welcome) -> str | None:
        """Return why the node does not train this model for this purpose, in one sentence, or None.

        Names are case-sensitive.
        """
        return _unlisted("purpose", welcome.purpose, self.purposes) or _unlisted(
            "model", welcome.task.model, self.models
        )

    def objection_to_settings(self, welcome: Welcome, terms: Terms) -> str | None:
        """Return why the node does not train by these settings in this run, or None."""
        if self.tasks is None or (digest := task_hash(welcome, terms)) in self.tasks:
            return _unlisted("run", terms.id.run, self.runs)
        return f"the task has the hash {digest}; this node's consent does not name it"

    def objection_to_population(self, name: str, joined: Set[str]) -> str | None:
        """Return why the node takes no part in this population, in one sentence, or None.

        `joined` are the names of the populations that it has taken part in. The ε spent under one
        name would not count under another.
        """
        if self.populations is not None:
            return _unlisted("population", name, self.populations)
        refusal = "the node knows another and consents to no more"
        return None if joined <= {name} else f"the population is {name!r}; {refusal}"

    def objection_to_nodes(self, welcome: Welcome, offer: Terms) -> str | None:
        """Return why the node does not take part with these nodes, in one sentence, or None."""
        event = offer.price.event
        if (secure := event.secure_sum) is None:
            trusting = "the server would have to be trusted; this node consents to trust none"
            return None if self.trust is None else trusting
        digest, users = enrolment_digest(welcome.nodes), sum(node.users for node in welcome.nodes)
        if digest != self.enrolment:
            return f"the enrolment has the digest {digest}; this node's consent does not name it"
        if users != event.sampling.population:
            return f"the enrolment has {users} users; N is {event.sampling.population}"
        if secure.colluding < (minimum := self.least_colluding_nodes):
            consents = f"this node consents to {minimum} or more"
            return f"{secure.colluding} nodes may collude with the server; {consents}"
        return None

    def objection_today(self, answers: int) -> str | None:
        """Return why the node sends no sum after `answers` in a day, in one sentence, or None."""
        limit = self.most_rounds_per_day
        if limit is not None and not answers < limit:
            return f"the node gives no more sums today; it consents to at most {limit} in a day"
        return None

    def objection(self, offer: Terms, epsilon_after: float | None = None) -> str | None:
        """Return why the node does not take part, in one sentence about no user, or None.

        Clipping norm and noise multiplier may exceed their limits by a relative 10⁻⁹, because sums
        over groups are rounded. NaN is an objection.

        `epsilon_after` is ε at `delta` of all charges and this round, computed by the node from the
        ledger. Without it, the node believes the server's ε, if its δ is not larger.
        """
        norm, maximum = reach_of(offer), self.largest_clipping_norm
        if maximum is not None and not norm <= maximum * (1.0 + _ROUNDING):
            return f"the clipping norm is {norm}; this node consents to at most {maximum}"
        price, minimum = offer.price, self.least_noise_multiplier
        # In the first round of a series; later rounds have at least as much noise (`RoundEvent`).
        noise = price.event.noise_multiplier / price.event.strategy[0]
        if minimum is not None and not noise >= minimum * (1.0 - _ROUNDING):
            return f"the noise multiplier is {noise}; this node consents to at least {minimum}"
        if price.seeded and (minimum or self.total_epsilon is not None):
            return "cohort and noise come from a seed; this node consents to secret noise"
        return self._objection_to_price(offer.price, epsilon_after)

    def _objection_to_price(self, price: Price, epsilon_after: float | None) -> str | None:
        total, delta = self.total_epsilon, self.delta
        if total is None or delta is None:
            return None
        if epsilon_after is None and not price.delta <= delta:
            consents = f"this node consents to ε at δ = {delta} or less"
            return f"ε is given at δ = {price.delta}; {consents}, as it has not read the ledger"
        epsilon = price.epsilon_after if epsilon_after is None else epsilon_after
        if epsilon <= total:
            return None
        return f"ε would be {epsilon}; this node consents to at most {total} at δ = {delta}"


def _unlisted(kind: str, name: str, patterns: Sequence[str] | None) -> str | None:
    if patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns):
        return None
    return f"the {kind} is {name!r}; this node consents to {patterns}"


def reach_of(offer: Terms) -> float:
    """Return how far one user can move the update at most, in the units of the model.

    This is √(Σ_g (S_g·max_j α_j)²) with the clipping norm S_g and the scales α_j of group g, over
    the groups with tensors of the update, excluding metrics and the indicator. If all scales are 1,
    it is the norm of the whole clipped update.
    """
    update, norms = update_of(offer), []
    for group in offer.clipping.groups:
        scaled = zip(group.tensors, group.scales, strict=True)
        scales = [scale for tensor, scale in scaled if tensor in update]
        if scales:
            norms.append(group.clipping_norm * max(scales))
    return math.hypot(*norms)


def described(welcome: Welcome, terms: Terms) -> dict[str, object]:
    """Return everything that determines what users compute and send, as JSON values.

    The learning rate and the clipping norms are left out: they may change from round to round, and
    the norms have a limit of their own. Running statistics follow from the task: `unlike`.
    """
    local: Any = LOCAL_TRAINING.encode(terms.local)
    settings = {"algorithm": local.algorithm, **json.loads(local.options)}
    del settings["learning_rate"]
    clipping, layout = asdict(terms.clipping), terms.clipping.layout
    clipping["layout"] = list(zip(layout.names, layout.shapes, strict=True))
    for group in clipping["groups"]:
        del group["clipping_norm"]
    return {
        "purpose": welcome.purpose,
        "task": asdict(welcome.task),
        "local": settings,
        "metrics": [asdict(metric) for metric in terms.metrics],
        "clipping": clipping,
    }


def task_hash(welcome: Welcome, terms: Terms) -> str:
    """Return the SHA-256 of `described`, as sorted JSON: 64 hexadecimal digits."""
    text = json.dumps(described(welcome, terms), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def review_of(welcome: Welcome, terms: Terms) -> str:
    """Return a task for a person to read, and the line of a consent that allows it."""
    lines, price, sampling = [], terms.price, sampling_text(terms.price.event.sampling)
    for section, content in described(welcome, terms).items():
        fields: dict[str, Any] = content if isinstance(content, dict) else {"": content}
        for name, value in fields.items():
            for item in value if isinstance(value, list | tuple) and value else [value]:
                text = one_line(json.dumps(item, ensure_ascii=False))
                lines.append(f"{f'{section} {name}'.strip()}: {text}")
    reach, noise = reach_of(terms), price.event.noise_multiplier
    hashed, pinned = task_hash(welcome, terms), list[str]()
    if price.event.secure_sum is not None:
        pinned = [f'enrolment = "{enrolment_digest(welcome.nodes)}"', "which pins these nodes:"]
        for node in welcome.nodes:
            name, certificate = one_line(node.name), node.fingerprint.hex()
            pinned.append(f"{name}, {node.users} users, certificate {certificate}")
    lines += [
        "",
        "Of the first round only, and limited by other keys of the consent:",
        f"learning rate {terms.local.rate}, clipping norm {reach}, noise multiplier {noise},",
        f"{sampling}, ε = {price.epsilon_after} at δ = {price.delta}",
        "",
        "To allow this task, put this line into the consent:",
        f'tasks = ["{hashed}"]',
    ]
    return "\n".join([*lines, *pinned])


def misfit(welcome: Welcome, offer: Terms) -> str | None:
    """Return why no node with this welcome can take part, regardless of its consent, or None."""
    sampling = offer.price.event.sampling
    if sampling.population != welcome.population:
        offered = f"the offer is of a population of {sampling.population}"
        return f"{offered}; the node was welcomed to one of {welcome.population}"
    if sampling.unit is not Unit.USER:
        protected = f"the offer protects each {sampling.unit}"
        return f"{protected}; a node takes part where each user is protected"
    if sampling.examples_per_user is not None:
        return "the offer draws examples of users; a node takes part where whole users are drawn"
    if isinstance(offer, RoundOffer) and not np.all(np.isin(offer.users, welcome.users)):
        return "the offer is to users that the node was not welcomed with"
    if offer.local.max_examples is None:
        condition = "the offer must say how many examples of a user count"
        return f"local.max_examples is absent; {condition}, so that no user takes the time of all"
    return _uncovered(offer)


def unlike(task: Built, terms: Terms) -> str | None:
    """Return why a round's tensors differ from those of this node's task, or None.

    So nothing larger than the task is downloaded or summed, except metrics, which have at most as
    many components as the task or 2²⁰. The indicator has one for each group (`Clipping`).
    """
    task_layout, requested = task.parameters, update_of(terms)
    metric_components = sum(math.prod(metric.shape) for metric in terms.metrics)
    limit = max(task_layout.dimension, _MOST_METRICS)
    if metric_components > limit:
        return f"metrics have {metric_components} components; this node's task allows {limit}"
    update = dict(zip(task_layout.names, task_layout.shapes, strict=True))
    if terms.local.control is not None:
        update |= {CONTROL_PREFIX + name: shape for name, shape in update.items()}
    if differing := sorted({name for name, _ in requested.items() ^ update.items()}):
        count = f"{len(differing)} tensors, as {differing[0]!r}"
        return f"the update has {count}, that differ from those of this node's task"
    return None


def _uncovered(offer: Terms) -> str | None:
    """Return why the event does not bound how far one user moves the requested sum, or None."""
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
