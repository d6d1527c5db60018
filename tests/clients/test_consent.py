"""What a node consents to, read from a file and held against offers."""

import json
import math
import tomllib
from collections.abc import MutableSequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from fedpriv import wire
from fedpriv.accounting.policies import (
    poisson_examples_gaussian,
    poisson_gaussian,
    separated_gaussian,
)
from fedpriv.clients.consent import (
    Consent,
    described,
    misfit,
    reach_of,
    review_of,
    task_hash,
    unlike,
)
from fedpriv.clients.worker import Built
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.experiment.grouping import equal_split
from fedpriv.ledger import Unit
from fedpriv.ledger.events import NeighbouringRelation
from fedpriv.privacy.clipping import UNCLIPPED, Clipping, Indicator
from fedpriv.privacy.correlated_noise import BandedStrategy, BufferedStrategy
from fedpriv.privacy.gaussian_mechanism import Averaging, Metric
from fedpriv.privacy.layout import Layout, VectorGroup, per_layer
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import RoundAttempt
from fedpriv.privacy.sampling import (
    BandedPoissonSampling,
    EveryUserSampling,
    FixedSizeSampling,
    RandomAllocationSampling,
    SeparatedSampling,
)
from fedpriv.training.local import ALGORITHMS, SGD, Scaffold
from fedpriv.training.optimizers import PolynomialDecay
from fedpriv.training.plan import AdaptiveClipping
from fedpriv.training.rounds import initial_state, round_request
from fedpriv.wire import (
    Price,
    RoundOffer,
    TaskDescription,
    Welcome,
)
from tests.training.federation import PARAMETERS, make_plan
from tests.wire import examples
from tests.wire.examples import covering, small_offer, small_request

SMALL = small_offer()
PRICED = replace(SMALL.price, event=covering(SMALL.price.event, SMALL.clipping))
OFFER = replace(SMALL, price=PRICED)
"""S = 1, z = 1, q = 0.5, N = 1000 and ε = 2 at δ = 1e-6; it asks for a metric and an indicator."""
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
WELCOME = Welcome(
    "people", 1000, np.array([1, 7, 300], np.int64), TaskDescription("m", {}, 0, "cross-entropy")
)


def with_price(**fields):
    return replace(OFFER, price=replace(OFFER.price, **fields))


def with_strategy(*coefficients):
    """A series of four rounds, each user in one, whose noise is correlated so."""
    made = separated_gaussian((1.0,), 4, 1, 4, 1.0, ADD_OR_REMOVE, population=1000)
    return replace(made, strategy=coefficients)


def with_groups(*groups):
    """The offer with the tensors w, b, metrics/accuracy and unclipped in these groups."""
    indicator = Indicator("unclipped", (groups[0].name,))
    layout = OFFER.clipping.layout
    return replace(OFFER, clipping=Clipping(layout, groups, indicator))


_TWO = (VectorGroup("x", ("w",), 3.0, (0.5,)), VectorGroup("y", ("b",), 0.3, (1.0,)))
PLANS = {
    "flat": {},
    "groups": {"groups": _TWO, "noise_shares": (0.9, 0.1)},
    "metrics": {"metrics": (Metric("m", (2,), 0.5, 0.7),), "metrics_share": 0.1},
    "contributors": {"contributors_share": 0.1},
    "adaptive": {"groups": _TWO, "noise_shares": (0.5, 0.5), "adaptive": AdaptiveClipping()},
    "control": {"local": Scaffold(0.1, steps=1, control_norm=0.5, max_examples=9)},
    "weights": {"averaging": Averaging(4, 11.0)},
    "floor": {"averaging": Averaging(floor=0.5)},
    "weights with a floor": {
        "averaging": Averaging(4, 11.0, 0.5),
        "metrics": (Metric("m"),),
        "metrics_share": 0.1,
    },
    "fixed size": {"sampling": FixedSizeSampling(20, 7)},
    "everybody": {"sampling": EveryUserSampling(20, NeighbouringRelation.REPLACE_ONE)},
    "allocation": {"sampling": RandomAllocationSampling(20, 4, 2)},
    "banded": {
        "sampling": SeparatedSampling(20, 4, 2),
        "strategy": BandedStrategy((1.0, 0.5)),
    },
    "buffered": {
        "sampling": SeparatedSampling(20, 4, 2),
        "strategy": BufferedStrategy((0.875, 0.5), (0.25, 0.375)),
        "metrics": (Metric("m"),),
        "metrics_share": 0.1,
    },
    "within bands": {"sampling": BandedPoissonSampling(20, 4, 2, 0.5)},
}
PLANS = {name: {"local": SGD(0.1, steps=1, max_examples=9), **plan} for name, plan in PLANS.items()}


METRIC = VectorGroup("metrics/accuracy", ("metrics/accuracy",), 77.0, (1.0,))
COUNTING = Indicator("unclipped", ("update",)).group


class TestLoading:
    def load(self, tmp_path, text):
        path = tmp_path / "consent.toml"
        path.write_text(text, encoding="utf-8")
        return Consent.load(path)

    def test_all_keys(self, tmp_path):
        assert self.load(
            tmp_path,
            "largest_clipping_norm = 1\nleast_noise_multiplier = 0.5\nmost_rounds_per_day = 9\n"
            "total_epsilon = 8.0\ndelta = 1e-5\n",
        ) == Consent(
            largest_clipping_norm=1.0,
            least_noise_multiplier=0.5,
            most_rounds_per_day=9,
            total_epsilon=8.0,
            delta=1e-5,
        )

    def test_an_empty_file_limits_nothing(self, tmp_path):
        assert self.load(tmp_path, "") == Consent()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("largest_clip_norm = 1", "unknown key largest_clip_norm; did you mean "
             "'largest_clipping_norm'?"),
            ("total_epsilon = 1.0", "total_epsilon is 1.0 without a delta"),
            ("total_epsilon = 0\ndelta = 0.1", "total_epsilon is 0"),
            ("total_epsilon = inf\ndelta = 0.1", "total_epsilon is inf"),
            ("delta = 0.0", "delta is 0.0"),
            ("delta = 1.0", "delta is 1.0"),
            ("delta = nan", "delta is nan; "),
            ("least_noise_multiplier = -1", "least_noise_multiplier is -1; "),
            ("least_noise_multiplier = nan", "least_noise_multiplier is nan; "),
            ("largest_clipping_norm = true", "largest_clipping_norm is True; "),
            ('largest_clipping_norm = "1"', "largest_clipping_norm is '1'; "),
            ("largest_clipping_norm = inf", "largest_clipping_norm is inf; "),
            ("most_rounds_per_day = 1.5", "most_rounds_per_day is 1.5; "),
            ("most_rounds_per_day = -1", "most_rounds_per_day is -1; "),
            ("delta 1", "is not valid TOML: "),
            ("tasks = ['abc']", "tasks.0 is 'abc'; it must be a hash of 64 digits"),
        ],
    )  # fmt: skip
    def test_what_is_not_legal_is_one_sentence(self, tmp_path, text, message):
        with pytest.raises(InvalidValueError) as error:
            self.load(tmp_path, text)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
        assert str(tmp_path / "consent.toml") in str(error.value)

    def test_files_that_are_none_are_refused(self, tmp_path):
        with pytest.raises(InvalidValueError, match="cannot be read: No such file"):
            Consent.load(tmp_path / "absent")
        (tmp_path / "bytes").write_bytes(b"\xff")
        with pytest.raises(InvalidValueError, match="is not valid TOML"):
            Consent.load(tmp_path / "bytes")

    def test_it_is_frozen(self):
        with pytest.raises(ValidationError, match="frozen"):
            Consent().delta = 0.5

    def test_delta_is_its_own_or_the_default_of_reports(self):
        assert Consent(delta=0.25).delta_for(1000) == 0.25
        assert Consent().delta_for(999) == 1e-3
        assert Consent().delta_for(1000) == 1e-4
        assert Consent().delta_for(1) == 0.1


class TestObjections:
    def test_without_limits_there_is_none(self):
        bare = poisson_gaussian(0.5, 0.0, population=1000)
        worst = with_price(event=bare, epsilon_after=math.inf, delta=0.9, seeded=True)
        assert Consent().objection(worst, math.nan) is None

    @pytest.mark.parametrize(
        ("consent", "legal", "illegal", "message"),
        [
            (
                Consent(largest_clipping_norm=1.0),
                (OFFER, None),
                (with_groups(VectorGroup("u", ("w", "b"), 1.1, (1.0, 1.0)), METRIC, COUNTING),
                 None),
                "the clipping norm is 1.1; this node consents to at most 1.0",
            ),
            (
                Consent(least_noise_multiplier=1.0),
                (OFFER, None),
                (with_price(event=poisson_gaussian(0.5, 0.99, population=1000)), None),
                "the noise multiplier is 0.99; this node consents to at least 1.0",
            ),
            (
                Consent(least_noise_multiplier=1.0),
                (with_price(event=with_strategy(1.0, 0.5)), None),
                (with_price(event=with_strategy(4.0, 2.0)), None),  # the same, a quarter of it
                "the noise multiplier is 0.25; this node consents to at least 1.0",
            ),
            (
                Consent(least_noise_multiplier=1.0),
                (OFFER, None),
                (with_price(seeded=True), None),
                "cohort and noise come from a seed; this node consents to secret noise",
            ),
            (
                Consent(total_epsilon=2.0, delta=1e-6),
                (OFFER, 1.0),
                (with_price(seeded=True), 1.0),
                "cohort and noise come from a seed; this node consents to secret noise",
            ),
            (
                Consent(total_epsilon=2.0, delta=1e-6),
                (OFFER, None),
                (with_price(epsilon_after=2.01), None),
                "ε would be 2.01; this node consents to at most 2.0 at δ = 1e-06",
            ),
            (
                Consent(total_epsilon=2.0, delta=1e-7),
                (with_price(delta=1e-8), None),
                (OFFER, None),
                "ε is given at δ = 1e-06; this node consents to ε at δ = 1e-07 or less, as it has "
                "not read the ledger",
            ),
            (
                Consent(total_epsilon=2.0, delta=1e-7),
                (OFFER, 2.0),  # its own reading: what the server says does not matter
                (with_price(epsilon_after=0.0), 2.5),
                "ε would be 2.5; this node consents to at most 2.0 at δ = 1e-07",
            ),
            (
                Consent(total_epsilon=2.0, delta=1e-7),
                (with_price(epsilon_after=math.inf, delta=0.5), 1.0),
                (OFFER, math.nan),
                "ε would be nan; this node consents to at most 2.0 at δ = 1e-07",
            ),
            (
                Consent(total_epsilon=2.0, delta=1e-6),
                (OFFER, 0.0),
                (OFFER, math.inf),
                "ε would be inf; this node consents to at most 2.0 at δ = 1e-06",
            ),
        ],
    )  # fmt: skip
    def test_each_limit_is_held(self, consent, legal, illegal, message):
        assert consent.objection(*legal) is None
        assert consent.objection(*illegal) == message

    def test_the_first_objection_is_given(self):
        strict = Consent(
            largest_clipping_norm=0.1, least_noise_multiplier=9.0,
            total_epsilon=0.1, delta=1e-6,
        )  # fmt: skip
        assert strict.objection(OFFER).startswith("the clipping norm")
        without = strict.model_copy(update={"largest_clipping_norm": None})
        assert without.objection(OFFER).startswith("the noise multiplier")
        assert not any(str(user) in strict.objection(OFFER) for user in OFFER.users[1:])

    def test_an_offer_that_was_made_around_its_checks_is_objected_to(self):
        broken = deepcopy(OFFER)
        queries = broken.price.event.queries
        object.__setattr__(queries[0], "noise_stddev", math.nan)
        object.__setattr__(broken.price, "epsilon_after", math.nan)
        assert "is nan" in Consent(least_noise_multiplier=0.0).objection(broken)
        assert "nan" in Consent(total_epsilon=9.0, delta=0.5).objection(broken)
        object.__setattr__(broken.price, "delta", math.nan)
        assert "δ = nan" in Consent(total_epsilon=9.0, delta=0.5).objection(broken)

    def test_answers_of_a_day_are_limited(self):
        assert Consent().objection_today(10**6) is None
        assert Consent(most_rounds_per_day=3).objection_today(2) is None
        assert Consent(most_rounds_per_day=3).objection_today(3) == (
            "the node gives no more sums today; it consents to at most 3 in a day"
        )

    @pytest.mark.parametrize(
        ("key", "patterns", "agrees"),
        [
            ("purposes", ["readmission"], True),
            ("purposes", ["Readmission"], False),
            ("purposes", [], False),
            ("models", ["softmax", "mlp"], True),
            ("models", ["vendor.*:*"], False),
            ("runs", ["r*-?"], True),
            ("runs", ["r"], False),
        ],
    )
    def test_purposes_models_and_runs_are_named_or_match(self, key, patterns, agrees):
        task = TaskDescription("softmax", {}, 0, "cross-entropy")
        welcome = Welcome("people", 1000, np.array([4]), task, "readmission")
        consent = Consent(**{key: patterns})
        terms = replace(OFFER, id=replace(OFFER.id, run="run-7"))
        objection = consent.objection_to_task(welcome)
        objection = objection or consent.objection_to_settings(welcome, terms)
        assert (objection is None) == agrees
        if objection:
            assert objection.startswith(f"the {key[:-1]} is '")
            assert objection.endswith(f"this node consents to {patterns}")
        assert Consent().objection_to_task(welcome) is None
        assert Consent().objection_to_settings(welcome, terms) is None

    @pytest.mark.parametrize(
        ("populations", "known", "objection"),
        [
            (None, set(), None),
            (None, {"people"}, None),
            (None, {"others"}, "the node knows another and consents to no more"),
            (None, {"people", "others"}, "the node knows another and consents to no more"),
            (["p*"], {"others"}, None),
            (["others"], set(), "this node consents to ['others']"),
        ],
    )
    def test_one_population_or_those_that_are_named(self, populations, known, objection):
        found = Consent(populations=populations).objection_to_population("people", known)
        assert found == (objection and f"the population is 'people'; {objection}")

    def test_a_norm_split_among_groups_is_not_objected_to_for_its_rounding(self):
        layout, norm = Layout(tuple("abc"), ((), (), ())), 0.25
        parts = {name: (name,) for name in "abc"}
        groups = per_layer(layout, parts, equal_split(parts, norm))
        request = replace(
            small_request(),
            parameters=dict.fromkeys("abc", np.zeros((), np.float32)),
            clipping=Clipping(layout, groups),
            metrics=(),
        )
        offer = RoundOffer.of(request, 1.0, OFFER.price)
        assert norm < reach_of(offer) < norm * (1.0 + 1e-15)
        assert Consent(largest_clipping_norm=norm).objection(offer) is None
        assert Consent(largest_clipping_norm=norm * 0.999999).objection(offer)


class TestReach:
    """How far the update moves at most: the longest that clipping lets through."""

    @pytest.mark.parametrize(
        "groups",
        [
            (VectorGroup("u", ("w", "b"), 3.0, (1.0, 1.0)), METRIC, COUNTING),
            (VectorGroup("x", ("w",), 3.0, (1.0,)), VectorGroup("y", ("b",), 4.0, (1.0,)), METRIC,
             COUNTING),
            (VectorGroup("u", ("w", "b"), 3.0, (0.25, 2.0)), METRIC, COUNTING),
            (VectorGroup("x", ("w", "metrics/accuracy"), 3.0, (1.0, 50.0)),
             VectorGroup("y", ("b",), 4.0, (0.5,)), COUNTING),
        ],
    )  # fmt: skip
    def test_is_the_longest_update_that_is_not_clipped(self, groups):
        offer = with_groups(*groups)
        clipping = offer.clipping
        longest = 0.0
        for tensors in ((w, b) for w in np.eye(5)[:, :4] for b in np.eye(4)[:, :3]):
            update = {"w": tensors[0].reshape(2, 2) * 1e9, "b": tensors[1] * 1e9}
            vector = clipping.contribution({**update, "metrics/accuracy": np.zeros(())})
            moved = clipping.layout.unflatten(clipping.in_units(vector))
            longest = max(longest, math.hypot(*moved["w"].ravel(), *moved["b"]))
        # What is sent is cut off to whole steps, of 2^-24 of the norm or less.
        assert 1.0 - 2.0**-21 < longest / reach_of(offer) <= 1.0 + 1e-15


class TestMisfits:
    def test_an_offer_of_the_welcome_fits(self):
        assert misfit(WELCOME, OFFER) is None

    @pytest.mark.parametrize("plan", PLANS)
    def test_what_an_honest_server_charges_covers_what_it_clips(self, plan):
        plan = make_plan(**PLANS[plan])
        state = initial_state(plan, PARAMETERS)
        norms = tuple(0.7 * norm for norm in state.clipping_norms)
        for each in (state, replace(state, clipping_norms=norms)):
            users, entropy = np.arange(3), OperatingSystemEntropy()
            request = round_request(plan, each, RoundAttempt("run", 1, 0), users, entropy)
            event = plan.mechanism_at(each.clipping_norms).event
            price = Price(event, 0, 1.0, 1e-5, 0)
            sent = RoundOffer.of(request, 9.0, price)
            offer = wire.OFFER.decode(wire.OFFER.encode(sent))
            everyone = np.arange(plan.sampling.population)
            welcome = Welcome("people", plan.sampling.population, everyone, WELCOME.task)
            assert misfit(welcome, offer) is None
            for number, group in enumerate(offer.clipping.groups):
                if group.name == UNCLIPPED:  # its norm is that of its components
                    continue
                wider = replace(group, clipping_norm=4.0 * group.clipping_norm)
                groups = list(offer.clipping.groups)
                groups[number] = wider
                clipping = replace(offer.clipping, groups=tuple(groups))
                assert misfit(welcome, replace(offer, clipping=clipping)).startswith(
                    f"the offer clips vector group {group.name!r} to {wider.clipping_norm}; its "
                )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda qs: qs[:-1], "the offer clips other vector groups than its event charges for"),
            (lambda qs: (*qs, qs[0]), "the offer clips other vector groups"),
            (lambda qs: qs[::-1], "the offer clips other vector groups"),
            (lambda qs: (replace(qs[0], group="other"), *qs[1:]), "the offer clips other vector"),
            (lambda qs: (replace(qs[0], clipping_norm=0.999), *qs[1:]),
             "the offer clips vector group 'update' to 1.0; its event charges for 0.999"),
            (lambda qs: (replace(qs[0], granularity=0.5), *qs[1:]),
             "; its event charges for steps of 0.5"),
        ],
    )  # fmt: skip
    def test_an_event_that_does_not_cover_the_clipping_does_not(self, change, message):
        event = OFFER.price.event
        other = with_price(event=replace(event, queries=change(event.queries)))
        assert message in misfit(WELCOME, other)
        real = tuple(replace(query, granularity=None) for query in event.queries)
        assert misfit(WELCOME, with_price(event=replace(event, queries=real))) is None

    def test_an_offer_of_another_population_does_not(self):
        assert misfit(WELCOME, with_price(event=poisson_gaussian(0.5, 1.0, population=1001))) == (
            "the offer is of a population of 1001; the node was welcomed to one of 1000"
        )

    def test_an_offer_that_protects_other_than_users_does_not(self):
        event = OFFER.price.event
        of_rows = replace(event, sampling=replace(event.sampling, unit=Unit.EXAMPLE))
        assert misfit(WELCOME, with_price(event=of_rows)) == (
            "the offer protects each example; a node takes part where each user is protected"
        )

    def test_an_offer_that_draws_examples_of_users_does_not(self):
        event = poisson_examples_gaussian(0.5, 4, 1.0, population=1000)
        assert misfit(WELCOME, with_price(event=event)) == (
            "the offer draws examples of users; a node takes part where whole users are drawn"
        )

    @pytest.mark.parametrize("users", [[0], [1, 2], [1, 300, 999]])
    def test_an_offer_to_other_users_does_not_and_nobody_is_named(self, users):
        found = misfit(WELCOME, replace(OFFER, users=np.array(users, np.int64)))
        assert found == "the offer is to users that the node was not welcomed with"

    def test_an_offer_that_does_not_bound_the_work_of_a_user_does_not(self):
        endless = replace(OFFER, local=replace(OFFER.local, max_examples=None))
        assert misfit(WELCOME, endless) == (
            "local.max_examples is absent; the offer must say how many examples of a user count, "
            "so that no user takes the time of all"
        )


def built(parameters=PARAMETERS, statistics=()):
    return Built(Layout.of(parameters), Layout.of(dict(statistics)))


def asked(request, price=SMALL.price):
    """Proposal and offer of a request."""
    offered = RoundOffer.of(request, 9.0, price)
    return wire.Proposal.of(request, price), offered


class TestTensors:
    @pytest.mark.parametrize("plan", PLANS)
    def test_those_of_the_task_are_asked_for_by_every_plan_and_no_others(self, plan):
        plan = make_plan(**PLANS[plan])
        state = initial_state(plan, PARAMETERS)
        request = round_request(
            plan, state, RoundAttempt("run", 1, 0), np.arange(3), OperatingSystemEntropy()
        )
        first = next(iter(PARAMETERS))
        longer = PARAMETERS | {first: np.zeros((*PARAMETERS[first].shape, 2), np.float32)}
        fewer = {name: tensor for name, tensor in PARAMETERS.items() if name != first}
        for terms in asked(request):
            assert unlike(built(), terms) is None
            for other in (longer, fewer, PARAMETERS | {"more": np.zeros(1, np.float32)}):
                assert "differ from those of this node's task" in unlike(built(other), terms)

    def test_the_model_is_the_update_and_the_running_statistics_of_the_task(self):
        task = built(small_request().parameters, {"bn.mean": np.zeros(2, np.float32)})
        proposal, offer = asked(small_request())
        assert unlike(task, proposal) is unlike(task, offer) is None
        assert offer.model(task.statistics).names == ("w", "b", "bn.mean")

    @pytest.mark.parametrize(("size", "allowed"), [(3, False), (2**20, False), (2**21, True)])
    def test_a_round_measures_at_most_as_much_as_it_trains(self, size, allowed):
        metric = Metric("m", (2**20 + 1,))
        layout = Layout(("w", metric.tensor), ((size,), metric.shape))
        groups = (VectorGroup.single("w", 1.0), metric.group)
        proposal = asked(small_request())[0]
        changed = {"clipping": Clipping(layout, groups), "metrics": (metric,)}
        found = unlike(built({"w": np.zeros(size)}), replace(proposal, **changed))
        refusal = "metrics have 1048577 components; this node's task allows 1048576"
        assert found == (None if allowed else refusal)


def leaves(message, path=()):
    """Each field of a message, or of one inside it, that holds no message: its path and owner."""
    for field in message.DESCRIPTOR.fields:
        content = getattr(message, field.name)
        if field.message_type is None:
            yield (*path, field.name), message, field
        elif isinstance(content, MutableSequence):
            for inner in content:
                yield from leaves(inner, (*path, field.name))
        elif message.HasField(field.name):
            yield from leaves(content, (*path, field.name))


def others(content):
    """Values that differ from a field's content a little."""
    match content:
        case MutableSequence():
            for number, element in enumerate(content):
                for other in others(element):
                    yield [*content[:number], other, *content[number + 1 :]]
            yield content[:-1] if len(content) else [1]
            yield [*content, *content[-1:]] if len(content) else ["w"]
        case str():
            yield content + "x"
            yield from (name for name in (*ALGORITHMS, "w", "update") if name != content)
            if content.startswith("{"):
                options = json.loads(content)
                for key, value in {**options, "momentum": 0.25, "weight_decay": 0.5}.items():
                    for other in [*others(value), 3, None]:
                        yield json.dumps(options | {key: other})
        case bool() | None:
            yield not content
        case int():
            yield content + 1
        case float():
            yield content * 1.5 + 0.25
        case bytes():
            yield bytes(len(content)) if any(content) else b"1" * len(content)


def variants(message):
    """The message with one field changed: the path of the field, and the result."""
    data = message.SerializeToString()
    for number, (path, owner, field) in enumerate([*leaves(message)]):
        for other in others(getattr(owner, field.name)):
            copy = type(message).FromString(data)
            _, changed, _ = [*leaves(copy)][number]
            with suppress(TypeError, ValueError):
                changed.ClearField(field.name)
                if isinstance(other, list | MutableSequence):
                    getattr(changed, field.name).extend(other)
                else:
                    setattr(changed, field.name, other)
                yield ".".join(path), copy


FREE = {"id.run", "id.round", "id.attempt", "id.nonce", "groups.clipping_norm", "population",
        "population_name", "users", "price.event", "price.epsilon_after", "price.delta",
        "price.charges", "price.part", "price.seeded"}  # fmt: skip


class TestHash:
    def changed(self, welcome, proposal):
        """Names of fields that change the hash, and of those that do not."""
        before, kinds = task_hash(welcome, proposal), ({}, {})
        for path, message in variants(wire.PROPOSAL.encode(proposal)):
            with suppress(WireError):
                other = wire.PROPOSAL.decode(message)
                if other.local.rate == proposal.local.rate and other != proposal:
                    name = path.removeprefix("clipping.")
                    kinds[task_hash(welcome, other) == before].setdefault(name, other)
        for path, message in variants(wire.WELCOME.encode(welcome)):
            with suppress(WireError):
                other = wire.WELCOME.decode(message)
                if (other.task, other.purpose) != (welcome.task, welcome.purpose):
                    kinds[task_hash(other, proposal) == before].setdefault(path, other)
        return kinds

    def test_it_changes_with_every_field_of_a_task(self):
        task = TaskDescription("m", {"width": 3}, 1, "mse", ("a:b",), "x", "y", -100, ("p",),
                               ("t",), ("f",), {"rank": 2})  # fmt: skip
        welcome = replace(WELCOME, task=task, purpose="to heal")
        metric = Metric("accuracy", (2,), 0.5, 0.5, (1.0,))
        layout = Layout(("w", "b", metric.tensor, "unclipped"), ((2, 2), (3,), (2,), (1,)))
        groups = (
            VectorGroup("update", ("w", "b"), 1.0, (1.0, 0.5)),
            metric.group,
            Indicator("unclipped", ("update",)).group,
        )
        clipping = Clipping(layout, groups, Indicator("unclipped", ("update",)), ("update",), 20)
        proposal = replace(asked(small_request())[0], clipping=clipping, metrics=(metric,))
        hashed, free = self.changed(welcome, proposal)
        assert set(free) <= FREE
        assert set(hashed) >= {
            *(f"task.{name}" for name in vars(task)),
            "purpose", "local.algorithm", "local.options", "metrics.centre", "metrics.options",
            "layout.shapes.sizes", "groups.scales", "weighted", "weight_cap",
        }  # fmt: skip

    @settings(max_examples=15, deadline=None)
    @given(examples.welcomes, examples.offers())
    def test_it_changes_with_every_field_whatever_the_task(self, welcome, offer):
        hashed, free = self.changed(welcome, wire.Proposal.of(offer, offer.price))
        assert set(free) <= FREE
        assert hashed

    @pytest.mark.parametrize("plan", PLANS)
    def test_it_is_the_same_in_all_rounds_for_offers_and_proposals(self, plan):
        rate = {"local": replace(PLANS[plan]["local"], learning_rate=PolynomialDecay(0.5, 0.1, 9))}
        plan = make_plan(**PLANS[plan] | rate)
        state, hashes = initial_state(plan, PARAMETERS), set()
        for number in range(3):
            norms = tuple(norm * 0.9**number for norm in state.clipping_norms)
            at, users = RoundAttempt("run", number + 1, number), np.arange(3)
            request = round_request(
                plan, replace(state, clipping_norms=norms), at, users, OperatingSystemEntropy()
            )
            hashes |= {task_hash(WELCOME, terms) for terms in asked(request)}
        assert len(hashes) == 1

    def test_a_review_shows_all_that_is_hashed_and_no_control_characters(self):
        task = replace(WELCOME.task, options={"width": 3, "\x1b[2K": "\u202e"})
        welcome = replace(WELCOME, task=task, purpose="to\nheal")
        text = review_of(welcome, OFFER)
        hashed = described(welcome, OFFER)
        for section in ("task", "local", "clipping"):
            for name in hashed[section]:
                assert f"\n{section} {name}: " in text
        assert all(tensor in text for tensor in OFFER.clipping.layout.names)
        assert all(line.isprintable() for line in text.split("\n"))
        line = text.split("\n")[-1]
        assert line == f'tasks = ["{task_hash(welcome, OFFER)}"]'
        consent = Consent(**tomllib.loads(line))
        assert consent.objection_to_settings(welcome, OFFER) is None
        assert "consent does not name it" in consent.objection_to_settings(WELCOME, OFFER)
        assert Consent().objection_to_settings(WELCOME, OFFER) is None

    @pytest.mark.parametrize("text", ["", "0" * 63, "G" * 64, "0" * 64 + "\n", "A" * 64])
    def test_what_is_no_hash_is_refused(self, text):
        with pytest.raises(ValidationError, match="tasks"):
            Consent(tasks=[text])
